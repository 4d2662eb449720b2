"""A compiled layer whose experts lie on two ranks, guard on: graphs break at the exchange, numbers are eager mode's."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch._dynamo.compiled_autograd import _enable
from torch._dynamo.utils import counters

from helpers.compile_case import assert_same, inputs
from helpers.layer_case import BOUNDS, E, build, parted, parted_results, results
from helpers.ranks import run_ranks
from trimtab.errors import InputError

TOKENS = ((5, 3), (0, 4), (6, 0), (0, 0))
"""Of rank 0 and of rank 1."""


def on_ranks() -> dict[str, Any]:
    rank, options = dist.get_rank(), {"router": {"score": "sigmoid", "aux_loss": 0.1}, "shared_hidden": 6, "bias": True}
    whole, moe = build(**options), parted(build(**options))
    assert moe.dispatcher.guard is not None
    run = torch.compile(moe, backend="aot_eager", dynamic=True)
    for tokens in TOKENS:
        given = inputs((tokens[rank],), torch.float32, masked=True)
        eager, ours = results(moe, moe, given), results(run, moe, given)
        assert_same(ours, eager, BOUNDS[torch.float32])
        assert_same(ours, parted_results(results(whole, whole, given)), BOUNDS[torch.float32])
    breaks = [reason.splitlines()[0] for reason in counters["graph_break"]]
    x = inputs((4,), torch.float32)[0]
    bad = torch.tensor([[0, 1, 2]] * 3 + [[E + 2 * rank - 1] * 3])  # on rank 1 alone
    try:
        run(x, ids=bad)
    except InputError as error:
        return {"breaks": breaks, "raised": str(error), "graphs": counters["stats"]["unique_graphs"]}
    return {"raised": None}


def backward_by_compiled_autograd() -> None:
    """Two layers in a row, whose rows are the experts' input and what the first exchange's gradient comes from."""
    rank = dist.get_rank()
    compiler = torch.compile(backend="eager", dynamic=True)
    for combine in ("sum", "ordered"):
        layers = [parted(build(layer=f"{combine}.{name}"), combine) for name in ("first", "second")]
        for tokens in TOKENS[:2] if combine == "sum" else TOKENS[1:2]:
            x = inputs((tokens[rank],), torch.float32)[0].detach()
            found = []
            for backward in (contextlib.nullcontext(), _enable(compiler)):
                leaf = x.clone().requires_grad_()
                y = leaf
                for moe in layers:
                    moe.zero_grad()
                    y = y + moe(y).y
                with backward:
                    y.square().sum().backward()
                named = {f"{i} {n}": p.grad for i, moe in enumerate(layers) for n, p in moe.named_parameters()}
                found.append({"x": leaf.grad, **named})
            assert_same(*reversed(found), BOUNDS[torch.float32])


def test_compiled_autograd_over_ranks() -> None:
    run_ranks(backward_by_compiled_autograd, 2, deadline=200.0)


def test_a_compiled_layer_over_all_to_all() -> None:
    for found in run_ranks(on_ranks, 2, deadline=400.0):
        assert "rank 1: 3 slot(s)" in found["raised"]
        assert found["breaks"] == ["Skip calling `torch.compiler.disable()`d function"]
        assert found["graphs"] > 1
