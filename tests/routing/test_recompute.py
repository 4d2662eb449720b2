"""`replay_in_recompute`: the second run takes the first one's decisions even where a near-tie falls the other way."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import Function
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from helpers.ranks import run_ranks
from helpers.recompute_case import Block, D, E, T, compare, grads, micro_batches, on_ranks, perturbed, run, twins
from trimtab.errors import InputError
from trimtab.integrations.transformers.routers.observe import record
from trimtab.moe import MoEConfig
from trimtab.routing.config import RouterConfig
from trimtab.routing.recompute import _Tape, replay_in_recompute

replaying = partial(checkpoint, use_reentrant=False, context_fn=replay_in_recompute)


@pytest.mark.parametrize("more", [{}, {"capacity_factor": 0.7}, {"select": "sinkhorn"}], ids=str)
def test_a_tie_does_not_flip(more: dict[str, object]) -> None:
    found = []
    for replay in (False, True):
        block, xs = Block(twins(**more)), micro_batches(1)
        with perturbed() as log, record(block) as recording:
            run(block, xs[0], replay).backward()
        assert log == ([False, True] if replay else [False])
        assert len(recording.calls["moe.router"]) == 1
        assert block.moe.router.take_loads().sum() == T * 3  # counted once
        found.append(grads(block, xs))
    compare(found[1], found[0])


def test_without_replay_the_tie_does_flip() -> None:
    """The case above can fail: a recompute that decides again has the gradients of other experts, and counts again."""
    found = []
    for how in ({}, {"use_reentrant": False}):
        block, xs = Block(twins()), micro_batches(1)
        with perturbed():
            y, aux = checkpoint(block, xs[0], **how) if how else block(xs[0])
            (y.square().sum() + aux).backward()
        assert block.moe.router.take_loads().sum() == (1 + len(how)) * T * 3
        found.append(grads(block, xs))
    assert max(float((found[1][name] - found[0][name]).abs().max()) for name in found[0]) > 1e-3


def test_a_reentrant_checkpoint_counts_its_second_run_alone() -> None:
    block, xs = Block(twins()), micro_batches(2)
    for x in xs:
        y, aux = checkpoint(block, x, use_reentrant=True)
        (y.square().sum() + aux).backward()
    assert block.moe.router.take_loads().sum() == 2 * T * 3


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]], ids=str)
@pytest.mark.parametrize("equal", [False, True])
def test_many_micro_batches_in_flight(order: list[int], equal: bool) -> None:
    """Equal ones too, which differ in their jitter and in the counts before them."""
    found = []
    for replay in (False, True):
        block, xs = Block(twins(global_aux_loss=0.1, jitter=0.2)), micro_batches(4)
        if equal:
            xs = [xs[0].detach().clone().requires_grad_() for _ in xs]
        generator = block.moe.router.generator = torch.Generator().manual_seed(9)
        with perturbed():
            losses = [run(block, x, replay) for x in xs]
            state = generator.get_state()
            for i in order:
                losses[i].backward()
        assert torch.equal(generator.get_state(), state)
        found.append(grads(block, xs))
        assert block.moe.router.take_loads().sum() == 4 * T * 3
    compare(found[1], found[0])


def test_ids_that_are_changed_in_place_are_not_what_is_taken() -> None:
    found = []
    for replay in (False, True):
        block, xs, given = Block(twins(capacity_factor=0.7)), micro_batches(1), []

        def forward(x: Tensor, block: Block = block, given: list[Tensor] = given) -> Tensor:
            out = block.moe(block.norm(x))
            given.append(out.ids_TK)
            return out.y.square().sum() + sum(out.losses.values())

        with perturbed():
            loss = replaying(forward, xs[0]) if replay else forward(xs[0])
            if replay:
                given[0].zero_()
            loss.backward()
        found.append(grads(block, xs))
    compare(found[1], found[0])


class Twice(nn.Module):
    """Two blocks, the first of them used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(twins()), Block(twins(global_aux_loss=0.1))

    def forward(self, x: Tensor, inner: bool = False) -> Tensor:
        total = x.new_zeros(())
        for block in (self.first, self.second, self.first):
            x, aux = replaying(block, x) if inner else block(x)
            total = total + aux
        return x.square().sum() + total


@pytest.mark.parametrize(("outer", "inner"), [(True, False), (True, True), (False, True)])
def test_nested_and_several_layers_in_a_block(outer: bool, inner: bool) -> None:
    found = []
    for checkpointed in (False, True):
        model, xs = Twice(), micro_batches(2)
        with perturbed():
            for x in xs:
                if checkpointed and outer:
                    loss = replaying(model, x, inner)
                else:
                    loss = model(x, checkpointed and inner)
                loss.backward()
        for block, times in ((model.first, 2), (model.second, 1)):
            assert block.moe.router.take_loads().sum() == 2 * times * T * 3
        found.append(grads(model, xs))
    compare(found[1], found[0])


