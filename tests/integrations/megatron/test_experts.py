"""Megatron's experts over rows: values and every gradient against a dense float64 truth, and where gradients go.

Legend: M rows, K slots per row, e experts, H hidden size, F hidden size of an expert.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from helpers.megatron_cpu import megatron
from trimtab.integrations.megatron.experts import Experts

fast_gelu, quick_gelu = megatron.core.activations.fast_gelu, megatron.core.activations.quick_gelu
squared_relu = megatron.core.activations.squared_relu
EXPERTS, H, HIDDEN = 3, 12, 8
ALONE = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
GROUPS = SimpleNamespace(ep=ALONE, expt_tp=ALONE, expt_dp=ALONE)
ACTIVATIONS: dict[str, dict[str, Any]] = {
    "swiglu": {"activation_func": F.silu, "gated_linear_unit": True},
    "clamped swiglu": {"activation_func": F.silu, "gated_linear_unit": True, "activation_func_clamp_value": 0.05},
    "gpt-oss": {
        "activation_func": quick_gelu, "gated_linear_unit": True, "activation_func_clamp_value": 0.05,
        "glu_linear_offset": 1.0, "add_bias_linear": True,
    },
    "geglu": {"activation_func": F.gelu, "gated_linear_unit": True, "add_bias_linear": True},
    "squared relu": {"activation_func": squared_relu},
    "gelu": {"activation_func": F.gelu, "add_bias_linear": True},
    "fast gelu": {"activation_func": fast_gelu},
    "fast geglu": {"activation_func": fast_gelu, "gated_linear_unit": True, "glu_linear_offset": 0.5},
}  # fmt: skip


def config(**options: Any) -> Any:
    plain: dict[str, Any] = {
        "num_layers": 1, "hidden_size": H, "num_attention_heads": 1, "num_moe_experts": EXPERTS,
        "moe_ffn_hidden_size": HIDDEN, "add_bias_linear": False, "use_cpu_initialization": True, "moe_router_topk": 2,
        "init_method_std": 0.2,
    }  # fmt: skip
    return megatron.core.transformer.TransformerConfig(**plain | options)


def experts_of(*, single_parameter: bool = True, **options: Any) -> Experts:
    torch.manual_seed(0)
    made = Experts(EXPERTS, config(**options), pg_collection=GROUPS, single_parameter=single_parameter)
    with torch.no_grad():
        for name, param in made.named_parameters():
            if "bias" in name:
                param.normal_()
    return made


def rows(count: int = 7, top_k: int = 2, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Some slots are dropped, and no row has the last expert."""
    torch.manual_seed(1)
    ids = torch.stack([torch.randperm(EXPERTS - 1)[:top_k] for _ in range(count)]).view(count, top_k)
    ids[::3, 0] = -1
    x, w = torch.randn(count, H, dtype=dtype), torch.rand(count, top_k)
    return x.requires_grad_(), ids, w.requires_grad_()


def weights_of(experts: Experts) -> dict[str, list[Tensor]]:
    """[e] of each kind, as leaves in float64, and in the order of experts."""
    found: dict[str, list[Tensor]] = {}
    for name, param in experts.named_parameters():
        of, kind = name.split(".")
        each = param if experts.linear_fc1.single_parameter else [param]
        leaves = [p.detach().double().requires_grad_() for p in each]
        found.setdefault(f"{of}.{kind.rstrip('0123456789')}", []).extend(leaves)
    return found


