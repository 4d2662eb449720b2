"""peft's adapters on experts, as peft has them: with our experts their factors are run, not their deltas.

The truth is peft over transformers' own loop: in float64 every difference is a mistake, and float32 may differ by 2e-6
of a gradient's scale, or by as much as rounding moves it in the truth itself.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.families import build_model, experts_modules, family_names
from helpers.parity import CANCELLING, FLOAT32_INSIDE, check
from helpers.peft_case import adapted, fill, lora, output_and_gradients, reference_adapted, run_adapted
from trimtab.integrations.transformers import experts as ours
from trimtab.integrations.transformers.lora.peft import _teach, factors_of

NAMES = family_names()
pytestmark = pytest.mark.usefixtures("registered", "one_thread")


def same(got: dict[str, Tensor | None], wanted: dict[str, Tensor | None], relative: float = 3e-6) -> None:
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        assert value is not None, name
        assert got[name] is not None, name
        torch.testing.assert_close(got[name], value, rtol=0, atol=relative * float(value.abs().max()), msg=name)


@pytest.mark.parametrize("name", NAMES)
def test_every_family_in_float64(name: str) -> None:
    wanted, got = reference_adapted(name, torch.float64, 0), run_adapted(name, "trimtab", torch.float64, 0)
    assert got.routed_like(wanted)
    assert len([key for key in wanted.values if "lora_" in key]) >= 4
    check(got, wanted, relative=FLOAT32_INSIDE.get(name, 1e-10))


@pytest.mark.parametrize("name", NAMES)
def test_every_family_in_float32(name: str) -> None:
    for seed in range(5):  # a near tie in a router may fall either way: then another seed
        exact, wanted = (reference_adapted(name, dtype, seed) for dtype in (torch.float64, torch.float32))
        got = run_adapted(name, "trimtab", torch.float32, seed)
        if got.routed_like(wanted) and exact.routed_like(wanted):
            check(got, wanted, relative=CANCELLING.get(name, 2e-6), rounding=exact)
            return
    pytest.fail("no seed among 5 routes alike: that is no near tie")


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "nemotron_h"])
def test_no_delta_is_built_and_no_weight_is_touched(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from peft.tuners.lora.layer import ParamWrapper

    def refuse(*args: Any) -> None:
        pytest.fail("a delta is built")

    for builder in ("get_delta_weight", "get_delta_factors"):
        monkeypatch.setattr(ParamWrapper, builder, refuse)
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


@pytest.mark.parametrize("weight", ["gate_up_proj", "down_proj"])
def test_one_weight_alone(weight: str) -> None:
    options: dict[str, Any] = {"target_parameters": [f"experts.{weight}"], "target_modules": ["q_proj"]}
    wanted = output_and_gradients(adapted("qwen3_moe", "eager", **options))
    same(output_and_gradients(adapted("qwen3_moe", "trimtab", **options)), wanted)


def test_a_bias_is_left_to_peft_beside_ours() -> None:
    options: dict[str, Any] = {"target_parameters": ["experts.gate_up_proj_bias", "experts.down_proj"]}
    wanted = output_and_gradients(adapted("gpt_oss", "eager", **options))
    same(output_and_gradients(adapted("gpt_oss", "trimtab", **options)), wanted)


def test_several_adapters_one_active_both_active_none_active() -> None:
    other: dict[str, Any] = {
        "target_parameters": ["experts.gate_up_proj", "experts.down_proj"], "r": 4, "lora_alpha": 3,
        "use_rslora": True, "rank_pattern": {"down_proj": 5}, "alpha_pattern": {"down_proj": 1},
    }  # fmt: skip
    models = [adapted("qwen3_moe", implementation) for implementation in ("eager", "trimtab")]
    for model in models:
        model.add_adapter("two", lora(model.get_base_model(), **other))
        fill(model, 1)
    seen: list[Tensor | None] = []
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


@pytest.mark.parametrize("way", ["reentrant", "not reentrant", "compiled"])
def test_recomputed_and_compiled(way: str) -> None:
    wanted = output_and_gradients(adapted("qwen3_moe", "eager"))
    model = adapted("qwen3_moe", "trimtab")
    if way == "compiled":
        block = model.get_base_model().model.layers[1].mlp
        block.forward = torch.compile(block.forward, backend="aot_eager", fullgraph=True)
    else:
        model.train()
        model.enable_input_require_grads()
        model.get_base_model().gradient_checkpointing_enable({"use_reentrant": way == "reentrant"})
    same(output_and_gradients(model), wanted)


@pytest.mark.parametrize("how", ["bfloat16 base", "autocast"])
def test_wide_adapters_of_narrow_products_have_wide_gradients(how: str) -> None:
    exact = output_and_gradients(adapted("qwen3_moe", "eager"))
    off = {}
    for implementation in ("eager", "trimtab"):
        model = adapted("qwen3_moe", implementation, torch.bfloat16 if how == "bfloat16 base" else torch.float32)
        with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
            got = output_and_gradients(model)
        grads = {key: value for key, value in got.items() if "lora_" in key and value is not None}
        assert {value.dtype for value in grads.values()} == {torch.float32}
        off[implementation] = sum(float((exact[key] - value).norm()) for key, value in grads.items())  # type: ignore[operator]
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
