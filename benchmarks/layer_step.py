"""The steps of an experts layer, whoever made it: forward without a graph, forward and backward, what is judged.

Legend: T tokens of this rank, K experts per token, D model dim, F expert hidden dim, e experts of this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from benchmarks.layer_case import LayerData
from benchmarks.layer_truth import digest
from benchmarks.subject import BOTH, FORWARD, Subject

Layer = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(x [T, D], ids [T, K], w [T, K]) -> [T, D]"""


def layer_subject(
    layer: Layer,
    data: LayerData,
    params: Sequence[Tensor],
    gradients: Callable[[], Sequence[Tensor]],
    *,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    accumulate: bool = False,
    facts: Mapping[str, Any] | None = None,
) -> Subject:
    """params: the layer's, all of them. gradients: those of up [e, 2F, D] and down [e, D, F], and of their biases,
    wherever they are.

    autocast: what each forward runs under. accumulate: each step's gradients are added to `.grad` of the parameters.
    """

    def forward() -> None:
        with torch.no_grad(), autocast():
            layer(data.x_TD, data.ids_TK, data.w_TK)

    def run(d: LayerData) -> Tensor:
        with autocast():
            y = layer(d.x_TD, d.ids_TK, d.w_TK)
        y.backward(d.dy_TD)  # type: ignore[no-untyped-call]
        return y

    def clear(d: LayerData) -> None:
        d.x_TD.grad = d.w_TK.grad = None
        for param in () if accumulate else params:
            param.grad = None

    def both() -> None:
        run(data)
        clear(data)

    def outcome() -> dict[str, Tensor]:
        for param in params:
            for total in (param.grad, getattr(param, "main_grad", None)):
                if total is not None:
                    total.zero_()
        y = run(data)
        assert data.x_TD.grad is not None
        assert data.w_TK.grad is not None
        found = digest(y, data.x_TD.grad, data.w_TK.grad, *gradients())
        clear(data)
        return found

    held = sum(t.nbytes for t in (data.x_TD, data.w_TK, *params))
    return Subject(
        modes={FORWARD: forward, BOTH: both}, outcome=outcome, judged=BOTH, held=held, facts=facts or {}
    )  # fmt: skip
