"""One layer run eagerly and compiled: outputs, losses, loads and every gradient of both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo as dynamo
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from helpers.comparing import assert_close
from helpers.layer_case import D, E, Inputs, K
from trimtab.moe import MoE, MoEOutput


def inputs(shape: tuple[int, ...], dtype: torch.dtype, *, masked: bool = False, replay: bool = False) -> Inputs:
    """x, with NaN where the mask is False; a mask or None; ids, some of them dropped, or None."""
    g = torch.Generator().manual_seed(sum(shape) + len(shape))
    x = torch.randn(*shape, D, generator=g, dtype=torch.float64).to(dtype)
    mask = torch.rand(shape, generator=g) < 0.7 if masked else None
    if mask is not None:
        x = x.masked_fill(~mask[..., None], float("nan"))
    ids = torch.rand(*shape, E, generator=g).argsort(-1)[..., :K] if replay else None
    if ids is not None:
        ids = ids.masked_fill(torch.rand(ids.shape, generator=g) < 0.2, -1)
    return x, mask, ids


def any_count(given: Inputs) -> Inputs:
    """The same, marked so that one graph serves every number of tokens, 0 and 1 among them."""
    for t in given:
        if t is not None:
            dynamo.decorators.mark_unbacked(t, 0, shape_id="tokens")
    return given


def assert_same(ours: dict[str, Tensor], eager: dict[str, Tensor], bound: float) -> None:
    assert ours.keys() == eager.keys()
    for name, value in eager.items():
        assert ours[name].dtype == value.dtype, name
        if value.is_floating_point():
            assert_close(ours[name], value, bound, name)
        else:
            assert torch.equal(ours[name], value), name


def compiled(moe: MoE, backend: str = "aot_eager", **options: Any) -> tuple[Callable[..., MoEOutput], Any]:
    """The layer without a graph break, and what counts its graphs (`frame_count`)."""
    counter = CompileCounterWithBackend(backend)
    return torch.compile(moe, fullgraph=True, backend=counter, **options), counter