class Product(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return d @ w.T, x.T @ d


def takes_halves() -> bool:
    """Whether PyTorch runs the backward of an autograd function in two halves, once the result is gone: 2.11 raises."""
    x, w = torch.ones(2, 2, requires_grad=True), nn.Parameter(torch.ones(2, 2))
    y = Product.apply(x, w).sin()
    _, groups = stage_backward_input([y], [torch.ones_like(y)], [x], iter([w]))
    del y
    try:
        stage_backward_weight(iter([w]), groups)
    except RuntimeError:
        return False
    return True


@pytest.mark.skipif(torch.__version__ < (2, 13) and not takes_halves(), reason="this PyTorch takes no halves")
@pytest.mark.parametrize("jitter", [0.0, 0.3])
def test_a_backward_in_two_halves_takes_the_decision_twice(jitter: float) -> None:
    """Zero-bubble schedules: when the weights' half runs the forward again, the router's part of the graph is gone."""
    found = []
    for recomputed in (False, True):
        torch.manual_seed(0)
        router = RouterConfig(num_experts=E, top_k=2, global_aux_loss=0.1, jitter=jitter)
        made = MoEConfig(dim=D, hidden=6, shared_hidden=4, router=router, dtype=torch.float64)
        block = Block(made.build("halves"))
        block.moe.router.generator = torch.Generator().manual_seed(9)
        for x in micro_batches(3):
            y, aux = replaying(block, x) if recomputed else block(x)
            out = y + aux
            _, groups = stage_backward_input([out], [torch.ones_like(out)], [x], block.parameters())
            del y, aux, out
            stage_backward_weight(block.parameters(), groups)
        gradients = {name: p.grad for name, p in block.named_parameters()}
        found.append((gradients, block.moe.router.take_loads()))
    (truth, loads), (ours, same) = found
    assert torch.equal(loads, same)
    assert loads.sum() == 3 * T * 2
    for name, true in truth.items():
        assert torch.equal(ours[name], true), name


@pytest.mark.parametrize(
    "kept",
    [["mm", "addmm", "bmm"], ["sort", "argsort", "topk", "cat", "argmax"], ["clone", "gather", "_softmax", "_to_copy"],
     ["scatter_add", "where", "masked_fill", "add", "mul"], ["replayed"], []],
    ids=lambda names: " ".join(names[:1]),
)  # fmt: skip
def test_selective_checkpointing_keeps_what_its_policy_says(kept: list[str]) -> None:
    def policy(_c: object, op: torch._ops.OpOverload, *_a: object, **_k: object) -> CheckpointPolicy:
        keeps = op.name().split("::")[1].split(".")[0] in kept
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    context = partial(replay_in_recompute, partial(create_selective_checkpoint_contexts, policy))
    found = []
    for selective in (False, True):
        jitter = 0 if kept else 0.3
        model, xs = Twice(), micro_batches(2)
        for block in (model.first, model.second):
            block.moe = twins(capacity_factor=0.7, global_aux_loss=0.1, jitter=jitter)
        torch.manual_seed(3)
        with perturbed():
            for x in xs:
                loss = checkpoint(model, x, use_reentrant=False, context_fn=context) if selective else model(x)
                loss.backward()
        assert model.second.moe.router.take_loads().sum() == 2 * T * 3
        found.append(grads(model, xs))
    compare(found[1], found[0])


def test_a_block_that_does_something_else_the_second_time_is_told() -> None:
    block, lengths = Block(twins()), iter((T, T - 1))

    def shorter(x: Tensor) -> Tensor:
        return block(x[: next(lengths)])[0].sum()

    with pytest.raises(InputError, match="must do the same in both"):
        replaying(shorter, micro_batches(1)[0]).backward()


def test_nothing_is_kept_behind() -> None:
    block = Block(twins())
    for x in micro_batches(2):
        run(block, x, True).backward()
    with torch.no_grad():
        replaying(block, micro_batches(1)[0])
    gc.collect()
    assert not any(type(one) is _Tape for one in gc.get_objects())


def test_no_tokens() -> None:
    block = Block(twins())
    x = torch.zeros(0, D, dtype=torch.float64, requires_grad=True)
    run(block, x, True).backward()
    assert all((grad == 0).all() for grad in grads(block, [x]).values())


def test_expert_parallel_ranks_stay_together() -> None:
    answers = run_ranks(on_ranks, 2)
    assert all(gap < 1e-7 for gaps in answers for gap in gaps.values()), answers
    assert all(len(gaps) > 4 for gaps in answers)
