"""The port of routers: whoever observes, each run is seen as part of its own forward, and counted once."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

import trimtab
from helpers.balance_ranks import batches
from helpers.families import build_model
from helpers.seeing import Seeing
from integrations.transformers.test_replay_ways import wrapper
from trimtab.errors import ConfigError, InputError
from trimtab.integrations.transformers import LoadBalancer
from trimtab.integrations.transformers.routers.find import find_routers
from trimtab.integrations.transformers.routers.observe import Observed, observing
from trimtab.moe import MoEConfig
from trimtab.routing.config import RouterConfig
from trimtab.routing.losses import StepTotals
from trimtab.routing.observers import BalanceLosses, Loads, Recorder
from trimtab.routing.port import Observer, RouterRun
from trimtab.routing.recompute import replay_in_recompute

pytestmark = pytest.mark.usefixtures("one_thread")

GATES = {"qwen3_moe": "gate", "gpt_oss": "router", "deepseek_v3": "gate"}


def batch(micro: int = 0, length: int = 12) -> dict[str, Tensor]:
    ids, mask = (t[:, :length] for t in batches()[0][micro])
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def slots(*given: dict[str, Tensor]) -> int:
    """Of two experts a token."""
    return 2 * sum(int(one["attention_mask"].sum()) for one in given)


def counted(loads: Loads) -> list[int]:
    return [int(load.sum()) for load in loads.take().values()]


# Of its own forward

Call = Callable[[Any, dict[str, Tensor]], Any]
CALLS: dict[str, Call] = {
    "by name": lambda model, b: model(input_ids=b["input_ids"], attention_mask=b["attention_mask"]),
    "in their order": lambda model, b: model(b["input_ids"], b["attention_mask"]),
    "the mask alone by name": lambda model, b: model(b["input_ids"], attention_mask=b["attention_mask"]),
    "below the head": lambda model, b: model.model(b["input_ids"], b["attention_mask"]),
    "the decoder": lambda model, b: model.get_decoder()(input_ids=b["input_ids"], attention_mask=b["attention_mask"]),
    "embeddings": lambda model, b: model.model(
        inputs_embeds=model.get_input_embeddings()(b["input_ids"]), attention_mask=b["attention_mask"]
    ),
    "in a wrapper": lambda model, b: Handing(model)(b["input_ids"], b["attention_mask"]),
}


class Handing(nn.Module):
    """Hands on whatever it gets, as DDP does."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("family", GATES)
def test_padding_counts_nowhere_however_a_model_is_called(family: str, call: str) -> None:
    """A forward of the whole with another mask comes before each."""
    model, loads = build_model(family).train(), Loads()
    with observing(model, loads), trimtab.record(model) as recording:
        model(**batch(1))
        counted(loads)
        CALLS[call](model, batch())
    assert counted(loads) == [slots(batch())] * 2
    with trimtab.record(model) as whole:
        model(**batch())
    assert torch.equal(recording.decisions().ids, whole.decisions().ids)
    with observing(Handing(model), loads):
        CALLS[call](model, batch())
    assert counted(loads) == [slots(batch())] * 2


def test_a_mask_that_no_argument_tells() -> None:
    """Packed, as `trimtab train` has it: the caller says which tokens are padding."""
    model, loads = build_model("mixtral").train(), Loads()
    given = batch()
    with observing(model, loads) as observed:
        observed.token_mask = given["attention_mask"].bool()
        model(input_ids=given["input_ids"].reshape(1, -1))
        assert counted(loads) == [slots(given)] * 2
        observed.token_mask = None
        model(input_ids=given["input_ids"])
    assert counted(loads) == [2 * given["input_ids"].numel()] * 2


def test_layers_that_are_called_by_themselves() -> None:
    """There is no forward of the model, and so no batch: counted, and not recorded, which is said."""
    model, loads = build_model("mixtral").train(), Loads()
    with observing(model, loads), trimtab.record(model) as recording:
        model.model.layers[0].mlp(torch.randn(3, 5, 32))
    assert counted(loads) == [30, 0]
    with pytest.raises(InputError, match=r"layers\.0\.mlp\.gate ran outside of a forward of the model"):
        recording.decisions()


