"""The port of routers: each run is seen as part of its own forward, however a model is called, wrapped or copied."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import trimtab
from helpers.families import build_model
from helpers.seeing import counted, padded, slots
from trimtab.errors import ConfigError, InputError
from trimtab.integrations.transformers import LoadBalancer
from trimtab.integrations.transformers.routers.find import find_routers
from trimtab.integrations.transformers.routers.observe import observing
from trimtab.moe import MoEConfig
from trimtab.routing.config import RouterConfig
from trimtab.routing.observers import Loads, Recorder
from trimtab.routing.port import Observer, RouterRun

pytestmark = pytest.mark.usefixtures("one_thread")

GATES = {"qwen3_moe": "gate", "gpt_oss": "router", "deepseek_v3": "gate"}

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
        model(**padded(1))
        counted(loads)
        CALLS[call](model, padded())
    assert counted(loads) == [slots(padded())] * 2
    with trimtab.record(model) as whole:
        model(**padded())
    assert torch.equal(recording.decisions().ids, whole.decisions().ids)
    with observing(Handing(model), loads):
        CALLS[call](model, padded())
    assert counted(loads) == [slots(padded())] * 2


def test_a_mask_that_no_argument_tells() -> None:
    """Packed, as `trimtab train` has it: the caller says which tokens are padding."""
    model, loads = build_model("mixtral").train(), Loads()
    given = padded()
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


# Under peft and copied


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(**padded()).logits
    return found


def saved_whole(family: str) -> LoraConfig:
    """With the router as a copy of peft's."""
    return LoraConfig(r=2, target_modules=["o_proj"], modules_to_save=[GATES[family]])


@pytest.mark.parametrize("family", GATES)
def test_a_router_that_peft_saves_whole(family: str) -> None:
    """The active copy is the router, by its own name; whichever runs is observed."""
    model = build_model(family).train()
    names = [place.name for place in find_routers(model)]
    with trimtab.record(model) as recording:
        model(**padded())
    decisions = recording.decisions()
    peft = get_peft_model(model, saved_whole(family))
    places = find_routers(peft)
    assert [place.name for place in places] == names
    assert all(p.requires_grad for place in places for p in place.module.parameters())
    told = trimtab.Decisions(ids=decisions.ids.flip(0), num_experts=8, layers=decisions.layers)
    for context in (peft.disable_adapter(), nullcontext()):
        with trimtab.replay(peft, told), trimtab.record(peft) as again, context:
            loss = peft(**padded()).loss
        assert torch.equal(again.decisions().ids, told.ids)
    loss.backward()
    assert all(any(p.grad is not None and p.grad.any() for p in place.module.parameters()) for place in places)
    peft.add_adapter("second", saved_whole(family))
    peft.set_adapter("second")
    second = find_routers(peft)
    assert [place.name for place in second] == names
    assert not any(a.module is b.module for a, b in zip(places, second, strict=True))
    balance = LoadBalancer(peft, bias=None, aux_loss=0.1)
    peft(**padded()).loss.backward()
    assert [int(load.sum()) for load in balance.step().values()] == [slots(padded())] * 2


