"""Composite models: the text part alone is the whole model on text, its routers are found in both, both are saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

import trimtab
from helpers.composites import FAMILIES, load_whole, save_composite
from trimtab.errors import ConfigError
from trimtab.integrations.transformers import LoadBalancer, register, save_pretrained
from trimtab.integrations.transformers.composite import REFUSED, language_model_class
from trimtab.integrations.transformers.routers.find import around, find_routers
from trimtab.integrations.transformers.routers.observe import observing
from trimtab.routing.observers import Loads, Replayer

pytestmark = pytest.mark.usefixtures("one_thread")
CASTS = ("inkling2", "inkling2_loop", "muse_spark", "nemotron_h_omni")
"""Families that compute in float32 whatever the dtype of their weights."""

Pair = tuple[Any, Any]


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """transformers' whole model, and its text part with trimtab's experts, in float64."""
    folder = save_composite(request.param, tmp_path_factory.mktemp(request.param))
    register()
    part = language_model_class(AutoConfig.from_pretrained(folder)).from_pretrained(
        folder, dtype=torch.float64, experts_implementation="trimtab"
    )
    return load_whole(folder, dtype=torch.float64).train(), part.train()


def tokens(seed: int = 0) -> torch.Tensor:
    return torch.randint(250, (2, 12), generator=torch.Generator().manual_seed(seed))


def gradients(model: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    logits = model(input_ids=tokens(), use_cache=False).logits
    logits.double().square().mean().backward()
    return logits, {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}


def assert_alike(pair: Pair) -> dict[str, torch.Tensor]:
    (logits, wanted), (found, ours) = map(gradients, pair)
    bound = 1e-5 if pair[0].config.model_type in CASTS else 1e-12
    torch.testing.assert_close(found, logits, rtol=bound, atol=bound)
    assert ours.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert (ours[name] - gradient).norm() <= bound * gradient.norm(), name
    return wanted


def test_the_text_part_has_the_gradients_of_the_whole_model(pair: Pair) -> None:
    """And none of its parameters is missing there: what it lacks has no gradient."""
    whole, part = pair
    learned = assert_alike(pair)
    assert any("experts" in name for name in learned)
    assert part.state_dict().keys() <= whole.state_dict().keys()
    text = [module for module in (whole.get_decoder(), whole.get_output_embeddings()) if module is not None]
    inside = {id(p) for module in text for p in module.parameters()}
    names = {name for name, p in whole.named_parameters() if id(p) in inside}
    assert {name for name, _ in part.named_parameters()} == names


def test_routers_are_those_of_the_text_part(pair: Pair) -> None:
    """Found, counted, recorded and replayed on both, under the same names."""
    places = [find_routers(model) for model in pair]
    names = [[place.name for place in found] for found in places]
    text = [name for name in names[0] if ".vision_moe." not in name]
    assert names[0] == names[1]
    blocks = {around(name) for name, module in pair[0].named_modules() if hasattr(module, "has_post_expert_norm")}
    assert {around(name) for name in names[0]} == blocks
    counts, taken = [], []
    for model, other in (pair, pair[::-1]):
        with observing(model, loads := Loads(every=True)), trimtab.record(model) as recording, torch.no_grad():
            model(input_ids=tokens(1), use_cache=False)
        counts.append(loads.take())
        taken.append(recording.decisions())
        with observing(other, Replayer(taken[-1])), trimtab.record(other) as again, torch.no_grad():
            other(input_ids=tokens(2), use_cache=False)
        assert torch.equal(again.decisions().ids, taken[-1].ids)
    assert torch.equal(taken[0].ids, taken[1].ids)
    for place in places[0]:
        there, here = (found[place.name] for found in counts)
        assert torch.equal(there, here)
        passes = 2 if pair[0].config.model_type == "inkling2_loop" and place.layer == 1 else place.name in text
        assert there.sum() == passes * tokens().numel() * place.top_k


def test_balance_losses_reach_the_routers_of_both(pair: Pair) -> None:
    plain = gradients(pair[0])[1]
    balances = [LoadBalancer(model, bias=None, aux_loss=1.0) for model in pair]
    balanced = assert_alike(pair)
    for balance in balances:
        balance.remove()
    places = [place for place in find_routers(pair[0]) if ".vision_moe." not in place.name]
    moved = [(balanced[f"{place.name}.weight"] - plain[f"{place.name}.weight"]).norm() for place in places]
    assert all(moved)


def test_the_whole_model_is_saved_as_transformers_saves_it(pair: Pair, tmp_path: Path) -> None:
    save_pretrained(pair[0], tmp_path / "ours")
    pair[0].save_pretrained(tmp_path / "theirs")
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("ours", "theirs"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())
    load_whole(tmp_path / "ours")


def test_families_that_are_not_trained_are_named() -> None:
    for family in REFUSED:
        with pytest.raises(ConfigError, match=f"{family} is not trained: it"):
            language_model_class(AutoConfig.for_model(family))
    with pytest.raises(ConfigError, match="vit has no language model among"):
        language_model_class(AutoConfig.for_model("vit"))
