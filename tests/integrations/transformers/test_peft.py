"""peft's adapters on experts: with our experts their factors are run, not their deltas. All families: test_families.

The truth is peft over transformers' own loop.
"""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from helpers.families import build_model, experts_modules
from helpers.peft_case import adapted, fill, lora, output_and_gradients
from helpers.replayed import close
from helpers.small_trainers import options, sft
from trimtab.integrations.transformers import experts as ours
from trimtab.integrations.transformers.lora.peft import _teach, factors_of

pytestmark = pytest.mark.usefixtures("registered", "one_thread")


same = partial(close, relative=3e-6, floor=0.0)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "nemotron_h"])
def test_no_delta_is_built_and_no_weight_is_touched(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from peft.tuners.lora.layer import ParamWrapper

    for builder in ("get_delta_weight", "get_delta_factors"):
        monkeypatch.setattr(ParamWrapper, builder, Mock(side_effect=AssertionError("a delta is built")))
    model = adapted(name, "trimtab")
    kinds = [type(module) for module in experts_modules(model).values()]
    output_and_gradients(model)
    assert [type(module) for module in experts_modules(model).values()] == kinds
    assert all(p.grad is None for key, p in model.named_parameters() if "lora_" not in key)
    assert not any(vars(module)[ours.ATTACHED] for module in experts_modules(model).values()), (
        "attached for longer than a call"
    )


def test_other_experts_are_left_to_peft(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[nn.Module] = []
    monkeypatch.setattr(ours, "expert_mlp", lambda *args, **kwargs: called.append(args[0]))
    output_and_gradients(adapted("qwen3_moe", "eager"))
    assert not called


@pytest.mark.parametrize(
    ("family", "weights"),
    [
        ("qwen3_moe", ["gate_up_proj"]),
        ("qwen3_moe", ["down_proj"]),
        ("gpt_oss", ["gate_up_proj_bias", "down_proj"]),  # a bias is left to peft beside ours
    ],
)
def test_some_weights_alone(family: str, weights: list[str]) -> None:
    options: dict[str, Any] = {"target_parameters": [f"experts.{weight}" for weight in weights]}
    options["target_modules"] = ["q_proj"] if len(weights) == 1 else []
    wanted = output_and_gradients(adapted(family, "eager", **options))
    same(output_and_gradients(adapted(family, "trimtab", **options)), wanted)


def test_several_adapters_one_active_both_active_none_active() -> None:
    other: dict[str, Any] = {
        "target_parameters": ["experts.gate_up_proj", "experts.down_proj"], "r": 4, "lora_alpha": 3,
        "use_rslora": True, "rank_pattern": {"down_proj": 5}, "alpha_pattern": {"down_proj": 1},
    }  # fmt: skip
    models = [adapted("qwen3_moe", implementation) for implementation in ("eager", "trimtab")]
    for model in models:
        model.add_adapter("two", lora(model.get_base_model(), **other))
        fill(model, 1)
    seen: list[Tensor] = []
    for active in ("default", "two", ["default", "two"]):
        for model in models:
            model.base_model.set_adapter(active)
        wanted, got = map(output_and_gradients, models)
        same(got, wanted)
        seen.append(got["output"])
    assert not torch.equal(seen[0], seen[1])
    base = build_model("qwen3_moe")
    base.set_experts_implementation("trimtab")
    bits = base(input_ids=torch.arange(12)[None]).logits
    model = models[1]
    with model.disable_adapter():
        assert torch.equal(model(input_ids=torch.arange(12)[None]).logits, bits)
    model.base_model.set_adapter([])
    assert torch.equal(model(input_ids=torch.arange(12)[None]).logits, bits)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "nemotron_h"])
def test_saved_loaded_and_merged(name: str, tmp_path: Path) -> None:
    from peft import PeftModel

    model = adapted(name, "trimtab")
    before = output_and_gradients(model)
    model.save_pretrained(tmp_path)
    base = build_model(name)
    base.set_experts_implementation("trimtab")
    again = PeftModel.from_pretrained(base, tmp_path, is_trainable=True)
    after = output_and_gradients(again)
    assert all(torch.equal(after[key], value) for key, value in before.items())  # type: ignore[arg-type]
    merged = again.merge_and_unload()
    assert not any("lora_" in key for key, _ in merged.named_parameters())
    other = adapted(name, "eager").merge_and_unload()
    for (key, p), q in zip(merged.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q), key


def test_compiled() -> None:
    wanted = output_and_gradients(adapted("qwen3_moe", "eager"))
    model = adapted("qwen3_moe", "trimtab")
    block = model.get_base_model().model.layers[1].mlp
    block.forward = torch.compile(block.forward, backend="aot_eager", fullgraph=True)
    same(output_and_gradients(model), wanted)


