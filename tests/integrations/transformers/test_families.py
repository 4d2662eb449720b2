"""Every family of the installed transformers computes the same with our experts as with transformers' own loop.

Outputs and all gradients, without adapters and with peft's on all experts, where peft runs over that loop. Float64 is
the judge, since there every difference is a mistake. Float32 then shows that nothing is lost on the way: a gradient may
differ by 2e-6 of its scale, or by as much as rounding moves it in the family's own loop (sums that cancel, as in
hyper-connections, lose digits under any implementation).
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from helpers import families
from helpers.model_case import Case
from helpers.model_ranks import verify

NAMES = families.family_names()
pytestmark = pytest.mark.usefixtures("registered", "one_thread")


def test_the_scan_finds_every_decorated_class() -> None:
    models = Path(transformers.__file__).parent / "models"
    sources = [path.read_text(encoding="utf-8") for path in models.glob("*/modeling_*.py")]
    lines = (line for source in sources for line in source.splitlines())
    assert len(NAMES) == sum(line.startswith("@use_experts_implementation") for line in lines) > 0


def test_all_but_four_families_can_dispatch_tokens() -> None:
    refused = {"inkling2_loop", "lara_mini"} & set(NAMES)  # whatever runs their experts
    assert {name for name in NAMES if not families.ep_capable(name)} == {"diffusion_gemma", "gemma4"} | refused


@pytest.mark.parametrize("name", NAMES)
def test_a_family_is_small_and_trains_every_weight_of_its_experts(name: str) -> None:
    model = families.build_model(name)
    assert sum(p.numel() for p in model.parameters()) < 300_000
    assert all(t.isfinite().all() for t in model.state_dict().values())
    experts = families.experts_modules(model).values()
    assert len(experts) >= 2
    assert {type(module) for module in experts} == {families.experts_class(name)}
    families.forward(model, families.sample_batch(model, 2, 12))[1].backward()
    assert all(p.grad is not None and p.grad.isfinite().all() and p.grad.any() for m in experts for p in m.parameters())


@pytest.mark.parametrize("lora", ["", "experts"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_a_family_trains_as_by_its_own_loop(name: str, dtype: torch.dtype, lora: str) -> None:
    patterns = ("natural", "few") if (dtype, lora) == (torch.float64, "") else ("natural",)
    verify([Case(family=name, dtype=dtype, lora=lora, patterns=patterns)])