def gc(reentrant: bool, model: Any) -> None:
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()


def of_ones_own(model: Any) -> None:
    for layer in model.model.layers:
        plain = layer.forward
        layer.forward = lambda x, plain=plain, **kwargs: checkpoint(
            lambda x: plain(x, **kwargs), x, use_reentrant=False, context_fn=replay_in_recompute
        )


RECOMPUTES: dict[str, Callable[[Any], None]] = {
    "reentrant": partial(gc, True), "not reentrant": partial(gc, False), "wrapper": wrapper, "own": of_ones_own,
}  # fmt: skip


def several_forwards(model: Any) -> dict[str, Tensor]:
    """Two forwards of other masks and sizes and one backward, forwards that train nothing among them."""
    loads, losses = Loads(), BalanceLosses(aux_loss=0.5, z_loss=0.05, group=lambda: None)
    tokens = slots(batch(0), batch(1, 7)) / 2
    losses.totals = {place.name: StepTotals(tokens=tokens, counts_E=torch.arange(8.0)) for place in find_routers(model)}
    model.zero_grad()
    with observing(model, loads, losses):
        first = model(**batch(0))
        with torch.no_grad():
            model(**batch(1))
        second = model(**batch(1, 7))
        model.eval()(**batch(1, 9))
        model.train()
        (first.loss + second.loss).backward()
    plain = {name.replace("_checkpoint_wrapped_module.", ""): p for name, p in model.named_parameters()}
    return loads.take() | {name: p.grad for name, p in plain.items() if p.grad is not None}


@pytest.mark.parametrize("way", RECOMPUTES)
def test_a_recompute_is_of_its_own_forward(way: str) -> None:
    model = build_model("qwen3_moe", dtype=torch.float64).train()
    model.set_experts_implementation("eager")
    wanted = several_forwards(model)
    assert [int(wanted[place.name].sum()) for place in find_routers(model)] == [slots(batch(0), batch(1, 7))] * 2
    RECOMPUTES[way](model)
    found = several_forwards(model)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert (found[name] - value).abs().max() <= 1e-12 * max(float(value.abs().max()), 1e-3), name


def test_each_forward_counts_once_whatever_came_before_it() -> None:
    model, loads = build_model("mixtral").train(), Loads()
    with observing(model, loads):
        model(**batch())  # tried, and no backward
        counted(loads)
        for way in (True, False, None, True):
            if way is None:
                model.activation_checkpointing_disable()
            else:
                gc(way, model)
            for given in (batch(0), batch(1)):
                model(**given).loss.backward()
                with torch.no_grad():
                    model(**given)
                assert counted(loads) == [slots(given)] * 2, way


@pytest.mark.parametrize("recompute", ["", "reentrant", "not reentrant"])
def test_all_observers_see_the_same_runs(recompute: str) -> None:
    model = build_model("qwen3_moe").train()
    if recompute:
        RECOMPUTES[recompute](model)
    balance, loads, seeing = LoadBalancer(model, add_bias=True), Loads(), Seeing()
    observed = Observed(model, loads, seeing)
    for micro in range(2):
        with trimtab.record(model) as recording:
            loss = model(**batch(micro)).loss
        loss.backward()
        real = batch(micro)["attention_mask"].bool()
        decisions = recording.decisions()
        for i, (name, load) in enumerate(loads.take().items()):
            assert name == decisions.layers[i]
            assert torch.equal(load, decisions.ids[:, :, i][real].flatten().bincount(minlength=9)), "none without room"
    assert len(seeing.runs) == 2 * 2 * (2 if recompute else 1)
    assert sum(run.counts for run in seeing.runs) == 2 * 2
    assert [int(load.sum()) for load in balance.step().values()] == [slots(batch(0), batch(1))] * 2
    with trimtab.record(model.eval()) as recording:
        model(**batch()).loss.backward()
        with torch.no_grad():
            model.train()(**batch())
    assert recording.decisions(1).ids.shape == (4, 12, 2, 2), "a recording has what is evaluated"
    assert not any(load.any() for load in balance.step().values())
    assert not any(load.any() for load in loads.take().values())
    balance.remove()
    observed.remove()
    assert not [place for place in find_routers(model) if "forward" in vars(place.module)]
    assert not model._forward_pre_hooks
    assert "Checkpointed" not in str([vars(module) for module in model.modules()])