def truth(
    experts: Experts, x: Tensor, ids: Tensor, w: Tensor
) -> tuple[Tensor, dict[str, list[Tensor]], Tensor, Tensor]:
    """The sum over slots by Megatron's own formula, in float64, with leaves of its own."""
    c, of = experts.config, weights_of(experts)
    x, w = (t.detach().double().requires_grad_() for t in (x, w))
    y = torch.zeros_like(x)
    for i in range(EXPERTS):
        pre = x @ of["linear_fc1.weight"][i].T
        if c.add_bias_linear:
            pre = pre + of["linear_fc1.bias"][i]
        if c.gated_linear_unit:
            gate, up = pre.chunk(2, dim=-1)
            if (limit := c.activation_func_clamp_value) is not None:
                gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            h = c.activation_func(gate) * (up + c.glu_linear_offset)
        else:
            h = c.activation_func(pre)
        out = h @ of["linear_fc2.weight"][i].T
        if c.add_bias_linear:
            out = out + of["linear_fc2.bias"][i]
        y = y + out * (w * (ids == i)).sum(1, keepdim=True)
    return y, of, x, w


def gradients(experts: Experts, attribute: str = "grad") -> dict[str, list[Tensor]]:
    found: dict[str, list[Tensor]] = {}
    for name, param in experts.named_parameters():
        of, kind = name.split(".")
        grad = getattr(param, "main_grad", None) if attribute == "main_grad" else None
        grad = param.grad if grad is None else grad
        assert grad is not None, name
        each = grad if experts.linear_fc1.single_parameter else [grad]
        found.setdefault(f"{of}.{kind.rstrip('0123456789')}", []).extend(each)
    return found


def close(a: Tensor, b: Tensor, bound: float = 2e-6) -> None:
    assert (a.double() - b.double()).abs().max() <= bound * max(1.0, float(b.detach().abs().max())), (a, b)


def check(experts: Experts, *, attribute: str = "grad", times: int = 1, bound: float = 2e-6) -> None:
    x, ids, w = rows()
    y_true, of, x_true, w_true = truth(experts, x, ids, w)
    dy = torch.randn_like(x)
    for _ in range(times):
        y, bias = experts(x, ids, w)
        assert bias is None
        y.backward(dy)
        experts.backward_dw()
    (y_true * times).backward(dy.double())
    close(y, y_true, bound)
    close(x.grad, x_true.grad, bound)
    kept = ids >= 0
    close(w.grad[kept], w_true.grad[kept], bound)
    assert not w.grad[~kept].any()
    for name, found in gradients(experts, attribute).items():
        for mine, true in zip(found, of[name], strict=True):
            close(mine, torch.zeros_like(true) if true.grad is None else true.grad, bound)


@pytest.mark.parametrize("single_parameter", [True, False])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_values_and_gradients_are_the_dense_truth(activation: str, single_parameter: bool) -> None:
    check(experts_of(single_parameter=single_parameter, **ACTIVATIONS[activation]))


@pytest.mark.parametrize("single_parameter", [True, False])
@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_gradients_of_two_backwards_lie_where_megatron_looks(fused: bool, later: bool, single_parameter: bool) -> None:
    experts = experts_of(single_parameter=single_parameter, **ACTIVATIONS["gpt-oss"])
    experts = rebuilt(experts, fused=fused, later=later)
    hooks: list[str] = []
    for name, param in experts.named_parameters():
        param.register_post_accumulate_grad_hook(lambda p, name=name: hooks.append(name))
        if fused and "weight" in name:
            param.main_grad, param.grad_added_to_main_grad = torch.zeros_like(param), False
    check(experts, attribute="main_grad", times=2)
    names = [name for name, _ in experts.named_parameters()]
    assert sorted(hooks) == sorted(2 * names), "each parameter's hook fires once in each backward"
    for name, param in experts.named_parameters():
        assert getattr(param, "grad_added_to_main_grad", False) == (fused and "weight" in name)


def rebuilt(experts: Experts, *, fused: bool, later: bool) -> Experts:
    """Megatron's configuration allows delayed gradients with an overlap alone that has no place here."""
    experts.config.gradient_accumulation_fusion, experts.config.delay_wgrad_compute = fused, later
    made = Experts(EXPERTS, experts.config, pg_collection=GROUPS, single_parameter=experts.linear_fc1.single_parameter)
    made.load_state_dict(experts.state_dict())
    return made
