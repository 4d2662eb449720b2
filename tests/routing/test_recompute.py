"""Activation checkpointing repeats decisions even where a near-tie would fall the other way the second time."""

from __future__ import annotations

import copy
import gc
import pickle
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import Function
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from helpers.recompute_case import Block, D, E, T, grads, micro_batches, on_ranks, perturbed, run, twins
from trimtab.errors import InputError
from trimtab.experts.module import ExpertMLP
from trimtab.moe import MoEConfig
from trimtab.routing.config import RouterConfig
from trimtab.routing.recompute import Memory, Remembered, sum_of
from trimtab.routing.record import record
from trimtab.verify.ranks import run_ranks

MODES = [True, False]


def compare(ours: dict[str, Tensor], truth: dict[str, Tensor]) -> None:
    for name, true in truth.items():
        assert (ours[name] - true).abs().max() < 1e-7, name  # what is left is the perturbation of the weights


@pytest.mark.parametrize("use_reentrant", MODES)
@pytest.mark.parametrize("more", [{}, {"capacity_factor": 0.7}, {"select": "sinkhorn"}], ids=str)
def test_a_tie_does_not_flip(use_reentrant: bool, more: dict[str, object]) -> None:
    found = []
    for mode in (None, use_reentrant):
        block, xs = Block(twins(**more)), micro_batches(1)
        with perturbed() as log, record(block) as recording:
            run(block, xs[0], mode).backward()
        assert log == ([False] if mode is None else [False, True])
        assert len(recording.calls["moe.router"]) == 1
        assert block.moe.router.take_loads().sum() == T * 3  # counted once
        found.append(grads(block, xs))
    compare(found[1], found[0])