# Under peft


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(**batch()).logits
    return found


@pytest.mark.parametrize("family", GATES)
def test_a_router_that_peft_saves_whole(family: str) -> None:
    """The active copy is the router, by its own name; whichever runs is observed."""
    model = build_model(family).train()
    names = [place.name for place in find_routers(model)]
    with trimtab.record(model) as recording:
        model(**batch())
    decisions = recording.decisions()
    peft = get_peft_model(model, LoraConfig(r=2, target_modules=["o_proj"], modules_to_save=[GATES[family]]))
    places = find_routers(peft)
    assert [place.name for place in places] == names
    assert all(p.requires_grad for place in places for p in place.module.parameters())
    drawn = decisions.ids.flip(0)
    told = trimtab.Decisions(ids=drawn, num_experts=8, layers=decisions.layers)
    for context in (peft.disable_adapter, None):
        with trimtab.replay(peft, told), trimtab.record(peft) as again:
            if context is None:
                peft(**batch()).loss.backward()
            else:
                with context():
                    peft(**batch())
        assert torch.equal(again.decisions().ids, drawn)
    assert all(any(p.grad is not None and p.grad.any() for p in place.module.parameters()) for place in places)
    peft.add_adapter("second", LoraConfig(r=2, target_modules=["o_proj"], modules_to_save=[GATES[family]]))
    peft.set_adapter("second")
    second = find_routers(peft)
    assert [place.name for place in second] == names
    assert not any(a.module is b.module for a, b in zip(places, second, strict=True))
    balance = LoadBalancer(peft, bias=None, aux_loss=0.1)
    peft(**batch()).loss.backward()
    assert [int(load.sum()) for load in balance.step().values()] == [slots(batch())] * 2


def test_names_are_those_of_the_model_with_an_adapter_and_without() -> None:
    model = build_model("qwen3_moe").train()
    with trimtab.record(model) as recording:
        model(**batch())
    told = recording.decisions()
    config = LoraConfig(r=2, target_modules=["o_proj"], target_parameters=["mlp.gate.weight"])
    peft, loads = get_peft_model(model, config), Loads()
    with observing(peft, loads), trimtab.replay(peft, told), trimtab.record(peft) as recording:
        peft(**batch())
    assert torch.equal(recording.decisions().ids, told.ids)
    assert tuple(loads.take()) == recording.decisions().layers == told.layers
    with trimtab.replay(build_model("qwen3_moe"), recording.decisions()):
        pass


def test_a_model_that_was_observed_before_peft_copied_its_routers() -> None:
    model = build_model("qwen3_moe").train()
    LoadBalancer(model, add_bias=True)
    peft = get_peft_model(model, LoraConfig(r=2, target_modules=["o_proj"], modules_to_save=["gate"]))
    loads = Loads()
    with observing(peft, loads), trimtab.record(peft) as recording:
        peft(**batch())
    assert counted(loads) == [slots(batch())] * 2
    assert recording.decisions().ids.shape == (4, 12, 2, 2)


# Copies


def biased(family: str = "qwen3_moe") -> tuple[Any, LoadBalancer]:
    model = build_model(family).train()
    balance = LoadBalancer(model, add_bias=True, aux_loss=0.1)
    for place in find_routers(model):
        place.module.selection_bias.copy_(torch.linspace(-1, 1, 8))
    return model, balance


