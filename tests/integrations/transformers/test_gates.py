"""Which families' experts run with an activation of ours, and what makes a gate one that is run as it is."""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from helpers.families import build_model, experts_modules, family_names
from trimtab.experts.activations import GELU, ClampedSwiGLU, GeGLU, ReluSquared, SwiGLU
from trimtab.experts.activations import activation_of as activation_named
from trimtab.integrations.transformers.gates import gate_of

OWN = {"beam", "inkling2", "inkling2_loop"}
"""Gates of formulas that no family with one of ours has."""

Own = type(None)
"""Stands for a function of the module's own, which runs as it is."""


def kind_of(module: Any) -> type:
    """Of the activation that it runs with."""
    found = gate_of(module)
    return type(activation_named(found)) if isinstance(found, str) else Own


def computed(module: Any, pre: Tensor) -> Tensor:
    found = gate_of(module)
    return activation_named(found).forward(pre) if isinstance(found, str) else found(pre)


pytestmark = pytest.mark.usefixtures("registered", "one_thread")


def gpt_oss() -> Any:
    return next(iter(experts_modules(build_model("gpt_oss")).values()))


@pytest.mark.parametrize("name", family_names())
def test_every_family_but_those_with_a_formula_of_their_own_runs_ours(name: str) -> None:
    for module in experts_modules(build_model(name)).values():
        assert (kind_of(module) is Own) <= (name in OWN)
        pre = 4 * torch.randn(9, 12, dtype=torch.float64)
        truth = module._apply_gate(pre) if module.has_gate else module.act_fn(pre)
        torch.testing.assert_close(computed(module, pre), truth)


@pytest.mark.parametrize("name", ["gpt_oss", "minimax_m3_vl", "deepseek_v4"])
@pytest.mark.parametrize("limit", [1e-3, 1.0, 1e4, 1e5, 1e9, torch.finfo(torch.float32).max, math.inf, 1e308])
def test_a_clamped_gate_has_the_numbers_of_its_module_limits_of_any_size(name: str, limit: float) -> None:
    module: Any = next(iter(experts_modules(build_model(name)).values()))
    for key, value in (("limit", limit), ("swiglu_limit", limit), ("alpha", 0.5), ("swiglu_alpha", 0.5)):
        if hasattr(module, key):
            setattr(module, key, value)
    assert kind_of(module) is ClampedSwiGLU or limit == 1e308
    pre = 4 * torch.randn(50, 12, dtype=torch.float64)
    torch.testing.assert_close(computed(module, pre), module._apply_gate(pre))


def test_a_gate_of_another_module_has_the_numbers_of_that_module() -> None:
    module, other = gpt_oss(), gpt_oss()
    other.alpha = other.limit = 1.0
    module._apply_gate = other._apply_gate
    pre = 4 * torch.randn(9, 12)
    torch.testing.assert_close(computed(module, pre), other._apply_gate(pre))
    plain: Any = of_silu(True, ACT2FN["silu"])
    plain._apply_gate = of_silu(True, torch.tanh)._apply_gate
    torch.testing.assert_close(computed(plain, pre), plain._apply_gate(pre))


def doubled(self: nn.Module, gate_up: Tensor) -> Tensor:
    return 2 * type(self)._apply_gate(self, gate_up)  # type: ignore[operator]