@pytest.mark.parametrize("use_reentrant", MODES)
def test_without_memory_the_tie_does_flip(use_reentrant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The case above can fail: with nothing remembered the gradients are those of other experts."""
    found = []
    for mode in (None, use_reentrant):
        block, xs = Block(twins()), micro_batches(1)
        with perturbed():
            run(block, xs[0], mode).backward()
        found.append(grads(block, xs))
        monkeypatch.setattr(Memory, "recall", lambda *_: None)
    assert max(float((found[1][name] - found[0][name]).abs().max()) for name in found[0]) > 1e-3


@pytest.mark.parametrize("use_reentrant", MODES)
@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]], ids=str)
def test_many_micro_batches_in_flight(use_reentrant: bool, order: list[int]) -> None:
    found = []
    for mode in (None, use_reentrant):
        block, xs = Block(twins(global_aux_loss=0.1)), micro_batches(4)
        with perturbed():
            losses = [run(block, x, mode) for x in xs]
            for i in order:
                losses[i].backward()
        found.append(grads(block, xs))
        assert block.moe.router.take_loads().sum() == 4 * T * 3
    compare(found[1], found[0])


@pytest.mark.parametrize("use_reentrant", MODES)
@pytest.mark.parametrize("more", [{}, {"capacity_factor": 0.7}, {"select": "expert_choice"}], ids=str)
def test_ids_that_are_changed_in_place_are_refused_or_not_what_is_remembered(
    use_reentrant: bool, more: dict[str, Any]
) -> None:
    block, xs, given = Block(twins(**more)), micro_batches(1), []

    def forward(x: Tensor) -> Tensor:
        out = block.moe(block.norm(x))
        given.append(out.ids_TK)
        return out.y.square().sum() + sum(out.losses.values())

    forward(xs[0]).backward()
    found = grads(block, xs)
    for edit in (torch.Tensor.clone, torch.Tensor.zero_):
        block.zero_grad()
        xs[0].grad = None
        loss = checkpoint(forward, xs[0], use_reentrant=use_reentrant)
        edit(given[-1])
        if edit is torch.Tensor.zero_ and not use_reentrant:
            with pytest.raises(InputError, match=r"phase route.*ids_TK of a forward .* changed in place"):
                loss.backward()
        else:
            loss.backward()
            compare(grads(block, xs), found)


@pytest.mark.parametrize("outer", MODES)
@pytest.mark.parametrize("inner", MODES)
def test_nested(outer: bool, inner: bool) -> None:
    found = []
    for mode in (None, outer):
        block, xs = Block(twins()), micro_batches(2)
        with perturbed():
            for x in xs:
                if mode is None:
                    loss = run(block, x, None)
                else:
                    loss = checkpoint(lambda x, block=block: run(block, x, inner), x, use_reentrant=outer)
                loss.backward()
        assert block.moe.router.take_loads().sum() == 2 * T * 3
        found.append(grads(block, xs))
    compare(found[1], found[0])


@pytest.mark.parametrize("use_reentrant", MODES)
def test_one_layer_used_twice_in_one_forward(use_reentrant: bool) -> None:
    found = []
    for mode in (None, use_reentrant):
        block, xs = Block(twins()), micro_batches(1)

        def both(x: Tensor, block: Block = block) -> Tensor:
            y, aux = block(x)
            z, more = block(y)
            return z.square().sum() + aux + more

        with perturbed():
            (both(xs[0]) if mode is None else checkpoint(both, xs[0], use_reentrant=mode)).backward()
        found.append(grads(block, xs))
    compare(found[1], found[0])


@pytest.mark.parametrize("use_reentrant", MODES)
@pytest.mark.parametrize(
    ("dtype", "under"),
    [(torch.bfloat16, None), (torch.float32, torch.bfloat16), (torch.float32, None), (torch.float64, None)], ids=str,
)  # fmt: skip
def test_rounding_before_the_layer_is_told_from_other_tokens(
    use_reentrant: bool, dtype: torch.dtype, under: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes in may itself differ in the last bits: its micro-batch is found among others."""
    rounding = 1e-6 if dtype == torch.float64 else 4e-3  # float32 may have come of bfloat16
    block, xs = Block(twins()).to(dtype), [x.detach().to(dtype).requires_grad_() for x in micro_batches(3)]
    block.norm.register_forward_hook(lambda _m, _a, y: (y * (1 + rounding * torch.randn(y.shape).double())).to(dtype))
    recall, found = Memory.recall, []

    def spy(memory: Memory, x_TD: Tensor, sum_E: Tensor, real_T: Tensor | None) -> Remembered | None:
        found.append(recall(memory, x_TD, sum_E, real_T))
        return found[-1]

    monkeypatch.setattr(Memory, "recall", spy)
    with record(block) as recording:
        with nullcontext() if under is None else torch.autocast("cpu", under):
            losses = [
                checkpoint(block, x, use_reentrant=use_reentrant, preserve_rng_state=False)[0].square().sum()
                for x in xs
            ]
        for i in (1, 2, 0):
            losses[i].backward()
    assert found[:3] == [None] * 3
    for i, again in zip((1, 2, 0), found[3:], strict=True):
        assert again is not None
        assert torch.equal(again.choice.kept.long(), recording.calls["moe.router"][i][0])


@pytest.mark.parametrize("use_reentrant", MODES)
def test_jitter_is_drawn_again_from_the_generator_handed_in(use_reentrant: bool) -> None:
    found = []
    for mode in (None, use_reentrant):
        block, xs = Block(twins(jitter=0.2)), micro_batches(2)
        block.moe.router.generator = torch.Generator().manual_seed(9)
        losses = [run(block, x, mode) for x in xs]
        state = block.moe.router.generator.get_state()
        for loss in losses:
            loss.backward()
        assert torch.equal(block.moe.router.generator.get_state(), state)
        found.append(grads(block, xs))
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
            y, aux = checkpoint(block, x, use_reentrant=False) if recomputed else block(x)
            out = y + aux
            _, groups = stage_backward_input([out], [torch.ones_like(out)], [x], block.parameters())
            del y, aux, out
            stage_backward_weight(block.parameters(), groups)
        gradients = {name: p.grad for name, p in block.named_parameters()}
        del groups
        gc.collect()
        assert block.moe.router.memory.alive() == 0
        found.append((gradients, block.moe.router.take_loads()))
    (truth, loads), (ours, same) = found
    assert torch.equal(loads, same)
    assert loads.sum() == 3 * T * 2
    for name, true in truth.items():
        assert torch.equal(ours[name], true), name


@pytest.mark.parametrize("use_reentrant", MODES)
@pytest.mark.parametrize("kind", ["reversed", "rolled", "equal, with jitter"])
def test_micro_batches_that_are_alike_are_told_apart(use_reentrant: bool, kind: str) -> None:
    """The same tokens in another order, whose sum is the same to the last bit, or in the same with noise of its own."""
    one = micro_batches(1)[0].detach().mul(4).round() / 16
    other = {"reversed": one.flip(0), "rolled": one.roll(T // 2, 0)}.get(kind, one)
    found = []
    for mode in (None, use_reentrant):
        block = Block(twins(jitter=0.5 if "jitter" in kind else 0))
        block.moe.router.generator = torch.Generator().manual_seed(9)
        block.norm = torch.nn.Identity()
        xs = [one.detach().clone().requires_grad_(), other.detach().clone().requires_grad_()]
        with perturbed():
            sum(run(block, x, mode) * (1 + i) for i, x in enumerate(xs)).backward()
        found.append(grads(block, xs))
    compare(found[1], found[0])


@pytest.mark.parametrize("use_reentrant", MODES)
@pytest.mark.parametrize("order", [[0, 1], [1, 0], None], ids=["first first", "last first", "together"])
@pytest.mark.parametrize("more", [{}, {"capacity_factor": 0.7}, {"select": "expert_choice"}], ids=str)
@pytest.mark.parametrize("real", [(6, 6), (6, 9)], ids=["as many", "other counts"])
def test_masks_tell_micro_batches_apart(
    use_reentrant: bool, order: list[int] | None, more: dict[str, Any], real: tuple[int, int]
) -> None:
    """Where logits cannot, as those of a router that begins with zeros."""
    found, masks = [], [torch.arange(T) < real[0], torch.arange(T) >= T - real[1]]
    for mode in (None, use_reentrant):
        block, xs, losses = Block(twins(**more)), micro_batches(2), []
        nn.init.zeros_(block.moe.router.weight)
        for x, mask in zip(xs, masks, strict=True):

            def one(x: Tensor, block: Block = block, mask: Tensor = mask) -> Tensor:
                out = block.moe(block.norm(x), token_mask=mask)
                return out.y.square().sum() + sum(out.losses.values())

            losses.append(one(x) if mode is None else checkpoint(one, x, use_reentrant=mode))
        for loss in [losses[i] for i in order] if order else [sum(losses)]:
            loss.backward()
        found.append(grads(block, xs))
    compare(found[1], found[0])


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 2, 0]], ids=str)
@pytest.mark.parametrize("more", [{"jitter": 0.5}, {"global_aux_loss": 1.0}], ids=str)
def test_a_checkpoint_gets_its_own_of_equal_micro_batches(order: list[int], more: dict[str, Any]) -> None:
    """With another noise or other counts before them, each twice in its checkpoint, in backwards of their own."""
    found = []
    for checkpointed in (False, True):
        block = Block(twins(**more))
        block.moe.router.generator = torch.Generator().manual_seed(9)
        xs = [micro_batches(1)[0] for _ in range(3)]

        def twice(x: Tensor, block: Block = block) -> Tensor:
            return run(block, x, None) + 2 * run(block, x, None)

        losses = [checkpoint(twice, x, use_reentrant=False) if checkpointed else twice(x) for x in xs]
        for i in order:
            losses[i].backward()
        found.append(grads(block, xs))
        assert block.moe.router.take_loads().sum() == 6 * T * 3
        del losses
        assert block.moe.router.memory.alive() == 0
    compare(found[1], found[0])