def through_a_file(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {"deepcopy": copy.deepcopy, "EMA": lambda model: AveragedModel(model).module, "file": through_a_file}


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_copy_has_a_bias_of_its_own_and_nobody_else_observes_it(way: str, checkpointed: bool) -> None:
    """A reference policy: the policy's bias moves on, and what the copy routes counts nowhere."""
    model, balance = biased()
    if checkpointed:
        model.activation_checkpointing_enable({"use_reentrant": False})
        model.disable_input_require_grads()  # a hook of transformers' that no file takes
        model(**batch()).loss.backward()
        balance.step()
        model.zero_grad()
    before = logits(model)
    made = COPIES[way](model)
    assert torch.equal(logits(made), before), "it selects by its bias, as the model does"
    for place in find_routers(model):
        place.module.selection_bias.zero_()
    assert torch.equal(logits(made), before)
    assert not torch.equal(logits(model), before)
    made.train()(**batch()).loss.backward()
    assert not any(load.any() for load in balance.step().values())
    loads, recorder = Loads(), Recorder()
    with observing(made, loads, recorder):
        made(**batch())
        model(**batch(1))
    assert counted(loads) == [slots(batch())] * 2
    assert recorder.decisions().ids.shape == (4, 12, 2, 2)
    assert [int(load.sum()) for load in balance.step().values()] == [slots(batch(1))] * 2
    assert torch.equal(logits(made), before), "who has gone takes no bias along"


def test_a_router_that_is_copied_by_itself_takes_no_model_along() -> None:
    """As peft copies one that it saves whole."""
    model, _ = biased("mixtral")
    gate = copy.deepcopy(model.model.layers[0].mlp.gate)
    assert len(list(gate.modules())) == 1
    assert not any(isinstance(value, nn.Module) for value in vars(gate).values())
    x = torch.randn(5, 32)
    assert all(map(torch.equal, gate(x), model.model.layers[0].mlp.gate(x)))


# Compiled

OPTIONS: dict[str, Any] = {"rate": 0.05, "add_bias": True, "aux_loss": 0.5, "z_loss": 0.05}


def balanced(model: Any, run: Any) -> dict[str, Any]:
    """Two steps of two micro-batches, all on."""
    balance, loads = LoadBalancer(model, **OPTIONS), Loads()
    observed = Observed(model, loads)
    found: dict[str, Any] = {}
    for step in range(2):
        model.zero_grad()
        for micro in range(2):
            run(**batch(micro)).loss.backward()
        found |= {f"{step} {name}": load for name, load in balance.step().items()}
        found |= {f"{step} {name}": value for name, value in balance.losses.items()}
        found |= {f"{step} loads {name}": load for name, load in loads.take().items()}
    found |= {name: b.clone() for name, b in model.named_buffers() if name.endswith("selection_bias")}
    found |= {name: p.grad.clone() for name, p in model.named_parameters()}
    balance.remove()
    observed.remove()
    return found


@pytest.mark.parametrize("behind", [False, True], ids=["before", "behind"])
def test_compiled(behind: bool) -> None:
    """Put on before a model is compiled; and behind that, when its graphs have run already."""
    torch.compiler.reset()
    model = build_model("qwen3_moe").train()
    wanted = balanced(model, model)
    for place in find_routers(model):
        place.module.selection_bias.zero_()
    counters.clear()
    if behind:
        model.compile(backend="aot_eager")
        model(**batch()).loss.backward()
        assert counters["stats"]["unique_graphs"] == 1
        found = balanced(model, model)
    else:
        found = balanced(model, torch.compile(model, backend="aot_eager"))
    assert counters["stats"]["unique_graphs"] > 1
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=name)
    torch.compiler.reset()


# Observers of one's own, also of our routers


