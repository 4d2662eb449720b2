"""Every router of the installed transformers is found, and its rule gives its own weights, bit for bit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import Llama4TextConfig, LongcatFlashConfig
from transformers.models.llama4.modeling_llama4 import Llama4TextMoe
from transformers.models.longcat_flash.modeling_longcat_flash import LongcatFlashMoE

from helpers.families import build_model, experts_modules, family_names, forward, sample_batch
from helpers.seeing import Seeing, seen
from trimtab.errors import ConfigError
from trimtab.integrations.transformers.routers.find import find_routers
from trimtab.integrations.transformers.routers.observe import Observed
from trimtab.integrations.transformers.routers.rules import RULES, UNREACHABLE
from trimtab.routing.port import Observer, RouterRun

pytestmark = pytest.mark.usefixtures("one_thread")

NO_ROUTERS = re.compile("DFineGate|Deimv2Gate|GraniteDoclingDensityRouter|.*(Forget|Residual|Message)Gate")
"""They end in Router or Gate, and choose no experts."""


def test_every_router_class_of_transformers_has_a_row_or_a_reason() -> None:
    models = Path(transformers.__file__).parent / "models"
    sources = [path.read_text(encoding="utf-8") for path in models.glob("*/modeling_*.py")]
    ending = re.compile(r"^class (\w+?)((?:Top[Kk])?Router|Gate)\((?:nn|torch)\.", re.MULTILINE)
    found = {"".join(match): match[0] for source in sources for match in ending.findall(source)}
    known = {name for name, short in found.items() if short in RULES}
    others = {name for name in found if name not in known and not NO_ROUTERS.fullmatch(name)}
    assert others == {name for name in UNREACHABLE if name in found}
    assert set(RULES) == {found[name] for name in known}
    classes = {name for source in sources for name in re.findall(r"^class (\w+)\(", source, re.MULTILINE)}
    assert set(UNREACHABLE) <= classes


BIASED = {
    "afmoe", "axk1", "axk2", "bailing_hybrid", "beam", "deepseek_v3", "deepseek_v32", "dots1", "dots3_note",
    "ernie4_5_moe", "ernie4_5_vl_moe", "exaone_moe", "glm4_moe", "glm4_moe_lite", "glm4v_moe", "glm5_next",
    "glm_moe_dsa", "hy_v3", "hy_v4", "hy_v4_vl", "inkling", "inkling2", "inkling2_loop", "kimi_linear", "kolibri1",
    "laguna", "lfm2_moe", "mimo_v2_flash", "minimax_m2", "minimax_m3_vl", "muse_spark", "nemotron_h", "solar_open",
    "zaya",
}  # fmt: skip
"""Families whose every router has a selection bias; one of deepseek_v4's two looks experts up."""


class Own(Observer):
    """Decides what a router decides itself, and so has the rule say what its weights are."""

    def decide(self, run: RouterRun) -> Tensor:
        return run.ids_TK


def differing(model: Any, run: Any) -> list[str]:
    """The routers whose rule, given their own ids, says anything else than they say; both bit for bit."""
    places, found = find_routers(model), list[str]()
    outputs: dict[str, list[Any]] = {place.name: [] for place in places}
    observed = None
    for way in ("own", "by rule"):
        hooks = [
            place.module.register_forward_hook(lambda _m, _a, out, name=place.name: outputs[name].append(out))
            for place in places
        ]
        observed = Observed(model, Own()) if way == "by rule" else None
        torch.manual_seed(0)
        run()
        for hook in hooks:
            hook.remove()
    assert observed is not None
    observed.remove()
    for name, calls in outputs.items():
        for own, by_rule in zip(calls[: len(calls) // 2], calls[len(calls) // 2 :], strict=True):
            if any(a.dtype != b.dtype or not torch.equal(a, b) for a, b in zip(own, by_rule, strict=True)):
                found.append(name)
    return found


@pytest.mark.parametrize("name", family_names())
def test_every_family(name: str) -> None:
    """In bfloat16, where casts differ; float32 and float64 are replayed in test_replay_families."""
    model = build_model(name, dtype=torch.bfloat16)
    places = find_routers(model)
    experts = {key.rpartition(".")[0] for key in experts_modules(model)}
    assert {place.name.rpartition(".")[0] for place in places} == experts
    assert all(0 <= place.layer < place.layers == model.config.num_hidden_layers for place in places)
    batch = sample_batch(model, 2, 12)
    assert not differing(model, lambda: forward(model, batch))
    seeing = seen(model)
    forward(model, batch)
    assert len(seeing.last) == len(places)
    for place in places:
        run = seeing.last[place.name]
        assert run.logits_TE.shape[-1] == run.scores().shape[-1] == place.num_experts
        assert run.ids_TK.shape == (run.logits_TE.shape[0], place.top_k)
        if place.bias:
            assert getattr(place.bias_in, place.bias).numel() == place.num_experts
    assert all(place.bias for place in places) == (name in BIASED)


def block(moe: nn.Module) -> nn.Module:
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Identity(), moe])
    for p in moe.parameters():
        nn.init.normal_(p)
    return model


@pytest.mark.parametrize("kind", ["llama4", "longcat_flash"])
def test_families_that_run_experts_by_themselves(kind: str) -> None:
    if kind == "llama4":
        config: Any = Llama4TextConfig(
            hidden_size=16, intermediate_size=8, num_local_experts=6, num_experts_per_tok=2, num_hidden_layers=1
        )
        moe: nn.Module = Llama4TextMoe(config)
    else:
        config = LongcatFlashConfig(
            hidden_size=16, expert_ffn_hidden_size=8, n_routed_experts=4, zero_expert_num=2, moe_topk=2
        )
        moe = LongcatFlashMoE(config)
    model = block(moe)
    (place,) = find_routers(model)
    assert (place.name, place.layer, place.layers, place.num_experts) == ("layers.1.router", 1, 2, 6)
    x = torch.randn(2, 5, 16)
    assert not differing(model, lambda: moe(x))


def test_observers_go_again_in_any_order() -> None:
    model = build_model("mixtral")
    places = find_routers(model)
    seeing = [Seeing(), Seeing()]
    first, second = (Observed(model, each) for each in seeing)
    forward(model, sample_batch(model, 1, 4))
    assert seeing[0].runs == seeing[1].runs, "one wrapper for both"
    first.remove()
    forward(model, sample_batch(model, 1, 4))
    second.remove()
    forward(model, sample_batch(model, 1, 4))
    assert [len(each.runs) for each in seeing] == [len(places), 2 * len(places)]
    assert not [place for place in places if "forward" in vars(place.module)]
    assert not model._forward_pre_hooks


def test_routers_that_nobody_knows_or_can_tell_are_named() -> None:
    model = build_model("mixtral")
    gate = model.model.layers[0].mlp.gate
    gate.__class__ = type("MineTopKRouter", (type(gate),), {})
    assert len(find_routers(model)) == 2  # a class that derives from a known one
    model.model.layers[0].mlp.gate = nn.Linear(32, 8)
    with pytest.raises(ConfigError, match=r"layers\.0\.mlp\.experts.*'gate': 'Linear'.*add a row"):
        find_routers(model)
    for name in UNREACHABLE:
        with pytest.raises(ConfigError, match=f"mlp .{name}.: its decisions cannot be"):
            find_routers(nn.ModuleDict({"mlp": type(name, (nn.Module,), {})()}))
    assert find_routers(nn.Linear(2, 2)) == []
