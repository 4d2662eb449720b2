"""Routers that are observed and told, the ways models are trained: checkpointed, accumulated, compiled, generating."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import checkpoint

from helpers import rollouts
from helpers.families import Batch, build_model, forward, sample_batch
from helpers.replayed import close, others, run
from helpers.seeing import counted, padded, seen, slots
from trimtab.errors import ConfigError, InputError
from trimtab.integrations.transformers import LoadBalancer
from trimtab.integrations.transformers.routers.find import find_routers
from trimtab.integrations.transformers.routers.observe import Observed, observing, record, replay
from trimtab.integrations.transformers.routers.selection_bias import add_selection_bias
from trimtab.routing.losses import StepTotals
from trimtab.routing.observers import ADDED, BalanceLosses, Loads, SelectionBias
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


def enabled(model: Any, **kwargs: Any) -> None:
    model.activation_checkpointing_enable(activation_checkpointing_kwargs=kwargs)
    model.enable_input_require_grads()


def wrapper(model: Any) -> None:
    layer = type(next(m for n, m in model.named_modules() if n.endswith("layers.0")))
    apply_activation_checkpointing(
        model, checkpoint_wrapper_fn=checkpoint_wrapper, check_fn=lambda module: isinstance(module, layer)
    )


def of_ones_own(model: Any) -> None:
    for layer in model.get_decoder().layers:
        plain = layer.forward
        layer.forward = lambda x, plain=plain, **kwargs: checkpoint(
            lambda x: plain(x, **kwargs), x, use_reentrant=False, context_fn=replay_in_recompute
        )


RECOMPUTES: dict[str, Callable[[Any], None]] = {
    "reentrant": partial(enabled, use_reentrant=True), "not reentrant": partial(enabled, use_reentrant=False),
    "told twice": partial(enabled, use_reentrant=False, context_fn=replay_in_recompute), "wrapper": wrapper,
    "own": of_ones_own,
}  # fmt: skip


def several_forwards(model: Any, given: list[tuple[Batch, Decisions]], losses: bool) -> dict[str, Tensor]:
    """Two forwards of other sizes and decisions, then one backward, and forwards that train nothing among them: loads
    and gradients. losses: of balance, over the batch of both."""
    (first, told), (second, others_told) = given
    loads, balance = Loads(), BalanceLosses(aux_loss=0.5, z_loss=0.05, group=lambda: None)
    if losses:
        totals = StepTotals(tokens=slots(first, second) / 2, counts_E=torch.arange(8.0))
        balance.totals = dict.fromkeys((place.name for place in find_routers(model)), totals)
    model.zero_grad()
    with observing(model, loads, *([balance] if losses else [])), record(model) as recording:
        with replay(model, told):
            loss = forward(model, first)[1]
        with torch.no_grad():
            forward(model, second)
        with replay(model, others_told):
            loss = loss + forward(model, second)[1]
        model.eval()
        forward(model, first)
        model.train()
        loss.backward()
    assert {len(calls) for calls in recording.calls.values()} == {4}, "each forward once"
    for call, decisions in ((0, told), (2, others_told)):
        assert recording.decisions(call).layers == decisions.layers
        if "Zaya" not in type(model).__name__:  # a skipped token with weight 0 by rounding
            assert torch.equal(recording.decisions(call).ids, decisions.ids)
    found = loads.take()
    for i, name in enumerate(told.layers if losses else ()):
        ids = torch.cat([decisions.ids[:, :, i][batch["attention_mask"].bool()] for batch, decisions in given])
        assert torch.equal(found[name], ids.flatten().bincount(minlength=9)), "once, padding never, none without room"
    plain = {name.replace("_checkpoint_wrapped_module.", ""): p for name, p in model.named_parameters()}
    return found | {name: p.grad for name, p in plain.items() if p.grad is not None}


@pytest.mark.parametrize(
    ("name", "way"),
    [("qwen3_moe", "own"), *product(("qwen3_moe", "inkling2_loop", "deepseek_v4", "zaya"), [*RECOMPUTES][:4])],
)
def test_a_recompute_is_of_its_own_forward(name: str, way: str) -> None:
    """Of its mask, its decisions and its losses, and it is not counted."""
    padding = name == "qwen3_moe"
    model = build_model(name, dtype=torch.float64).train()
    model.set_experts_implementation("eager")
    given = []
    for seed, size in enumerate(((2, 12), (3, 11))):
        batch = sample_batch(model, *size, seed, padded=padding)
        with record(model) as recording:
            forward(model, batch)
        given.append((batch, others(recording.decisions(), seed)))
    wanted = several_forwards(model, given, losses=padding)
    RECOMPUTES[way](model)
    close(several_forwards(model, given, losses=padding), wanted, 1e-12)
    assert not [key for key, module in model.named_modules() if "forward" in vars(module) and way != "own"]
    assert not model._forward_pre_hooks
    assert "Checkpointed" not in str([vars(module) for module in model.modules()])


def test_each_forward_counts_once_whatever_came_before_it() -> None:
    model, loads = build_model("mixtral").train(), Loads()
    with observing(model, loads):
        model(**padded())  # tried, and no backward
        counted(loads)
        for way in ("reentrant", "not reentrant", "", "reentrant"):
            if way:
                RECOMPUTES[way](model)
            else:
                model.activation_checkpointing_disable()
            for given in (padded(0), padded(1)):
                model(**given).loss.backward()
                with torch.no_grad():
                    model(**given)
                assert counted(loads) == [slots(given)] * 2, way


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


def test_replay_compiled() -> None:
    """One graph for the model alone and one for replay, whatever the decisions; no break."""
    model, batch, decisions = case("qwen3_moe")
    plain = run(model, batch)
    torch.compiler.reset()
    counters.clear()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    close({key.removeprefix("_orig_mod."): value for key, value in run(compiled, batch).items()}, plain, 1e-6)
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


def balanced(model: Any, run: Any) -> dict[str, Any]:
    """Two steps of two micro-batches, all on."""
    balance, loads = LoadBalancer(model, rate=0.05, add_bias=True, aux_loss=0.5, z_loss=0.05), Loads()
    observed = Observed(model, loads)
    found: dict[str, Any] = {}
    for step in range(2):
        model.zero_grad()
        for micro in range(2):
            run(**padded(micro)).loss.backward()
        found |= {f"{step} {name}": load for name, load in balance.step().items()}
        found |= {f"{step} {name}": value for name, value in balance.losses.items()}
        found |= {f"{step} loads {name}": load for name, load in loads.take().items()}
    found |= {name: b.clone() for name, b in model.named_buffers() if name.endswith("selection_bias")}
    found |= {name: p.grad.clone() for name, p in model.named_parameters()}
    balance.remove()
    observed.remove()
    return found


@pytest.mark.parametrize("behind", [False, True], ids=["before", "behind"])
def test_balance_compiled(behind: bool) -> None:
    """Put on before a model is compiled; and behind that, when its graphs have run already."""
    torch.compiler.reset()
    model = build_model("qwen3_moe").train()
    wanted = balanced(model, model)
    for place in find_routers(model):
        place.module.selection_bias.zero_()
    counters.clear()
    if behind:
        model.compile(backend="aot_eager")
        model(**padded()).loss.backward()
        assert counters["stats"]["unique_graphs"] == 1
        found = balanced(model, model)
    else:
        found = balanced(model, torch.compile(model, backend="aot_eager"))
    assert counters["stats"]["unique_graphs"] > 1
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=name)
    torch.compiler.reset()


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


def test_refused() -> None:
    """A router that decides again needs decisions for that; and one that nobody knows is named before a forward."""
    model, batch, decisions = case("inkling2_loop")
    assert decisions.layers == ("model.layers.0.mlp.gate", "model.layers.1.mlp.gate", "model.layers.1.mlp.gate#2")
    once = Decisions(ids=decisions.ids[:, :, :2], num_experts=8, layers=decisions.layers[:2])
    with replay(model, once), pytest.raises(InputError, match=r"gate#2.*Inkling2LoopTopKRouter decides again"):
        forward(model, batch)
    model, _, decisions = case("mixtral")
    model.model.layers[1].mlp.gate = torch.nn.Linear(32, 8)
    for context in (record(model), replay(model, decisions)):
        with pytest.raises(ConfigError, match=r"layers\.1\.mlp\.experts \(MixtralExperts\): no router"), context:
            pass
