"""Replay and record the ways models are trained: checkpointed, accumulated, compiled, one in the other."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import checkpoint

from helpers import rollouts
from helpers.families import Batch, build_model, forward, sample_batch
from helpers.seeing import seen
from integrations.transformers.test_replay_families import close, others, run
from trimtab.errors import ConfigError, InputError
from trimtab.integrations.transformers.routers.find import find_routers
from trimtab.integrations.transformers.routers.observe import Observed, record, replay
from trimtab.integrations.transformers.routers.selection_bias import add_selection_bias
from trimtab.routing.observers import ADDED, SelectionBias
from trimtab.routing.recompute import replay_in_recompute
from trimtab.routing.replay import Decisions

pytestmark = pytest.mark.usefixtures("one_thread")


def case(name: str, seed: int = 0) -> tuple[Any, Batch, Decisions]:
    """A model, a batch of it, and decisions that are not its own."""
    model = build_model(name).train()
    batch = sample_batch(model, 2 + seed, 12 - seed, seed)
    with record(model) as recording:
        forward(model, batch)
    return model, batch, others(recording.decisions(), seed)


def non_reentrant(model: Any) -> None:
    model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})


def reentrant(model: Any) -> None:
    model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": True})
    model.enable_input_require_grads()


def told_twice(model: Any) -> None:
    """Our own contexts for a recompute on top."""
    kwargs = {"use_reentrant": False, "context_fn": replay_in_recompute}
    model.activation_checkpointing_enable(activation_checkpointing_kwargs=kwargs)


def wrapper(model: Any) -> None:
    layer = type(next(m for n, m in model.named_modules() if n.endswith("layers.0")))
    apply_activation_checkpointing(
        model, checkpoint_wrapper_fn=checkpoint_wrapper, check_fn=lambda module: isinstance(module, layer)
    )


@pytest.mark.parametrize("name", ["qwen3_moe", "inkling2_loop", "deepseek_v4", "zaya"])
@pytest.mark.parametrize("way", [non_reentrant, reentrant, told_twice, wrapper])
def test_checkpointed_backward_behind_the_contexts(name: str, way: Callable[[Any], None]) -> None:
    """Two micro-batches with decisions of their own are in flight: each recompute takes those of its first run."""
    (model, *first), (_, *second) = case(name), case(name, 1)
    model.zero_grad()
    for batch, decisions in (first, second):
        with replay(model, decisions):
            forward(model, batch)[1].backward()
    wanted = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
    way(model)
    model.zero_grad()
    losses = []
    with ExitStack() as stack:
        recording = stack.enter_context(record(model))
        for batch, decisions in (first, second):
            with replay(model, decisions):
                losses.append(forward(model, batch)[1])
        sum(losses).backward()  # type: ignore[union-attr]
    names = {key: key.replace("_checkpoint_wrapped_module.", "") for key, _ in model.named_parameters()}
    close({names[key]: p.grad for key, p in model.named_parameters() if p.grad is not None}, wanted, 2e-6)
    for i, (_, decisions) in enumerate((first, second)):
        assert recording.decisions(i).layers == decisions.layers
        if name != "zaya":  # a skipped token with weight 0 by rounding
            assert torch.equal(recording.decisions(i).ids, decisions.ids)
    assert {len(calls) for calls in recording.calls.values()} == {2}  # each forward once
    assert not [key for key, module in model.named_modules() if "forward" in vars(module)]


def test_a_checkpoint_of_ones_own_is_recorded_once() -> None:
    model, batch, decisions = case("qwen3_moe")
    with replay(model, decisions):
        wanted = run(model, batch)
    layer = model.model.layers[1]
    plain = layer.forward
    layer.forward = lambda x, **kwargs: checkpoint(lambda x: plain(x, **kwargs), x, use_reentrant=False)
    with replay(model, decisions), record(model) as recording:
        close(run(model, batch), wanted, 1e-6)
    assert {len(calls) for calls in recording.calls.values()} == {1}


def test_generation_is_recorded_forward_by_forward() -> None:
    """A prompt and one token at a time: joined along positions these are the decisions of the whole."""
    model = rollouts.build()
    prompt = torch.randint(1, 64, (2, 5), generator=torch.Generator().manual_seed(4))
    with record(model) as recording:
        whole = model.generate(prompt, max_new_tokens=4, do_sample=False, use_cache=True)
    parts = [recording.decisions(i) for i in range(4)]
    assert [part.ids.shape[1] for part in parts] == [5, 1, 1, 1]
    with record(model) as recording:
        model(input_ids=whole[:, :-1])
    assert torch.equal(Decisions.join(parts).ids, recording.decisions().ids)


def test_compiled() -> None:
    """One graph for the model alone and one for replay, whatever the decisions; no break."""
    model, batch, decisions = case("qwen3_moe")
    plain = run(model, batch)
    torch.compiler.reset()
    counters.clear()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    close(run(compiled, batch), {"_orig_mod." * (k not in ("output", "loss")) + k: v for k, v in plain.items()}, 1e-6)
    for seed in range(4):
        told = others(decisions, seed)
        with replay(model, told):
            wanted = run(model, batch)
        with replay(compiled, told), record(compiled) as recording:
            found = run(compiled, batch)
        close({key.removeprefix("_orig_mod."): value for key, value in found.items()}, wanted, 1e-6)
        assert recording.decisions().layers == told.layers
        assert torch.equal(recording.decisions().ids, told.ids)
    assert counters["stats"]["unique_graphs"] == 2
    assert not counters["graph_break"]


def test_contexts_inside_each_other() -> None:
    model, batch, decisions = case("mixtral")
    inner = others(decisions, 7)
    with record(model) as outer, replay(model, decisions):
        forward(model, batch)
        with replay(model, inner), record(model) as last:
            forward(model, batch)
        forward(model, batch)
    assert torch.equal(last.decisions().ids, inner.ids)
    for call, wanted in enumerate((decisions, inner, decisions)):
        assert torch.equal(outer.decisions(call).ids, wanted.ids)
    assert "forward" not in vars(find_routers(model)[0].module)


def test_an_added_selection_bias_is_skipped() -> None:
    """Whichever came first, what only sees has the experts that hold."""
    model, batch, decisions = case("mixtral")
    places = find_routers(model)
    seeing = seen(model)
    add_selection_bias(places, None)
    Observed(model, SelectionBias())
    for place in places:
        getattr(place.module, ADDED).copy_(torch.arange(8.0))
    with record(model) as recording:
        forward(model, batch)
    assert (recording.decisions().ids.sort(-1).values == torch.tensor([6, 7])).all()
    with record(model) as recording, replay(model, decisions):
        forward(model, batch)
    assert torch.equal(recording.decisions().ids, decisions.ids)
    assert torch.equal(seeing.runs[-1].ids_TK, decisions.ids[:, :, 1].flatten(0, 1))


def test_a_router_that_decides_again_needs_decisions_for_that() -> None:
    model, batch, decisions = case("inkling2_loop")
    assert decisions.layers == ("model.layers.0.mlp.gate", "model.layers.1.mlp.gate", "model.layers.1.mlp.gate#2")
    once = Decisions(ids=decisions.ids[:, :, :2], num_experts=8, layers=decisions.layers[:2])
    with replay(model, once), pytest.raises(InputError, match=r"gate#2.*Inkling2LoopTopKRouter decides again"):
        forward(model, batch)


def test_what_cannot_be_told_is_refused_before_a_forward() -> None:
    model, _, decisions = case("mixtral")
    model.model.layers[1].mlp.gate = torch.nn.Linear(32, 8)
    for context in (record(model), replay(model, decisions)):
        with pytest.raises(ConfigError, match=r"layers\.1\.mlp\.experts \(MixtralExperts\): no router"), context:
            pass
