"""Every family of the installed transformers builds tiny, runs, and shows its variant."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers

from helpers.families import (
    build_model,
    ep_capable,
    experts_class,
    experts_modules,
    family_names,
    forward,
    sample_batch,
)

NAMES = family_names()

pytestmark = pytest.mark.usefixtures("one_thread")

# (has_gate, has_bias, is_transposed, is_concatenated, has_post_expert_norm)
PLAIN = (True, False, False, True, False)
VARIANTS = {
    "aria": (True, False, True, True, False),
    "gpt_oss": (True, True, True, False, False),
    "muse_spark": (True, False, False, True, True),
    "nemotron_h": (False, False, False, True, False),
    "openai_privacy_filter": (True, True, True, True, False),
}
CUSTOM_GATE = {
    "beam",
    "deepseek_v4",
    "glm5_next",
    "gpt_oss",
    "hy_v4",
    "hy_v4_vl",
    "inkling2",
    "inkling2_loop",
    "minimax_m3_vl",
    "openai_privacy_filter",
}


def test_the_scan_finds_every_decorated_class() -> None:
    models = Path(transformers.__file__).parent / "models"
    decorated = sum(
        line.startswith("@use_experts_implementation")
        for path in models.glob("*/modeling_*.py")
        for line in path.read_text(encoding="utf-8").splitlines()
    )
    assert len(NAMES) == decorated > 0


@pytest.mark.parametrize("name", NAMES)
def test_builds_small_and_runs(name: str) -> None:
    model = build_model(name)
    assert sum(p.numel() for p in model.parameters()) < 300_000
    assert all(t.isfinite().all() for t in model.state_dict().values())
    experts = experts_modules(model)
    assert len(experts) >= 2
    assert {type(m) for m in experts.values()} == {experts_class(name)}
    output, loss = forward(model, sample_batch(model, 2, 12))
    loss.backward()
    assert output.shape[:2] == (2, 12)
    for key, module in experts.items():
        for p_name, parameter in module.named_parameters():
            assert parameter.grad is not None, f"{key}.{p_name}"
            assert parameter.grad.isfinite().all(), f"{key}.{p_name}"
            assert parameter.grad.any(), f"{key}.{p_name}"


@pytest.mark.parametrize("name", NAMES)
def test_declares_the_variant_we_know(name: str) -> None:
    for module in experts_modules(build_model(name)).values():
        flags = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "has_post_expert_norm")
        assert tuple(getattr(module, flag) for flag in flags) == VARIANTS.get(name, PLAIN)
        assert (type(module)._apply_gate.__name__ == "_apply_gate") == (name in CUSTOM_GATE)
        up = {"gate_up_proj"} if module.has_gate else {"up_proj"}
        expected = up | {"down_proj"}
        expected |= {f"{p}_bias" for p in expected} if module.has_bias else set()
        expected |= {"post_expert_norm.weight"} if module.has_post_expert_norm else set()
        assert {p for p, _ in module.named_parameters()} == expected
        assert not list(module.named_buffers())


def test_all_but_four_families_can_dispatch_tokens() -> None:
    refused = {"inkling2_loop", "lara_mini"} & set(NAMES)  # whatever runs their experts
    assert {name for name in NAMES if not ep_capable(name)} == {"diffusion_gemma", "gemma4"} | refused