@pytest.mark.parametrize("observed", [False, True], ids=["fresh", "observed before"])
def test_names_are_those_of_the_model_with_an_adapter_and_without(observed: bool) -> None:
    """Of an adapter on the router's weight, and of a copy that peft made of a router that was observed."""
    model = build_model("qwen3_moe").train()
    with trimtab.record(model) as recording:
        model(**padded())
    told = recording.decisions()
    config = LoraConfig(r=2, target_modules=["o_proj"], target_parameters=["mlp.gate.weight"])
    if observed:
        LoadBalancer(model, add_bias=True)
    peft, loads = get_peft_model(model, saved_whole("qwen3_moe") if observed else config), Loads()
    with observing(peft, loads), trimtab.replay(peft, told), trimtab.record(peft) as recording:
        peft(**padded())
    assert torch.equal(recording.decisions().ids, told.ids)
    found = loads.take()
    assert tuple(found) == recording.decisions().layers == told.layers
    assert [int(load.sum()) for load in found.values()] == [slots(padded())] * 2
    with trimtab.replay(build_model("qwen3_moe"), recording.decisions()):
        pass


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
    model = build_model("qwen3_moe").train()
    balance = LoadBalancer(model, add_bias=True, aux_loss=0.1)
    for place in find_routers(model):
        place.module.selection_bias.copy_(torch.linspace(-1, 1, 8))
    if checkpointed:
        model.activation_checkpointing_enable({"use_reentrant": False})
        model.disable_input_require_grads()  # a hook of transformers' that no file takes
        model(**padded()).loss.backward()
        balance.step()
        model.zero_grad()
    before = logits(model)
    made = COPIES[way](model)
    assert torch.equal(logits(made), before), "it selects by its bias, as the model does"
    gate = copy.deepcopy(model.model.layers[0].mlp.gate)  # by itself it takes no model along
    assert not any(isinstance(value, nn.Module) for value in (*gate.children(), *vars(gate).values()))
    with torch.no_grad():
        assert all(map(torch.equal, gate(x := torch.randn(5, 32)), model.model.layers[0].mlp.gate(x)))
    for place in find_routers(model):
        place.module.selection_bias.zero_()
    assert torch.equal(logits(made), before)
    assert not torch.equal(logits(model), before)
    made.train()(**padded()).loss.backward()
    assert not any(load.any() for load in balance.step().values())
    loads, recorder = Loads(), Recorder()
    with observing(made, loads, recorder):
        made(**padded())
        model(**padded(1))
    assert counted(loads) == [slots(padded())] * 2
    assert recorder.decisions().ids.shape == (4, 12, 2, 2)
    assert [int(load.sum()) for load in balance.step().values()] == [slots(padded(1))] * 2
    assert torch.equal(logits(made), before), "who has gone takes no bias along"


# Observers of one's own, also of our routers


class Ours(nn.Module):
    """A model with layers of trimtab's, called as transformers' are."""

    def __init__(self) -> None:
        super().__init__()
        router = RouterConfig(num_experts=8, top_k=2, normalize=True)
        self.embed = nn.Embedding(64, 16)
        self.layers = nn.ModuleList(MoEConfig(dim=16, hidden=8, router=router).build(f"{n}") for n in range(2))

    def forward(self, input_ids: Tensor, attention_mask: Tensor, **_: Any) -> Any:
        x: Tensor = self.embed(input_ids)
        for layer in self.layers:
            out = layer(x, token_mask=attention_mask.bool())
            x = x + out.y + sum(out.losses.values(), torch.zeros(()))
        return SimpleNamespace(loss=x.square().mean())


def model_of(kind: str) -> Any:
    torch.manual_seed(0)
    return Ours() if kind == "ours" else build_model(kind).train()


class Entropy(Observer):
    """A loss of one's own: the mean entropy of the scores, with a factor; and the next expert is taken for each."""

    seen = 0

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


@pytest.mark.parametrize(
    ("kind", "reentrant"), [("ours", None), ("qwen3_moe", None), ("qwen3_moe", False), ("qwen3_moe", True)]
)
def test_what_an_observer_does_is_seen_by_those_behind_it(kind: str, reentrant: bool | None) -> None:
    model = model_of(kind)
    if reentrant is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    first, loads = FirstExperts(), Loads()
    with observing(model, first, loads):
        model(**padded()).loss.backward()
    for counts_E in loads.take().values():
        assert counts_E.nonzero().flatten().tolist() == [0, 1]
    assert first.asked


@pytest.mark.parametrize("kind", ["ours", "mixtral", "deepseek_v3"])
def test_an_observer_of_ones_own(kind: str) -> None:
    model = model_of(kind)
    with trimtab.record(model) as plain:
        model(**padded())
    ids = plain.decisions().ids
    moved = torch.where(ids < 0, ids, (ids + 1) % 8)
    told = trimtab.Decisions(ids=moved, num_experts=8, layers=plain.decisions().layers)
    with trimtab.replay(model, told):
        model(**padded()).loss.backward()
    without = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    entropy = Entropy()
    with observing(model, entropy), trimtab.record(model) as recording:
        model(**padded()).loss.backward()
    found = torch.where(ids < 0, ids, recording.decisions().ids)
    assert torch.equal(found[:, :, :1], moved[:, :, :1]), "of the first layer, whose tokens are the same"
    assert entropy.seen == 2
    gates = {n: p for n, p in model.named_parameters() if "router.weight" in n or "gate.weight" in n}
    assert all((p.grad - without[name]).abs().max() > 1e-4 for name, p in gates.items())
    with pytest.raises(ConfigError, match="no Router in Linear"), observing(nn.Linear(2, 2), entropy):
        pass