@pytest.mark.parametrize("how", ["bfloat16 base", "autocast"])
def test_wide_adapters_of_narrow_products_have_wide_gradients(how: str) -> None:
    exact = output_and_gradients(adapted("qwen3_moe", "eager"))
    off = {}
    for implementation in ("eager", "trimtab"):
        model = adapted("qwen3_moe", implementation, torch.bfloat16 if how == "bfloat16 base" else torch.float32)
        with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
            got = output_and_gradients(model)
        grads = {key: value for key, value in got.items() if "lora_" in key}
        assert {value.dtype for value in grads.values()} == {torch.float32}
        off[implementation] = sum(float((exact[key] - value).norm()) for key, value in grads.items())
    assert off["trimtab"] <= 1.1 * off["eager"]


def test_what_peft_refuses_stays_refused() -> None:
    for refused in ("use_dora", "lora_dropout"):
        with pytest.raises(ValueError, match=refused):
            adapted("qwen3_moe", "trimtab", **{refused: 0.5})


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("swaps", [False, True])
def test_factors_are_views_in_the_orientation_of_the_version(transposed: bool, swaps: bool) -> None:
    """peft before 0.19 takes the second dimension for the input; sizes are equal, so that no shape tells."""
    experts, size, rank = 3, 4, 2
    a, b = nn.Linear(size, rank * experts, bias=False), nn.Linear(rank * experts, size, bias=False)
    wrapper: Any = SimpleNamespace(
        lora_A={"x": a}, lora_B={"x": b}, num_experts=experts, scaling={"x": 2.0},
        get_base_layer=lambda: SimpleNamespace(is_transposed=transposed),
    )  # fmt: skip
    swapped = swaps and not transposed
    if swaps:
        wrapper._did_swap_in_out_features = swapped
    order = "e o i" if swapped else "e i o"
    by_expert = a.weight.reshape(experts, -1, size), b.weight.reshape(size, -1, experts)
    delta = torch.einsum(f"o r e, e r i -> {order}", by_expert[1], by_expert[0])
    lora = factors_of(wrapper, "x")
    ours = lora.b @ lora.a
    torch.testing.assert_close(ours.mT if transposed else ours, delta)
    assert {lora.a.data_ptr(), lora.b.data_ptr()} == {a.weight.data_ptr(), b.weight.data_ptr()}


def test_another_peft_is_refused_in_a_sentence() -> None:
    from trimtab.errors import BackendError

    with pytest.raises(BackendError, match=r"knows how peft 0\.18 to 0\.21"):
        _teach(SimpleNamespace(ParamWrapper=type("ParamWrapper", (), {})))  # type: ignore[arg-type]
    _teach(SimpleNamespace())  # type: ignore[arg-type]  # one that has no adapters of parameters yet


def test_register_imports_no_peft_and_teaches_it_when_the_program_does() -> None:
    says = """
import importlib.util, sys
import trimtab.integrations.transformers
trimtab.integrations.transformers.register()
assert not any(name.partition(".")[0] == "peft" for name in sys.modules)
importlib.util.find_spec("peft.tuners.lora.layer")  # who only asks for it changes nothing
from peft.tuners.lora.layer import ParamWrapper
assert ParamWrapper._activate_lora.of_trimtab
assert not any(type(finder).__module__.startswith("trimtab") for finder in sys.meta_path)
"""
    subprocess.run([sys.executable, "-c", says], check=True)


def test_sft_with_a_peft_config(tmp_path: Path) -> None:
    """The losses of transformers' own loop, and the adapter alone is saved."""
    found = []
    for implementation in ("eager", "trimtab"):
        model = build_model("qwen3_moe")
        model.set_experts_implementation(implementation)
        config = options(tmp_path, max_steps=3, logging_steps=1, save_strategy="steps", save_steps=3)
        adapters = lora(model, target_modules=["q_proj"], task_type="CAUSAL_LM")
        trainer = sft(model, config | {"gradient_checkpointing": True}, peft_config=adapters)
        torch.manual_seed(0)
        trainer.train()
        found.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert len(found[1]) == 3
    assert found[1] == pytest.approx(found[0], abs=2e-3)
    saved = load_file(tmp_path / "checkpoint-3" / "adapter_model.safetensors")
    assert all("lora_" in name for name in saved)
    assert all(bool(t.any()) for t in saved.values()), "B begins as zeros"
    assert any(".experts.base_layer.lora_A." in name for name in saved)
