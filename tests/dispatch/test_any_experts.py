"""Experts of one's own behind the dispatcher: rows changed where they lie, experts that are left out; and rows of any
number of bytes, a multiple of what parts are padded to or not: values and gradients, packed or apart."""

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
from trimtab.dispatch.transports import TRANSPORTS

E, K, D = 8, 3, 16


def changed_on_rank(transport: str) -> tuple[float, float]:
    """Experts that save the weights for their backward, and then change the rows where they lie."""
    dispatcher = Dispatcher(E, TRANSPORTS[transport](dist.group.WORLD), layer="moe")
    x, ids, w, _ = case("random", dist.get_rank(), dist.get_world_size(), E, K, D, torch.float64)
    rows = dispatcher.dispatch(x.requires_grad_(), ids, w.requires_grad_())
    factor = rows.weights_MK.square().masked_fill(rows.ids_MK < 0, 0).sum(1, keepdim=True)
    y = dispatcher.combine(rows.x_MD.mul_(2) * factor, rows)
    dx, dw = torch.autograd.grad(y.sum(), (x, w))
    x, w = x.detach(), w.detach()
    return (
        relative_error(dx, 2 * w.square().sum(1, keepdim=True).expand_as(x)),
        relative_error(dw, 4 * w * x.sum(1, keepdim=True)),
    )


@pytest.mark.parametrize("transport", list(TRANSPORTS))
def test_rows_may_be_changed_where_they_lie(transport: str) -> None:
    """Not so for what else came with them: it may be saved for a backward."""
    for errors in run_ranks(changed_on_rank, 2, transport):
        assert all(error <= 1e-12 for error in errors)


def experts_alone_on_rank(combine: str) -> dict[str, float]:
    """Experts as a loop that skips those without rows, behind tokens and weights that need no gradient."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    dispatcher = Dispatcher(E, TRANSPORTS["alltoall"](dist.group.WORLD), combine=combine, layer="moe")

    def drawn(r: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        """A rank's tokens, all for experts of rank 0, and its experts."""
        g = torch.Generator().manual_seed(r)
        x, w = torch.randn(6, D, generator=g), torch.rand(6, K, generator=g)
        ids = torch.rand(6, E // ranks, generator=g).argsort(-1)[:, :K].to(torch.int32)
        return x, w, ids, [torch.nn.Parameter(torch.randn(D, D, generator=g)) for _ in range(E // ranks)]

    x, w, ids, weights = drawn(rank)
    rows = dispatcher.dispatch(x, ids, w)
    y = torch.zeros_like(rows.x_MD)
    for e, weight in enumerate(weights):
        if (rows.ids_MK == e).any():
            share = rows.weights_MK.masked_fill(rows.ids_MK != e, 0).sum(1, keepdim=True)
            y = y + share * (rows.x_MD @ weight.T)
    assert y.requires_grad == (rank == 0)
    out = dispatcher.combine(y, rows, weights)
    out.square().sum().backward()
    loss, true = torch.zeros((), dtype=torch.float64), [p.detach().double().requires_grad_() for p in drawn(0)[3]]
    for r in range(ranks):
        x, w, ids, _ = drawn(r)
        per_slot = torch.einsum("tkoi,ti->tko", torch.stack(true)[ids.long()], x.double())
        loss = loss + (w[..., None] * per_slot).sum(1).square().sum()
    grads = torch.autograd.grad(loss, true) if rank == 0 else [torch.zeros_like(p) for p in true]
    return {f"weight {e}": relative_error(p.grad, grad) for e, (p, grad) in enumerate(zip(weights, grads, strict=True))}


@pytest.mark.parametrize("combine", ["sum", "ordered"])
def test_experts_that_are_left_out_still_have_a_backward(combine: str) -> None:
    """Else the ranks with rows would wait in it for the rank without."""
    for errors in run_ranks(experts_alone_on_rank, 2, combine, deadline=30.0):
        assert all(error <= 1e-5 for error in errors.values()), errors


FEW = 4
WIDTHS = ((torch.float32, 4), (torch.float32, 1), (torch.float32, 5), (torch.bfloat16, 6), (torch.bfloat16, 3))


def worst(transport: Any, dtype: torch.dtype, width: int, top_k: int) -> float:
    """Expert e multiplies by e + 1; the largest relative error of y, dx and dw however tokens fall."""
    dispatcher, found = Dispatcher(FEW, transport, layer="moe"), list[float]()
    first = dist.get_rank() * dispatcher.experts_per_rank
    for seed, pattern in enumerate(PATTERNS):
        x, ids, w, mask = case(pattern, dist.get_rank(), dist.get_world_size(), FEW, top_k, width, dtype, seed)
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