@pytest.mark.parametrize("tokens", [[0], [0, 1, 2, 3]], ids=["one token", "some"])
def test_micro_batches_that_differ_in_their_first_token_come_back_in_any_order(tokens: list[int]) -> None:
    """Each with a backward of its own, the first one first, and logits that are rounded otherwise."""
    for masked in (False, True):
        block, xs = Block(twins()), [x.detach()[tokens].requires_grad_() for x in micro_batches(2)]
        with torch.no_grad():
            xs[1][1:] = xs[0][1:]
        mask = torch.arange(len(tokens)) < (1 if masked else len(tokens))

        def run_one(x: Tensor, block: Block = block, mask: Tensor = mask) -> Tensor:
            return block.moe(block.norm(x), token_mask=mask).y.square().sum()

        with perturbed(), record(block) as recording:
            losses = [checkpoint(run_one, x, use_reentrant=False) for x in xs]
            assert not torch.equal(*(ids[:, :1] for ids in recording.calls["moe.router"]))
            for loss in losses:
                loss.backward()
        found = grads(block, xs)
        block.zero_grad()
        for x in xs:
            x.grad = None
            run_one(x).backward()
        compare(found, grads(block, xs))


def test_what_tells_tokens_apart_is_not_rounded_by_autocast() -> None:
    logits = torch.randn(5, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(sum_of(logits), sum_of(logits.clone()))
        assert sum_of(logits).dtype == torch.float32


@pytest.mark.parametrize(
    "kept",
    [["mm", "addmm", "bmm"], ["sort", "argsort", "topk", "cat", "argmax"], ["clone", "gather", "_softmax", "_to_copy"],
     ["scatter_add", "where", "masked_fill", "add", "mul"], ["uniform_", "empty_like"], ["equal", "mul"]],
    ids=lambda names: names[0],
)  # fmt: skip
def test_selective_checkpointing_keeps_what_its_policy_says(kept: list[str]) -> None:
    def policy(_c: object, op: torch._ops.OpOverload, *_a: object, **_k: object) -> CheckpointPolicy:
        keeps = op.name().split("::")[1].split(".")[0] in kept
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    found = []
    for selective in (False, True):
        jitter = 0.3 if {"uniform_", "equal"} & {*kept} else 0
        block, xs = Block(twins(capacity_factor=0.7, global_aux_loss=0.1, jitter=jitter)), micro_batches(2)
        if "equal" in kept:
            block.moe.router.generator = torch.Generator().manual_seed(9)
        torch.manual_seed(3)
        context = partial(create_selective_checkpoint_contexts, policy)
        with perturbed():
            for x in xs:
                y, aux = checkpoint(block, x, use_reentrant=False, context_fn=context) if selective else block(x)
                (y.square().sum() + aux).backward()
        assert block.moe.router.take_loads().sum() == 2 * T * 3
        found.append(grads(block, xs))
    compare(found[1], found[0])


class Adapted(ExpertMLP):
    """Experts of one's own: ours, and a product beside them."""

    def __init__(self) -> None:
        super().__init__(E, D, 6, dtype=torch.float64)
        self.beside = nn.Linear(D, D, bias=False, dtype=torch.float64)

    def forward(self, x_MD: Tensor, ids_MK: Tensor, w_MK: Tensor, *, num_slots: int | None = None) -> Tensor:
        y: Tensor = super().forward(x_MD, ids_MK, w_MK, num_slots=num_slots) + self.beside(x_MD)
        return y


def test_a_policy_sees_the_products_of_experts_of_one_s_own() -> None:
    block, seen = Block(twins()), []

    def policy(context: Any, op: torch._ops.OpOverload, *_a: object, **_k: object) -> CheckpointPolicy:
        seen.extend([] if context.is_recompute else [op.name()])
        return CheckpointPolicy.MUST_SAVE if op.name() == "aten::mm" else CheckpointPolicy.PREFER_RECOMPUTE

    for own in (0, 1):
        if own:
            block.moe.experts = Adapted()
        seen.clear()
        context = partial(create_selective_checkpoint_contexts, policy)
        y, aux = checkpoint(block, micro_batches(1)[0], use_reentrant=False, context_fn=context)
        (y.square().sum() + aux).backward()
        assert seen.count("aten::mm") == 1 + own, "the logits, and those beside"


def test_what_watches_one_of_the_two_runs_changes_nothing() -> None:
    """A hook on the router or on all modules, as a counter of operations has, in the first run alone."""
    router = RouterConfig(num_experts=E, top_k=2, aux_loss=0.1)
    made = MoEConfig(dim=D, hidden=6, latent_dim=4, router=router, dtype=torch.float64)
    found = []
    for watched in (False, True):
        torch.manual_seed(0)
        block, xs = Block(made.build()), micro_batches(1)
        hook = block.moe.router.register_forward_hook(lambda *_: None) if watched else None
        with FlopCounterMode(display=False) if watched else nullcontext():
            loss = run(block, xs[0], False)
        if hook is not None:
            hook.remove()
        loss.backward()
        found.append(grads(block, xs))
    compare(found[1], found[0])


def test_hooks_of_one_s_own_on_saved_tensors_are_looked_at_no_further() -> None:
    def pack(x: Tensor) -> Tensor:
        return x if True else later

    block, xs = Block(twins()), micro_batches(1)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = run(block, xs[0], None)
    later = None
    loss.backward()
    assert all(grad.isfinite().all() for grad in grads(block, xs).values())


@pytest.mark.parametrize("mode", [None, True, False])
def test_nothing_is_kept_behind(mode: bool | None) -> None:
    block, xs = Block(twins()), micro_batches(3)
    memory = block.moe.router.memory = Memory(limit=4)
    for x in xs:
        loss = run(block, x, mode)
        assert memory.alive() == 1
        loss.backward()
        del loss
        gc.collect()
        assert memory.alive() == 0
    with torch.no_grad():  # gradients off while training: it might be a first run, so it is kept, but not without end
        for x in micro_batches(9):
            block(x)
    assert memory.alive() == 4
    assert {one.choice.chosen.dtype for one in memory._held} == {torch.int16}
    block.eval()
    with torch.no_grad():
        block(x)
    assert memory.alive() == 4
    assert copy.deepcopy(block).moe.router.memory.alive() == 0
    assert pickle.loads(pickle.dumps(block)).moe.router.memory.alive() == 0


@pytest.mark.parametrize(
    ("dtype", "near"), [(torch.float64, 1e-2), (torch.float32, None), (torch.bfloat16, None)], ids=str
)
def test_other_tokens_in_a_backward_are_a_decision_of_their_own(dtype: torch.dtype, near: float | None) -> None:
    """A custom backward may run the layer on tokens of its own: those are routed afresh, and counted. Also where they
    are nearly those of the forward, by more than rounding."""
    block, xs = Block(twins()).to(dtype), [x.detach().to(dtype).requires_grad_() for x in micro_batches(2)]
    if near is not None:
        xs[1] = torch.lerp(block.norm(xs[0]), xs[1], near)
    seen: list[Tensor] = []

    class Odd(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: object, d: Tensor) -> Tensor:
            seen.append(block.moe(xs[1].detach()).ids_TK)
            return d

    loss = run(block, Odd.apply(xs[0]), None)
    loss.backward()
    assert torch.equal(seen[0], block.moe(xs[1]).ids_TK)
    assert block.moe.router.take_loads().sum() == 3 * T * 3


@pytest.mark.parametrize("use_reentrant", MODES)
def test_no_tokens(use_reentrant: bool) -> None:
    block = Block(twins())
    x = torch.zeros(0, D, dtype=torch.float64, requires_grad=True)
    run(block, x, use_reentrant).backward()
    assert all((grad == 0).all() for grad in grads(block, [x]).values())


def test_expert_parallel_ranks_stay_together() -> None:
    answers = run_ranks(on_ranks, 2)
    assert all(gap < 1e-7 for gaps in answers for gap in gaps.values()), answers
    assert all(len(gaps) == 2 * len({name.split()[1] for name in gaps}) for gaps in answers)