class Ours(nn.Module):
    """A model with layers of trimtab's."""

    def __init__(self) -> None:
        super().__init__()
        router = RouterConfig(num_experts=8, top_k=2, normalize=True)
        self.embed = nn.Embedding(64, 16)
        self.layers = nn.ModuleList(MoEConfig(dim=16, hidden=8, router=router).build(f"{n}") for n in range(2))

    def forward(self, input_ids: Tensor, attention_mask: Tensor, **_: Any) -> Tensor:
        x: Tensor = self.embed(input_ids)
        for layer in self.layers:
            out = layer(x, token_mask=attention_mask.bool())
            x = x + out.y + sum(out.losses.values(), torch.zeros(()))
        return x.square().mean()


class Entropy(Observer):
    """A loss of one's own: the mean entropy of the scores, with a factor; and the first expert in each pair is next."""

    def __init__(self) -> None:
        self.seen = 0

    def decide(self, run: RouterRun) -> Tensor:
        return (run.ids_TK + 1) % run.info.num_experts

    def see(self, run: RouterRun) -> Tensor:
        self.seen += run.counts
        scores = run.scores()
        scores = scores / scores.sum(-1, keepdim=True)
        return -0.3 * (scores * scores.log()).sum(-1).mean()


class FirstExperts(Observer):
    """Every token goes to the first experts: by a graph of the scores, in int32, behind a look at what it changes."""

    asked = False

    @torch.no_grad()
    def see(self, run: RouterRun) -> None:
        self.asked |= run.counts  # the answer is for all: no gradients here, but the run has

    def decide(self, run: RouterRun) -> Tensor:
        assert run.chosen_TK.shape == run.ids_TK.shape
        scores = run.scores()
        first = torch.arange(run.info.num_experts, device=scores.device) < run.info.top_k
        return (scores * 0).masked_fill(first, 1.0).topk(run.info.top_k).indices.int()


@pytest.mark.parametrize("checkpointing", [None, False, True])
@pytest.mark.parametrize("kind", ["ours", "qwen3_moe"])
def test_what_an_observer_does_is_seen_by_those_behind_it(kind: str, checkpointing: bool | None) -> None:
    torch.manual_seed(0)
    model: Any = Ours() if kind == "ours" else build_model(kind).train()
    if checkpointing is not None and kind != "ours":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": checkpointing})
    first, loads = FirstExperts(), Loads()
    with observing(model, first, loads):
        out = model(**batch())
        (out if kind == "ours" else out.loss).backward()
    for counts_E in loads.take().values():
        chosen = counts_E.nonzero().flatten().tolist()
        assert chosen == list(range(len(chosen)))
        assert len(chosen) == 2
    assert first.asked


@pytest.mark.parametrize("kind", ["ours", "mixtral", "deepseek_v3"])
def test_an_observer_of_ones_own(kind: str) -> None:
    torch.manual_seed(0)
    model: Any = Ours() if kind == "ours" else build_model(kind).train()

    def loss() -> Tensor:
        out = model(**batch())
        return out if kind == "ours" else out.loss

    with trimtab.record(model) as plain:
        loss()
    ids = plain.decisions().ids
    moved = torch.where(ids < 0, ids, (ids + 1) % 8)
    told = trimtab.Decisions(ids=moved, num_experts=8, layers=plain.decisions().layers)
    with trimtab.replay(model, told):
        loss().backward()
    without = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    entropy = Entropy()
    with observing(model, entropy), trimtab.record(model) as recording:
        loss().backward()
    found = torch.where(ids < 0, ids, recording.decisions().ids)
    assert torch.equal(found[:, :, :1], moved[:, :, :1]), "of the first layer, whose tokens are the same"
    assert entropy.seen == 2
    gates = [name for name, p in model.named_parameters() if "router.weight" in name or "gate.weight" in name]
    for name in gates:
        assert (dict(model.named_parameters())[name].grad - without[name]).abs().max() > 1e-4, name
    with pytest.raises(ConfigError, match="no Router in Linear"), observing(nn.Linear(2, 2), entropy):
        pass
