"""Rows of any number of bytes, a multiple of what parts are padded to or not: values and gradients, packed or apart."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist

from helpers.cases import PATTERNS, case
from helpers.comparing import relative_error
from helpers.ranks import run_ranks
from trimtab.dispatch import all_to_all
from trimtab.dispatch.all_gather import AllGather
from trimtab.dispatch.all_to_all import AllToAll
from trimtab.dispatch.dispatcher import Dispatcher
from trimtab.dispatch.shared_memory import SharedMemory

E = 4
WIDTHS = ((torch.float32, 4), (torch.float32, 1), (torch.float32, 5), (torch.bfloat16, 6), (torch.bfloat16, 3))


def worst(transport: Any, dtype: torch.dtype, width: int, top_k: int) -> float:
    """Expert e multiplies by e + 1; the largest relative error of y, dx and dw however tokens fall."""
    dispatcher, found = Dispatcher(E, transport, layer="moe"), list[float]()
    first = dist.get_rank() * dispatcher.experts_per_rank
    for seed, pattern in enumerate(PATTERNS):
        x, ids, w, mask = case(pattern, dist.get_rank(), dist.get_world_size(), E, top_k, width, dtype, seed)
        rows = dispatcher.dispatch(x.requires_grad_(), ids, w.requires_grad_(), mask)
        factor = torch.where(rows.ids_MK >= 0, rows.ids_MK + first + 1, 0) * rows.weights_MK
        # a slice of wider rows: some ranks see it as contiguous, others do not
        wide = torch.nn.functional.pad(rows.x_MD * factor.sum(1, keepdim=True).to(dtype), (0, 2))
        y = dispatcher.combine(wide[:, :width], rows)
        assert not dispatcher.combine(rows.x_MD.new_zeros(()).expand(rows.x_MD.shape), rows).any()
        real = torch.ones(len(x), dtype=torch.bool) if mask is None else mask
        kept = (ids >= 0) & real[:, None]
        scale = torch.where(kept, ids + 1, 0).double()
        clean, total = x.detach().double().masked_fill(~real[:, None], 0), (scale * w.detach()).sum(1, keepdim=True)
        drawn = torch.randn(y.shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
        for dy in (drawn, drawn.new_ones(()).expand(y.shape)):  # the second one is a sum's, with strides of 0
            dx, dw = torch.autograd.grad(y, (x, w), dy, retain_graph=True)
            truth = (clean * total, dy.double() * total, scale * (dy.double() * clean).sum(1, keepdim=True))
            found += [relative_error(a, b) for a, b in zip((y, dx, dw), truth, strict=True)]
    return max(found)


def on_rank(apart: bool) -> dict[str, float]:
    if apart:
        all_to_all.PACKED_BYTES = 0
    found = {}
    for kind, (dtype, width), top_k in product((AllToAll, AllGather, SharedMemory), WIDTHS, (1, 3)):
        transport = kind(dist.group.WORLD)
        found[f"{kind.__name__} {dtype} {width} {top_k}"] = worst(transport, dtype, width, top_k)
    return found


@pytest.mark.parametrize("apart", [False, True])
def test_any_width(apart: bool) -> None:
    for found in run_ranks(on_rank, 2, apart):
        assert {name: error for name, error in found.items() if error > (3e-2 if "bfloat" in name else 2e-6)} == {}