def test_a_gate_that_somebody_changed_is_run_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    module = gpt_oss()
    kind, right = type(module), type(module)._apply_gate
    seen: list[Tensor] = []

    @functools.wraps(right)
    def told(self: nn.Module, gate_up: Tensor) -> Tensor:
        seen.append(gate_up)
        return right(self, gate_up)  # type: ignore[no-any-return]

    def of_the_file(function: Callable[..., Tensor], **names: object) -> Callable[..., Tensor]:
        """As if the model's file had it."""
        made = types.FunctionType(function.__code__, function.__globals__ | names)
        made.__module__ = right.__module__
        return made

    def steeper(self: Any, gate_up: Tensor) -> Tensor:
        return 2 * right(self, gate_up)  # type: ignore[no-any-return]

    def reads_more(self: Any, gate_up: Tensor) -> Tensor:
        return right(self, gate_up) + 0 * self.num_experts  # type: ignore[no-any-return]

    def from_globals(self: Any, gate_up: Tensor) -> Tensor:
        return 2 * torch.nn.functional.silu(gate_up[..., ::2].clamp(max=self.limit)) * gate_up[..., 1::2]

    nowhere = of_the_file(from_globals)
    nowhere.__module__ = None  # type: ignore[assignment]
    assert kind_of(module) is ClampedSwiGLU
    for other in (nowhere, told, steeper, reads_more, doubled, of_the_file(from_globals)):
        monkeypatch.setattr(kind, "_apply_gate", other)
        assert kind_of(module) is Own, other
    monkeypatch.setattr(kind, "_apply_gate", right)
    module._apply_gate = types.MethodType(doubled, module)
    assert kind_of(module) is Own
    del module._apply_gate
    module.limit = None
    assert kind_of(module) is Own
    module.limit = 2.0
    assert kind_of(module) is ClampedSwiGLU
    assert not seen


class SiLU(nn.Module):
    """Not torch's, but for its name."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * nn.functional.silu(x)


def of_silu(gate: bool, act_fn: object) -> Any:
    from transformers.integrations.moe import _default_apply_gate

    module: Any = nn.Module()
    module.has_gate, module.act_fn = gate, act_fn
    module._apply_gate = types.MethodType(_default_apply_gate, module)
    return module


@pytest.mark.parametrize(
    ("act_fn", "gated", "ungated"),
    [
        (ACT2FN["silu"], SwiGLU, Own), (nn.functional.silu, SwiGLU, Own), (ACT2FN["gelu"], GeGLU, GELU),
        (nn.functional.gelu, GeGLU, GELU), (nn.GELU(), GeGLU, GELU), (nn.GELU(approximate="tanh"), GeGLU, GELU),
        (ACT2FN["gelu_pytorch_tanh"], GeGLU, GELU), (ACT2FN["gelu_new"], GeGLU, GELU),
        (ACT2FN["gelu_fast"], GeGLU, GELU), (ACT2FN["gelu_python"], Own, Own), (ACT2FN["quick_gelu"], Own, Own),
        (ACT2FN["relu2"], Own, ReluSquared), (ACT2FN["relu"], Own, Own), (SiLU(), Own, Own),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)  # fmt: skip
def test_activations_are_what_their_module_computes(act_fn: Any, gated: type, ungated: type) -> None:
    pre = 4 * torch.randn(9, 12)
    for gate, kind in ((True, gated), (False, ungated)):
        module: Any = of_silu(gate, act_fn)
        assert kind_of(module) is kind
        torch.testing.assert_close(computed(module, pre), module._apply_gate(pre) if gate else act_fn(pre))


@pytest.mark.parametrize("name", ["gelu", "gelu_pytorch_tanh", "relu2"])
def test_a_hook_or_another_function_inside_is_what_runs(name: str) -> None:
    hooked, other, patched = ACT2FN[name], ACT2FN[name], ACT2FN[name]
    patched.forward = torch.tanh
    assert kind_of(of_silu(False, patched)) is Own
    hooked.register_forward_hook(lambda _m, _a, y: 3 * y)
    other.act = torch.tanh
    for act_fn in (hooked, other) if hasattr(ACT2FN[name], "act") else (hooked,):
        assert kind_of(of_silu(False, act_fn)) is Own


def test_a_limit_behind_silu_is_not_one_before_it() -> None:
    """The same where there is none."""
    from transformers.models.step3p7.modeling_step3p7 import Step3p7Experts

    module = of_silu(True, ACT2FN["silu"])
    module.limit = float("inf")
    module._apply_gate = types.MethodType(Step3p7Experts._apply_gate, module)
    assert kind_of(module) is ClampedSwiGLU
    module.limit = 2.0
    assert kind_of(module) is Own
