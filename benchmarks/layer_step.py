"""The steps of an experts layer, whoever made it: forward without a graph, forward and backward, what is judged.

Legend: T tokens of this rank, K experts per token, D model dim, F expert hidden dim, e experts of this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from benchmarks.layer_case import LayerCase, LayerData
from benchmarks.layer_truth import digest
from benchmarks.subject import BOTH, FORWARD, Subject

Layer = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(x [T, D], ids [T, K], w [T, K]) -> [T, D]"""


def layer_subject(
    layer: Layer, case: LayerCase, rank: int, weights: Sequence[Tensor], data: LayerData | None = None
) -> Subject:
    """weights: the layer's two parameters, gate and up and down, in the memory layout [e, 2F, D] and [e, D, F].
    data: the rank's, if it is at hand."""
    data = LayerData.of(case, rank) if data is None else data
    leaves = [data.x_TD, data.w_TK, *weights]

    def forward() -> None:
        with torch.no_grad(), case.autocast():
            layer(data.x_TD, data.ids_TK, data.w_TK)

    def run() -> Sequence[Tensor]:
        with case.autocast():
            y = layer(data.x_TD, data.ids_TK, data.w_TK)
        return (y.detach(), *torch.autograd.grad(y, leaves, data.dy_TD))

    def outcome() -> dict[str, Tensor]:
        y, dx, dw, d_gate_up, d_down = run()
        width, dim = 2 * case.hidden, case.dim
        return digest(y, dx, dw, d_gate_up.reshape(-1, width, dim), d_down.reshape(-1, dim, case.hidden))

    def step() -> None:
        run()

    held = sum(t.nbytes for t in leaves)
    return Subject(modes={FORWARD: forward, BOTH: step}, outcome=outcome, judged=BOTH, held=held)
