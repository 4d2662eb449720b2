"""Every router of the installed transformers: found, told its own decisions, and told others.

Its own give its own bits, so its rule says its own weights; others give what its own code makes of them.
"""

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

from helpers import families
from helpers.replayed import Values, close, forced_by, others, run
from helpers.seeing import Seeing, seen
from trimtab.errors import ConfigError
from trimtab.integrations.transformers.routers.find import find_routers
from trimtab.integrations.transformers.routers.observe import Observed, record, replay
from trimtab.integrations.transformers.routers.rules import RULES, UNREACHABLE
from trimtab.routing.replay import Decisions

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


@pytest.mark.parametrize("name", families.family_names())
def test_every_router_is_found(name: str) -> None:
    model = families.build_model(name)
    places = find_routers(model)
    experts = {key.rpartition(".")[0] for key in families.experts_modules(model)}
    assert {place.name.rpartition(".")[0] for place in places} == experts
    assert all(0 <= place.layer < place.layers == model.config.num_hidden_layers for place in places)
    seeing = seen(model)
    families.forward(model, families.sample_batch(model, 2, 12))
    assert len(seeing.last) == len(places)
    for place in places:
        run = seeing.last[place.name]
        assert run.logits_TE.shape[-1] == run.scores().shape[-1] == place.num_experts
        assert run.ids_TK.shape == (run.logits_TE.shape[0], place.top_k)
        if place.bias:
            assert getattr(place.bias_in, place.bias).numel() == place.num_experts
    assert all(place.bias for place in places) == (name in BIASED)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", families.family_names())
def test_own_decisions_give_the_same_bits(name: str, dtype: torch.dtype) -> None:
    """In bfloat16, where casts differ, too."""
    model = families.build_model(name, dtype=dtype)
    batch = families.sample_batch(model, 2, 12)
    wanted = run(model, batch)
    with record(model) as recording:
        recorded = run(model, batch)
    assert recording.decisions().ids.shape[:2] == (2, 12)
    with replay(model, recording.decisions()):
        again = run(model, batch)
    for other in (recorded, again):
        assert other.keys() == wanted.keys()
        assert not [key for key, value in wanted.items() if not torch.equal(value, other[key])]


def truth(model: Any, batch: dict[str, Tensor], decisions: Decisions) -> Values:
    with forced_by(model, decisions):
        return run(model, batch)


@pytest.mark.parametrize("name", families.family_names())
def test_other_decisions_are_what_the_family_makes_of_them(name: str) -> None:
    model = families.build_model(name, dtype=torch.float64)
    model.set_experts_implementation("eager")
    batch = families.sample_batch(model, 2, 12)
    with record(model) as recording:
        families.forward(model, batch)
    decisions = others(recording.decisions())
    with replay(model, decisions), record(model) as second:
        ours = run(model, batch)
    if name != "zaya":  # the token of its class that skips the experts may have weight 0 by rounding
        assert torch.equal(second.decisions().ids, decisions.ids)
    close(ours, truth(model, batch, decisions), 1e-12)
    for place in find_routers(model):
        grads = [p.grad for p in place.module.parameters() if p.requires_grad]
        assert any(grad is not None and grad.abs().max() > 0 for grad in grads), place.name


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_ocr2", "unlimited_ocr"])
def test_scores_that_a_group_limit_zeroes_are_live(name: str) -> None:
    """One slot in a hundred is moved, to experts outside of the groups: weights there are the scores all the same."""
    config = families.build_config(name)
    models = {}
    for method in ("greedy", "group_limited_greedy"):
        config.topk_method, config.n_group, config.topk_group = method, 4, 1
        torch.manual_seed(0)
        models[method] = families.model_class(name)(config).double().eval()
        for p in models[method].parameters():
            nn.init.normal_(p, std=0.15)
        models[method].set_experts_implementation("eager")
    greedy, limited = models.values()
    greedy.load_state_dict(limited.state_dict())
    batch = families.sample_batch(limited, 2, 25)
    with record(limited) as recording:
        families.forward(limited, batch)
    decisions = recording.decisions()
    ids = decisions.ids.clone()
    moved = torch.arange(ids.numel()).view_as(ids) % 100 == 0
    ids[moved] = (ids[moved] + 4) % 8  # the expert two groups on
    drifted = Decisions(ids=ids, num_experts=8, layers=decisions.layers)
    with replay(limited, drifted):
        ours = run(limited, batch)
    close(ours, truth(greedy, batch, drifted), 1e-12)
    assert all(place.module.weight.grad.norm(dim=1).min() > 0 for place in find_routers(limited))


class Alone(nn.Module):
    """A mixture block by itself, in the form of a model."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Identity(), block])
        for p in self.parameters():
            nn.init.normal_(p)

    def forward(self, x: Tensor) -> Tensor:
        out = self.layers[1](x)
        return out[0] if isinstance(out, tuple) else out.view(x.shape)


LLAMA = Llama4TextConfig(
    hidden_size=16, intermediate_size=8, num_local_experts=6, num_experts_per_tok=2, num_hidden_layers=1
)
LONGCAT = LongcatFlashConfig(
    hidden_size=16, expert_ffn_hidden_size=8, n_routed_experts=4, zero_expert_num=2, moe_topk=2
)


@pytest.mark.parametrize(("kind", "config"), [(Llama4TextMoe, LLAMA), (LongcatFlashMoE, LONGCAT)])
def test_families_that_run_experts_by_themselves(kind: type[nn.Module], config: Any) -> None:
    model = Alone(kind(config)).double()
    (place,) = find_routers(model)
    assert (place.name, place.layer, place.layers, place.num_experts) == ("layers.1.router", 1, 2, 6)
    x = torch.randn(3, 5, 16, dtype=torch.float64)
    with record(model) as recording:
        wanted = model(x)
    with replay(model, recording.decisions()):
        assert torch.equal(model(x), wanted)
    decisions = others(recording.decisions())
    found = []
    for told in (replay(model, decisions), forced_by(model, decisions)):
        model.zero_grad()
        with told:
            y = model(x)
            y.square().sum().backward()
        found.append({"y": y.detach()} | {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    close(*found, 1e-12)


def test_observers_go_again_in_any_order() -> None:
    model = families.build_model("mixtral")
    places = find_routers(model)
    seeing = [Seeing(), Seeing()]
    first, second = (Observed(model, each) for each in seeing)
    families.forward(model, families.sample_batch(model, 1, 4))
    assert seeing[0].runs == seeing[1].runs, "one wrapper for both"
    first.remove()
    families.forward(model, families.sample_batch(model, 1, 4))
    second.remove()
    families.forward(model, families.sample_batch(model, 1, 4))
    assert [len(each.runs) for each in seeing] == [len(places), 2 * len(places)]
    assert not [place for place in places if "forward" in vars(place.module)]
    assert not model._forward_pre_hooks


def test_routers_that_nobody_knows_or_can_tell_are_named() -> None:
    model = families.build_model("mixtral")
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
