"""One parameter's gradient alone: what is written where, and what autograd gets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from trimtab.errors import ConfigError, InputError
from trimtab.experts.linear import GroupedLinear
from trimtab.experts.module import ExpertMLP
from trimtab.experts.weight_grad import WeightGradient
from trimtab.kernels.api import put


def param(main: float | None = 5.0, **attributes: bool) -> nn.Parameter:
    made = nn.Parameter(torch.ones(2, 3, dtype=torch.bfloat16))
    if main is not None:
        made.main_grad = torch.full((2, 3), main)
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


def deliver(p: nn.Parameter, mode: str, value: float) -> torch.Tensor:
    gradient = WeightGradient(p, mode, "weight")
    put(gradient.buffer, torch.full((2, 3), value), gradient.adds)
    return gradient.close()


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("mode", ["accumulate", "overwrite"])
def test_zero_out_wgrad_zeroes_the_dummy_and_never_main_grad(mode: str) -> None:
    p = param(zero_out_wgrad=True)
    assert torch.equal(deliver(p, mode, 2.0), torch.zeros(2, 3).bfloat16())
    assert torch.equal(p.main_grad, torch.full((2, 3), 7.0 if mode == "accumulate" else 2.0))
    plain = param(zero_out_wgrad=False)
    assert deliver(plain, mode, 2.0).isnan().all()  # unset memory: nobody may use it


def test_a_parameter_may_ask_to_be_overwritten() -> None:
    p = param(overwrite_main_grad=True)
    deliver(p, "accumulate", 2.0)
    assert torch.equal(p.main_grad, torch.full((2, 3), 2.0))


def test_what_is_missing_is_said() -> None:
    with pytest.raises(InputError, match=r"weight7\.main_grad is None, expected a floating tensor \(2, 3\) on cpu"):
        WeightGradient(param(main=None), "accumulate", "weight7")
    wrong = param()
    wrong.main_grad = torch.zeros(6)
    with pytest.raises(InputError, match=r"main_grad is \(6,\) torch\.float32 on cpu, expected .* \(2, 3\)"):
        WeightGradient(wrong, "overwrite", "weight")
    wrong.main_grad = torch.zeros(3).expand(2, 3)  # each value would be that of two
    with pytest.raises(InputError, match=r"main_grad is \(2, 3\) torch\.float32 on cpu, expanded, expected"):
        WeightGradient(wrong, "accumulate", "weight")
    with pytest.raises(ConfigError, match="main_grad='add'"):
        GroupedLinear(2, 4, 4, main_grad="add")


@pytest.mark.parametrize("kernels", ["torch", "grouped_mm", "auto"])
@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"device": "meta"}, r"torch\.float32 on meta, expected a floating tensor \(4, 8, 16\) on cpu"),
        ({"dtype": torch.int64}, r"torch\.int64 on cpu"), ({"dtype": torch.float8_e5m2}, r"torch\.float8_e5m2 on cpu"),
    ],
)  # fmt: skip
def test_one_that_cannot_be_written_leaves_the_others_alone(kernels: str, wrong: dict[str, Any], says: str) -> None:
    mlp = ExpertMLP(4, 8, 8, activation="swiglu", main_grad="accumulate", kernels=kernels)
    for bad, good, shape in ((mlp.gate_up, mlp.down, r"\(4, 2, 8, 8\)"), (mlp.down, mlp.gate_up, r"\(4, 8, 8\)")):
        bad.main_grad = torch.empty_like(bad, **wrong)  # type: ignore[attr-defined]
        good.main_grad = torch.zeros_like(good)  # type: ignore[attr-defined]
        y = mlp(torch.randn(3, 8), torch.tensor([[0], [2], [3]]), torch.ones(3, 1))
        with pytest.raises(InputError, match=says.replace(r"\(4, 8, 16\)", shape)):
            y.sum().backward()
        assert not good.main_grad.any()  # type: ignore[attr-defined]


def test_the_dummy_is_no_nan_for_anomaly_detection() -> None:
    layer = GroupedLinear(2, 4, 4, main_grad="accumulate")
    layer.weight.main_grad = torch.zeros_like(layer.weight)  # type: ignore[attr-defined]
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # fills what is not set with NaN
    try:
        with torch.autograd.detect_anomaly(check_nan=True):
            layer(torch.randn(3, 4), [1, 2]).sum().backward()
    finally:
        torch.use_deterministic_algorithms(before)
    assert layer.weight.main_grad.any()  # type: ignore[attr-defined]
