"""The whole map on real ranks against the oracle: outputs and every gradient, however the tokens fall."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist

from helpers.cases import PATTERNS, case
from helpers.comparing import relative_error
from helpers.ranks import run_ranks
from helpers.weights import expert_weights
from trimtab import oracle
from trimtab.dispatch.dispatcher import COMBINE_MODES, Dispatcher
from trimtab.dispatch.transports import TRANSPORTS
from trimtab.experts.mlp import expert_mlp
from trimtab.experts.plan import plan_experts
from trimtab.kernels.choose import get_backend

E, K, D, F = 8, 3, 16, 12


def of_all(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(7)
    up = torch.randn(E, 2 * F, D, generator=g, dtype=torch.float64) / D**0.5
    down = torch.randn(E, D, F, generator=g, dtype=torch.float64) / F**0.5
    return up.to(dtype), down.to(dtype)


def layer_on_rank(transport: str, combine: str, dtype: torch.dtype) -> dict[str, float]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    dispatcher = Dispatcher(E, TRANSPORTS[transport](dist.group.WORLD), combine=combine, layer="moe")
    e = E // ranks
    kernels = get_backend("auto", torch.device("cpu"))
    errors = {}
    for seed, pattern in enumerate(PATTERNS):
        x, ids, w, mask = case(pattern, rank, ranks, E, K, D, dtype, seed)
        g = torch.Generator().manual_seed(99 + rank)
        up_all, down_all = of_all(dtype)
        up, down = (t[rank * e : rank * e + e].clone().requires_grad_() for t in (up_all, down_all))
        leaves = [x.requires_grad_(), w.requires_grad_()]
        rows = dispatcher.dispatch(x, ids, w, mask)
        plan = plan_experts(rows.ids_MK, e, num_slots=rows.num_slots)
        y = expert_mlp(rows.x_MD, rows.weights_MK, plan, *expert_weights(up=up, down=down), "swiglu", kernels)
        y = dispatcher.combine(y, rows)
        dy = torch.randn(y.shape, generator=g, dtype=torch.float64).to(dtype)
        grads = torch.autograd.grad(y, [*leaves, up, down], dy)
        # The truth, with every rank's tokens in one process: expert gradients sum over all ranks.
        truth_up, truth_down = (t.double().requires_grad_() for t in (up_all, down_all))
        outs, dys, mine = [], [], ()
        for r in range(ranks):
            xr, idr, wr, mr = case(pattern, r, ranks, E, K, D, dtype, seed)
            xr, wr = xr.double().requires_grad_(), wr.double().requires_grad_()
            outs.append(oracle.moe(xr, idr, wr, truth_up, truth_down, token_mask_T=mr))
            gr = torch.Generator().manual_seed(99 + r)
            dys.append(torch.randn(outs[-1].shape, generator=gr, dtype=torch.float64).to(dtype).double())
            mine = (outs[-1], xr, wr) if r == rank else mine
        total = sum((o * d).sum() for o, d in zip(outs, dys, strict=True))
        wanted = [mine[1], mine[2], truth_up, truth_down]
        if total.requires_grad:
            truth = torch.autograd.grad(total, wanted, allow_unused=True, materialize_grads=True)
        else:
            truth = tuple(torch.zeros_like(t) for t in wanted)
        cut = slice(rank * e, rank * e + e)
        pairs = zip(
            ("y", "dx", "dw", "dup", "ddown"),
            (y.detach(), *grads),
            (mine[0].detach(), truth[0], truth[1], truth[2][cut], truth[3][cut]),
            strict=True,
        )
        errors |= {f"{pattern} {name}": relative_error(ours, ref) for name, ours, ref in pairs}
    return errors


BOUNDS = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 3e-2}


def too_far_on_rank(transport: str) -> dict[str, float]:
    return {
        f"{combine} {dtype} {name}": error
        for combine, (dtype, bound) in itertools.product(COMBINE_MODES, BOUNDS.items())
        for name, error in layer_on_rank(transport, combine, dtype).items()
        if not error <= bound
    }


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("transport", [name for name in TRANSPORTS if name != "auto"])
def test_layer_equals_oracle(ranks: int, transport: str) -> None:
    assert run_ranks(too_far_on_rank, ranks, transport) == [{}] * ranks


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
