"""Every family, told what to choose: its own decisions give its own bits, others what its own code makes of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Llama4TextConfig, LongcatFlashConfig
from transformers.models.llama4.modeling_llama4 import Llama4TextMoe
from transformers.models.longcat_flash.modeling_longcat_flash import LongcatFlashMoE

from helpers.families import Batch, build_config, build_model, family_names, forward, model_class, sample_batch
from helpers.forced_routers import forced
from trimtab.integrations.transformers.routers.find import find_routers
from trimtab.integrations.transformers.routers.observe import record, replay
from trimtab.routing.replay import Decisions

pytestmark = pytest.mark.usefixtures("one_thread")

Values = dict[str, Tensor]


def run(model: Any, batch: Batch) -> Values:
    """Output, loss and gradients by name."""
    model.zero_grad()
    output, loss = forward(model, batch)
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"output": output.detach(), "loss": loss.detach()} | {name: g.clone() for name, g in grads.items()}


def others(decisions: Decisions, seed: int = 1) -> Decisions:
    """Ids that are drawn, for the tokens that have ids."""
    generator = torch.Generator().manual_seed(seed)
    E, K = decisions.num_experts, decisions.ids.shape[3]
    drawn = torch.rand(*decisions.ids.shape[:3], E, generator=generator).argsort(-1)[..., :K]
    return Decisions(ids=torch.where(decisions.ids < 0, -1, drawn), num_experts=E, layers=decisions.layers)


def by_router(decisions: Decisions) -> dict[str, list[Tensor]]:
    """[T, K] for each call of a router; without the tokens that it does not see, where a modality has its own."""
    found: dict[str, list[Tensor]] = {}
    for i, name in enumerate(decisions.layers):
        ids = decisions.ids[:, :, i].flatten(0, 1)
        found.setdefault(name.partition("#")[0], []).append(ids[(ids >= 0).all(-1)] if "_moe.gate" in name else ids)
    return found


def truth(model: Any, batch: Batch, decisions: Decisions) -> Values:
    places = find_routers(model)
    with forced({place.name: place.module for place in places}, by_router(decisions), decisions.num_experts):
        return run(model, batch)


def close(ours: Values, true: Values, relative: float) -> None:
    assert ours.keys() == true.keys()
    largest = max(float(t.abs().max()) for t in true.values())
    for name, wanted in true.items():
        scale = max(float(wanted.abs().max()), 1e-4 * largest)
        error = float((ours[name] - wanted).abs().max())
        assert error <= relative * scale, f"{name}: off by {error:.1e} of {scale:.1e}"


@pytest.mark.parametrize("name", family_names())
def test_own_decisions_give_the_same_bits(name: str) -> None:
    model = build_model(name)
    batch = sample_batch(model, 2, 12)
    wanted = run(model, batch)
    with record(model) as recording:
        seen = run(model, batch)
    decisions = recording.decisions()
    assert decisions.ids.shape[:2] == (2, 12)
    with replay(model, decisions):
        again = run(model, batch)
    for other in (seen, again):
        assert other.keys() == wanted.keys()
        assert not [key for key, value in wanted.items() if not torch.equal(value, other[key])]


@pytest.mark.parametrize("name", family_names())
def test_other_decisions_are_what_the_family_makes_of_them(name: str) -> None:
    model = build_model(name, dtype=torch.float64)
    model.set_experts_implementation("eager")
    batch = sample_batch(model, 2, 12)
    with record(model) as recording:
        forward(model, batch)
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
    config = build_config(name)
    models = {}
    for method in ("greedy", "group_limited_greedy"):
        config.topk_method, config.n_group, config.topk_group = method, 4, 1
        torch.manual_seed(0)
        models[method] = model_class(name)(config).double()
        for p in models[method].parameters():
            nn.init.normal_(p, std=0.15)
        models[method].set_experts_implementation("eager")
    models["greedy"].load_state_dict(models["group_limited_greedy"].state_dict())
    limited = models["group_limited_greedy"].eval()
    batch = sample_batch(limited, 2, 25)
    with record(limited) as recording:
        forward(limited, batch)
    decisions = recording.decisions()
    ids = decisions.ids.clone()
    moved = torch.arange(ids.numel()).view_as(ids) % 100 == 0
    ids[moved] = (ids[moved] + 4) % 8  # the expert two groups on
    drifted = Decisions(ids=ids, num_experts=8, layers=decisions.layers)
    with replay(limited, drifted):
        ours = run(limited, batch)
    close(ours, truth(models["greedy"].eval(), batch, drifted), 1e-12)
    assert all(place.module.weight.grad.norm(dim=1).min() > 0 for place in find_routers(limited))


class Alone(nn.Module):
    """A mixture block by itself, in the form of a model."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList([block])
        for p in self.parameters():
            nn.init.normal_(p)

    def forward(self, x: Tensor) -> Tensor:
        out = self.layers[0](x)
        return out[0] if isinstance(out, tuple) else out.view(x.shape)


@pytest.mark.parametrize("kind", ["llama4", "longcat_flash"])
def test_families_that_run_experts_by_themselves(kind: str) -> None:
    if kind == "llama4":
        llama: Any = Llama4TextConfig(
            hidden_size=16, intermediate_size=8, num_local_experts=6, num_experts_per_tok=2, num_hidden_layers=1
        )
        model = Alone(Llama4TextMoe(llama)).double()
    else:
        longcat: Any = LongcatFlashConfig(
            hidden_size=16, expert_ffn_hidden_size=8, n_routed_experts=4, zero_expert_num=2, moe_topk=2
        )
        model = Alone(LongcatFlashMoE(longcat)).double()
    x = torch.randn(3, 5, 16, dtype=torch.float64)
    with record(model) as recording:
        wanted = model(x)
    with replay(model, recording.decisions()):
        assert torch.equal(model(x), wanted)
    decisions = others(recording.decisions())
    found = []
    for told in (
        replay(model, decisions),
        forced({"": model.layers[0].router}, {"": by_router(decisions)["layers.0.router"]}, 6),
    ):
        with told:
            model.zero_grad()
            y = model(x)
            y.square().sum().backward()
        found.append(
            {"y": y.detach()} | {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        )
    close(*found, 1e-12)
