"""Megatron's TEGroupedMLP with trimtab's linears, without TransformerEngine: every number against a float64 truth.

Legend: R rows of experts, e experts, H hidden size, F hidden size of an expert.
"""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from helpers.comparing import assert_close
from helpers.megatron_cpu import cuda_stood_in, megatron
from trimtab.errors import ConfigError
from trimtab.integrations.megatron.linears import GroupedColumn, GroupedRow

moe_experts = megatron.core.transformer.moe.experts
squared_relu = megatron.core.activations.squared_relu
EXPERTS, HIDDEN, FFN = 4, 16, 12
ALONE = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
GROUPS = SimpleNamespace(ep=ALONE, expt_tp=ALONE, expt_dp=ALONE)
SPLITS = ([3, 0, 5, 1], [0, 0, 9, 0], [0, 0, 0, 0])
KINDS: dict[str, dict[str, Any]] = {
    "swiglu": {"activation_func": F.silu, "gated_linear_unit": True},
    "biases": {"activation_func": F.silu, "gated_linear_unit": True, "add_bias_linear": True},
    "squared relu": {"activation_func": squared_relu, "add_bias_linear": True},
    "fused swiglu": {"activation_func": F.silu, "gated_linear_unit": True, "bias_activation_fusion": True},
}


def config(**options: Any) -> Any:
    plain: dict[str, Any] = {
        "num_layers": 1, "hidden_size": HIDDEN, "num_attention_heads": 2, "num_moe_experts": EXPERTS,
        "moe_ffn_hidden_size": FFN, "add_bias_linear": False, "use_cpu_initialization": True, "moe_router_topk": 2,
        "init_method_std": 0.2, "bias_activation_fusion": False, "moe_grouped_gemm": True,
    }  # fmt: skip
    return megatron.core.transformer.TransformerConfig(**plain | options)


def submodules() -> Any:
    of = getattr(moe_experts, "GroupedMLPSubmodules", moe_experts.MLPSubmodules)
    return of(linear_fc1=GroupedColumn, linear_fc2=GroupedRow)


def grouped(made: Any, groups: Any = GROUPS, local: int = EXPERTS) -> Any:
    torch.manual_seed(0)
    mlp = moe_experts.TEGroupedMLP(local, made, submodules(), pg_collection=groups)
    with torch.no_grad():
        for name, param in mlp.named_parameters():
            if "bias" in name:
                param.normal_()
    return mlp


def truth(mlp: Any, x_RH: Tensor, splits: list[int], probs_R: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """What the experts compute, in float64, and its leaves by name."""
    leaves = {name: p.detach().double().requires_grad_() for name, p in mlp.named_parameters()}
    leaves |= {"x": x_RH.detach().double().requires_grad_(), "probs": probs_R.detach().double().requires_grad_()}
    found, act = [], mlp.config.activation_func
    parts = zip(leaves["x"].split(splits), leaves["probs"].split(splits), strict=True)
    for i, (x, p) in enumerate(parts):
        pre = F.linear(x, leaves[f"linear_fc1.weight{i}"], leaves.get(f"linear_fc1.bias{i}"))
        gate, _, up = pre[:, :FFN], None, pre[:, FFN:]
        h = act(gate) * up if mlp.config.gated_linear_unit else act(pre)
        y = (h * p[:, None]) @ leaves[f"linear_fc2.weight{i}"].t()
        bias = leaves.get(f"linear_fc2.bias{i}")
        found.append(y if bias is None else y + bias * p[:, None])
    return torch.cat(found), leaves


@pytest.fixture(autouse=True)
def recompute_without_transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron's recompute of activations asks TransformerEngine about FP8, also where it is not installed."""
    random = megatron.core.tensor_parallel.random
    asked = SimpleNamespace(is_fp8_enabled=lambda: False)
    monkeypatch.setattr(random, "FP8GlobalStateManager", asked, raising=False)
    for name in ("activation_recompute_forward", "fp8_autocast"):
        monkeypatch.setattr(random, name, lambda **options: nullcontext(), raising=False)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("recomputed", [False, True])
def test_values_and_gradients(kind: str, fused: bool, later: bool, recomputed: bool) -> None:
    modules = ["moe_act"] if recomputed else None
    options = {"recompute_granularity": "selective", "recompute_modules": modules} if recomputed else {}
    made = config(**KINDS[kind], **options)
    made.gradient_accumulation_fusion, made.delay_wgrad_compute = fused, later
    mlp = grouped(made)
    total: dict[str, Tensor] = {}
    for param in mlp.parameters():
        param.main_grad = torch.zeros_like(param)
        param.grad_added_to_main_grad = False
    for splits in SPLITS:
        rows = sum(splits)
        x_RH, probs_R = torch.randn(rows, HIDDEN, requires_grad=True), torch.rand(rows, requires_grad=True)
        with cuda_stood_in():
            y_RH, bias = mlp(x_RH, torch.tensor(splits), probs_R)
        assert bias is None
        y_true, leaves = truth(mlp, x_RH, splits, probs_R)
        dy_RH = torch.randn(rows, HIDDEN)
        with cuda_stood_in():
            y_RH.backward(dy_RH)
            mlp.backward_dw()
        y_true.backward(dy_RH.double())
        assert_close(y_RH, y_true, 1e-5, "y")
        assert_close(x_RH.grad, leaves["x"].grad, 1e-5, "dx")
        assert_close(probs_R.grad, leaves["probs"].grad, 1e-5, "dprobs")
        for name, _ in mlp.named_parameters():
            total[name] = total.get(name, 0) + leaves[name].grad
    for name, param in mlp.named_parameters():
        in_main = fused and "weight" in name
        assert param.grad_added_to_main_grad == in_main
        assert_close(param.main_grad if in_main else param.grad, total[name], 1e-5, name)


def test_parameters_have_megatrons_flags_and_names() -> None:
    for parallel, etp in ((1, 1), (2, 1), (1, 2)):
        place = SimpleNamespace(size=lambda n=etp: n, rank=lambda n=etp: n - 1)
        groups = SimpleNamespace(ep=ALONE, expt_tp=place, expt_dp=ALONE)
        made = config(
            activation_func=F.silu, gated_linear_unit=True, add_bias_linear=etp == 1,
            expert_model_parallel_size=parallel, expert_tensor_parallel_size=etp,
        )  # fmt: skip
        mlp = grouped(made, groups)
        shapes = {"linear_fc1.weight": (2 * FFN // etp, HIDDEN), "linear_fc2.weight": (HIDDEN, FFN // etp)}
        cut = {"linear_fc1.weight": (0, 2), "linear_fc2.weight": (1, 1), "linear_fc1.bias": (0, 2)}
        for name, param in mlp.named_parameters():
            kind = name.rstrip("0123456789")
            assert param.allreduce == (parallel == etp == 1)
            assert param.shape == shapes.get(kind, param.shape)
            assert param.tensor_model_parallel == (kind in cut)
            if kind in cut:
                assert (param.partition_dim, param.partition_stride) == cut[kind]
        assert {name for name, _ in mlp.named_parameters()} == {
            f"linear_fc{n}.{kind}{i}"
            for n in (1, 2) for kind in ("weight", *["bias"] * (etp == 1)) for i in range(EXPERTS)
        }  # fmt: skip


def test_weights_are_drawn_whole_and_cut() -> None:
    """On a CPU: a rank of two holds its share of gate and of up, or of the inputs, of what a rank alone draws."""
    made = config(activation_func=F.silu, gated_linear_unit=True)
    whole = grouped(made)
    for rank in (0, 1):
        place = SimpleNamespace(size=lambda: 2, rank=lambda r=rank: r)
        mlp = grouped(made, SimpleNamespace(ep=ALONE, expt_tp=place, expt_dp=ALONE))
        for i in range(EXPERTS):
            gate, up = whole.linear_fc1.get_parameter(f"weight{i}").chunk(2)
            down = whole.linear_fc2.get_parameter(f"weight{i}")
            wanted = torch.cat([gate.chunk(2)[rank], up.chunk(2)[rank]])
            assert torch.equal(mlp.linear_fc1.get_parameter(f"weight{i}"), wanted)
            assert torch.equal(mlp.linear_fc2.get_parameter(f"weight{i}"), down.chunk(2, 1)[rank])
    made.perform_initialization = False
    assert GroupedRow(
        1, 4, 4, config=made, init_method=pytest.fail, bias=False, skip_bias_add=True, pg_collection=GROUPS
    )


def test_what_cannot_be_is_refused_by_name() -> None:
    options: dict[str, Any] = {"init_method": torch.nn.init.zeros_, "bias": False, "skip_bias_add": False}
    for name in ("fp8", "fp4", "moe_single_grouped_weight", "use_transformer_engine_op_fuser"):
        made = config()
        setattr(made, name, "e4m3")
        with pytest.raises(ConfigError, match=name):
            GroupedColumn(1, 4, 4, config=made, pg_collection=GROUPS, **options)
    two = SimpleNamespace(size=lambda: 2, rank=lambda: 0)
    groups = SimpleNamespace(ep=ALONE, expt_tp=two, expt_dp=ALONE)
    with pytest.raises(ConfigError, match="bias=True with tp_size=2"):
        GroupedColumn(1, 4, 4, config=config(), pg_collection=groups, **options | {"bias": True})
    with pytest.raises(ConfigError, match="5 features do not divide by tp_size=2"):
        GroupedColumn(1, 4, 5, config=config(), pg_collection=groups, **options)
    gated = config(activation_func=F.silu, gated_linear_unit=True)
    with pytest.raises(ConfigError, match="6 features do not divide by tp_size=2 for each of gate and up"):
        GroupedColumn(1, 4, 6, config=gated, pg_collection=groups, **options)
