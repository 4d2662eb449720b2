"""Experts of Megatron's configuration, ours over rows and Megatron's TEGroupedMLP with our linears: values and every
gradient against a dense float64 truth, and where gradients go.

Legend: M rows, K slots per row, e experts, H hidden size, F hidden size of an expert.
"""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from helpers import megatron_experts
from helpers.megatron_cpu import cuda_stood_in, megatron, megatron_ranks
from trimtab.errors import ConfigError
from trimtab.integrations.megatron.experts import Experts
from trimtab.integrations.megatron.linears import GroupedRow, grouped_mlp

fast_gelu, quick_gelu = megatron.core.activations.fast_gelu, megatron.core.activations.quick_gelu
squared_relu = megatron.core.activations.squared_relu
EXPERTS, H, HIDDEN = 3, 12, 8
ALONE = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
GROUPS = SimpleNamespace(ep=ALONE, expt_tp=ALONE, expt_dp=ALONE)
FORMS = ("stacked", "each", "grouped")
"""One parameter of all experts; one each; one each of TEGroupedMLP's linears."""
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
        "num_layers": 1, "hidden_size": H, "num_attention_heads": 2, "num_moe_experts": EXPERTS,
        "moe_ffn_hidden_size": HIDDEN, "add_bias_linear": False, "use_cpu_initialization": True, "moe_router_topk": 2,
        "init_method_std": 0.2,
    }  # fmt: skip
    return megatron.core.transformer.TransformerConfig(**plain | options)


def experts_of(
    form: str = "stacked", *, fused: bool = False, later: bool = False, groups: Any = GROUPS, **options: Any
) -> Any:
    """Megatron's configuration allows delayed gradients with an overlap alone that has no place here."""
    torch.manual_seed(0)
    made = config(**options)
    made.gradient_accumulation_fusion, made.delay_wgrad_compute = fused, later
    experts = built(form, made, groups)
    with torch.no_grad():
        for name, param in experts.named_parameters():
            if "bias" in name:
                param.normal_()
    return experts


def built(form: str, made: Any, groups: Any) -> Any:
    if form != "grouped":
        return Experts(EXPERTS, made, pg_collection=groups, single_parameter=form == "stacked")
    spec = grouped_mlp()
    return spec.module(EXPERTS, made, spec.submodules, pg_collection=groups)


def run(experts: Any, x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
    """Weighted sums of rows; Megatron's own has a row for each slot, by expert."""
    if isinstance(experts, Experts):
        y, bias = experts(x, ids, w)
    else:
        order = ids.flatten().argsort(stable=True)[int((ids < 0).sum()) :]
        counts, row = ids.flatten()[order].bincount(minlength=EXPERTS), order // max(ids.shape[1], 1)
        out, bias = experts(x[row], counts, w.flatten()[order])
        y = torch.zeros_like(x).index_add(0, row, out)
    assert bias is None
    return y


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Megatron's recompute of activations asks TransformerEngine about FP8, also where it is not installed."""
    random = megatron.core.tensor_parallel.random
    asked = SimpleNamespace(is_fp8_enabled=lambda: False)
    monkeypatch.setattr(random, "FP8GlobalStateManager", asked, raising=False)
    for name in ("activation_recompute_forward", "fp8_autocast"):
        monkeypatch.setattr(random, name, lambda **options: nullcontext(), raising=False)
    with cuda_stood_in():
        yield


def rows(count: int = 7, top_k: int = 2, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Some slots are dropped, and no row has the last expert."""
    torch.manual_seed(1)
    ids = torch.stack([torch.randperm(EXPERTS - 1)[:top_k] for _ in range(count)]).view(count, top_k)
    ids[::3, 0] = -1
    x, w = torch.randn(count, H, dtype=dtype), torch.rand(count, top_k)
    return x.requires_grad_(), ids, w.requires_grad_()


def by_kind(experts: Any, value: Any) -> dict[str, list[Tensor]]:
    """[e] of each kind, in the order of experts: `value` of each parameter."""
    found: dict[str, list[Tensor]] = {}
    for name, param in experts.named_parameters():
        given = value(param)
        assert given is not None, name
        found.setdefault(name.rstrip("0123456789"), []).extend(given if stacked(experts) else [given])
    return found


def stacked(experts: Any) -> bool:
    return bool(experts.linear_fc1.single_parameter)


def truth(
    experts: Experts, x: Tensor, ids: Tensor, w: Tensor
) -> tuple[Tensor, dict[str, list[Tensor]], Tensor, Tensor]:
    """The sum over slots by Megatron's own formula, in float64, with leaves of its own."""
    c = experts.config
    of = by_kind(experts, lambda p: p.detach().double())
    of = {kind: [leaf.clone().requires_grad_() for leaf in leaves] for kind, leaves in of.items()}
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


def close(a: Tensor, b: Tensor, bound: float = 2e-6) -> None:
    assert (a.double() - b.double()).abs().max() <= bound * max(1.0, float(b.detach().abs().max())), (a, b)


def check(experts: Any, *, times: int = 1) -> None:
    x, ids, w = rows()
    y_true, of, x_true, w_true = truth(experts, x, ids, w)
    dy = torch.randn_like(x)
    for _ in range(times):
        y = run(experts, x, ids, w)
        y.backward(dy)
        experts.backward_dw()
    (y_true * times).backward(dy.double())
    close(y, y_true)
    close(x.grad, x_true.grad)
    kept = ids >= 0
    close(w.grad[kept], w_true.grad[kept])
    assert not w.grad[~kept].any()
    for name, found in by_kind(experts, gradient).items():
        for mine, true in zip(found, of[name], strict=True):
            close(mine, torch.zeros_like(true) if true.grad is None else true.grad)


def gradient(param: Tensor) -> Tensor | None:
    return param.grad if getattr(param, "main_grad", None) is None else param.main_grad


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_values_and_gradients_are_the_dense_truth(activation: str, form: str) -> None:
    check(experts_of(form, **ACTIVATIONS[activation]))


AGAIN = {"recompute_granularity": "selective", "recompute_modules": ["moe_act"], "moe_grouped_gemm": True}


@pytest.mark.parametrize(
    ("form", "options"),
    [
        *((form, ACTIVATIONS["gpt-oss"]) for form in FORMS),
        ("grouped", ACTIVATIONS["gpt-oss"] | AGAIN),
        ("grouped", ACTIVATIONS["swiglu"] | AGAIN | {"bias_activation_fusion": True}),
    ],
)
@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_gradients_of_two_backwards_lie_where_megatron_looks(
    fused: bool, later: bool, form: str, options: dict[str, Any]
) -> None:
    experts = experts_of(form, fused=fused, later=later, **options)
    hooks: list[str] = []
    for name, param in experts.named_parameters():
        param.register_post_accumulate_grad_hook(lambda p, name=name: hooks.append(name))
        if fused and "weight" in name:
            param.main_grad, param.grad_added_to_main_grad = torch.zeros_like(param), False
    check(experts, times=2)
    names = [name for name, _ in experts.named_parameters()]
    assert sorted(hooks) == sorted(2 * names), "each parameter's hook fires once in each backward"
    for name, param in experts.named_parameters():
        assert getattr(param, "grad_added_to_main_grad", False) == (fused and "weight" in name)


@pytest.mark.parametrize("form", FORMS)
def test_no_rows_and_no_slots_give_zeros_everywhere(form: str) -> None:
    experts = experts_of(form)
    for count, top_k in ((0, 2), (5, 0)):
        experts.zero_grad()
        y = run(experts, torch.randn(count, H), torch.zeros(count, top_k, dtype=torch.long), torch.rand(count, top_k))
        y.sum().backward()
        assert y.shape == (count, H)
        assert not y.any()
        assert all(param.grad is not None and not param.grad.any() for param in experts.parameters())


@pytest.mark.parametrize("form", ["stacked", "each"])
@pytest.mark.parametrize("frozen", ["linear_fc1", "linear_fc2", "linear_fc"])
def test_what_is_frozen_has_no_gradient_and_the_rest_has_its_own(frozen: str, form: str) -> None:
    for fused, later in ((False, False), (True, True)):
        experts = experts_of(form, fused=fused, later=later)
        for name, param in experts.named_parameters():
            param.requires_grad_(not name.startswith(frozen))
            param.main_grad, param.grad_added_to_main_grad = torch.zeros_like(param), False
        x, ids, w = rows()
        y_true, of, x_true, _ = truth(experts, x, ids, w)
        run(experts, x, ids, w).sum().backward()
        y_true.sum().backward()
        experts.backward_dw()
        close(x.grad, x_true.grad)
        for param in experts.parameters():
            if not param.requires_grad:
                assert param.grad is None
                assert not param.main_grad.any()
                assert not param.grad_added_to_main_grad
            elif not fused:
                param.main_grad = None
        for name, ours in by_kind(experts, gradient).items():
            for mine, true in zip(ours, of[name], strict=True):
                wanted = torch.zeros_like(true) if name.startswith(frozen) or true.grad is None else true.grad
                close(mine, wanted)


def test_probabilities_may_weigh_the_inputs() -> None:
    experts = experts_of(moe_apply_probs_on_input=True, moe_router_topk=1, moe_router_pre_softmax=True)
    x, ids, w = rows(top_k=1)
    weighted = x.detach() * w.detach()
    y_true, _, of_weighted, _ = truth(experts, weighted, ids, torch.ones_like(w))
    y, _ = experts(x, ids, w)
    close(y, y_true)
    y.sum().backward()
    y_true.sum().backward()
    close(x.grad, of_weighted.grad * w.detach())
    close(w.grad[:, 0], (of_weighted.grad * x.detach()).sum(1))


@pytest.mark.parametrize("form", ["stacked", "each"])
def test_hooks_before_a_linear_run_before_its_parameters_are_read(form: str) -> None:
    """Megatron gathers parameters there."""
    experts, whole = experts_of(form), experts_of(form)
    calls: list[str] = []

    def gather(module: Any, given: Any, name: str) -> None:
        calls.append(name)
        getattr(experts, name).load_state_dict(getattr(whole, name).state_dict())

    for name in ("linear_fc1", "linear_fc2"):
        getattr(experts, name).register_forward_pre_hook(lambda module, given, name=name: gather(module, given, name))
    with torch.no_grad():
        for param in experts.parameters():
            param.fill_(torch.nan)
        x, ids, w = rows()
        assert torch.equal(run(experts, x, ids, w), run(whole, x, ids, w))
    assert calls == ["linear_fc1", "linear_fc2"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("ep", "etp", "tp"), [(1, 1, 1), (2, 1, 1), (1, 1, 2), (2, 2, 1), (1, 2, 2)])
def test_weights_are_drawn_whole_and_cut_and_megatron_is_told_who_sums_what(
    ep: int, etp: int, tp: int, form: str
) -> None:
    """A rank has its share of gate and of up, or of the inputs, of what SequentialMLP draws."""
    of_tp = SimpleNamespace(size=lambda: etp, rank=lambda: etp - 1)
    groups = SimpleNamespace(ep=ALONE, expt_tp=of_tp, expt_dp=ALONE)
    options = {"expert_model_parallel_size": ep, "expert_tensor_parallel_size": etp, "tensor_model_parallel_size": tp}
    options |= {"add_bias_linear": etp == 1, "sequence_parallel": tp > 1}
    experts = experts_of(form, groups=groups, **ACTIVATIONS["swiglu"] | options)
    torch.manual_seed(0)
    whole = {
        "linear_fc1.weight": torch.empty(EXPERTS, 2 * HIDDEN, H),
        "linear_fc2.weight": torch.empty(EXPERTS, H, HIDDEN),
    }
    drawn = [(name, i) for i in range(EXPERTS) for name in whole]
    for name, i in sorted(drawn) if form == "grouped" else drawn:
        draw = experts.config.init_method if "fc1" in name else experts.config.output_layer_init_method
        draw(whole[name][i])
    gate, up = whole["linear_fc1.weight"].chunk(2, 1)
    whole["linear_fc1.weight"] = torch.cat([gate.chunk(etp, 1)[etp - 1], up.chunk(etp, 1)[etp - 1]], 1)
    whole["linear_fc2.weight"] = whole["linear_fc2.weight"].chunk(etp, 2)[etp - 1]
    found = by_kind(experts, lambda param: param.detach())
    assert all(torch.equal(torch.stack(found[name]), wanted) for name, wanted in whole.items())
    cut = {"linear_fc1.weight": (0, 2), "linear_fc2.weight": (1, 1), "linear_fc1.bias": (0, 2)}
    for name, param in experts.named_parameters():
        kind = name.rstrip("0123456789")
        assert param.allreduce == (ep == 1 and etp == tp)
        assert param.tensor_model_parallel == (kind in cut)
        if kind in cut:
            dim, stride = cut[kind]
            assert (param.partition_dim, param.partition_stride) == (dim + stacked(experts), stride)
    experts.config.perform_initialization = False
    assert GroupedRow(
        1, 4, 4, config=experts.config, init_method=pytest.fail, bias=False, skip_bias_add=True, pg_collection=GROUPS
    )


@pytest.mark.parametrize("form", ["stacked", "each"])
def test_a_parameter_may_ask_to_be_overwritten_and_for_zeros(form: str) -> None:
    experts = experts_of(form, fused=True)
    for param in experts.parameters():
        param.main_grad, param.overwrite_main_grad, param.zero_out_wgrad = torch.full_like(param, 5.0), True, True
    check(experts)
    assert not any(param.grad.any() for param in experts.parameters())


def drawn_on_a_rank(by_cpu: bool) -> list[dict[str, Tensor]]:
    found = []
    for kind in ("SequentialMLP", "Experts", "Experts weight{i}"):
        torch.manual_seed(7)
        megatron.core.tensor_parallel.model_parallel_cuda_manual_seed(7)
        model = megatron_experts.model_of(kind, "EP2", by_cpu=by_cpu)
        found.append(megatron_experts.assembled(model, "EP2"))
    return found


@pytest.mark.parametrize("by_cpu", [True, False])
def test_weights_are_drawn_as_those_of_sequential_mlp(by_cpu: bool) -> None:
    """On a device each rank of the experts has its own random numbers."""
    for theirs, *ours in megatron_ranks(drawn_on_a_rank, 2, by_cpu, ep=2):
        for name, value in theirs.items():
            assert all(torch.equal(mine[name], value) for mine in ours), name
            assert torch.equal(value[0], value[len(value) // 2]) == by_cpu


def test_biases_do_not_decay() -> None:
    """Megatron leaves out what is 1-D or ends so."""
    names = [name for name, _ in experts_of(add_bias_linear=True).named_parameters() if "bias" in name]
    assert names == ["linear_fc1.bias", "linear_fc2.bias"]
    each = experts_of("each", add_bias_linear=True)
    assert all(param.ndim == 1 for name, param in each.named_parameters() if "bias" in name)


def test_state_dicts_of_every_form_load_and_extra_states_do_not_matter() -> None:
    stacked = experts_of(add_bias_linear=True)
    state = {name: value.clone() for name, value in stacked.state_dict().items()}
    sequential = {f"local_experts.{i}.{name}": value[i] for name, value in state.items() for i in range(EXPERTS)}
    each = experts_of("each", add_bias_linear=True)
    for given in (state, sequential, {**sequential, "local_experts.0.linear_fc1._extra_state": None}):
        for into in (each, stacked):
            with torch.no_grad():
                for param in into.parameters():
                    param.fill_(torch.nan)
            into.load_state_dict(dict(given))
        assert torch.equal(stacked.linear_fc1.weight[1], each.linear_fc1.weight1)
        assert torch.equal(stacked.linear_fc2.bias[2], each.linear_fc2.bias2)
        assert all(torch.equal(value, state[name]) for name, value in stacked.state_dict().items())


@pytest.mark.parametrize(
    ("form", "options", "words"),
    [
        ("stacked", {"add_bias_linear": True}, "no biases"),
        ("stacked", {"moe_apply_probs_on_input": True}, "moe_router_topk=1"),
        ("stacked", {"use_te_activation_func": True}, "activations of TransformerEngine"),
        ("stacked", {"fp8": "hybrid"}, "8 bits"),
        ("stacked", {"moe_ffn_hidden_size": 9}, "9 features do not divide by tp_size=2"),
        ("grouped", {"fp8": "e4m3"}, "fp8"),
        ("grouped", {"fp4": "e2m1"}, "fp4"),
        ("grouped", {"moe_single_grouped_weight": True}, "moe_single_grouped_weight"),
        ("grouped", {"use_transformer_engine_op_fuser": True}, "use_transformer_engine_op_fuser"),
        ("grouped", {"add_bias_linear": True}, "bias=True with tp_size=2"),
        ("grouped", {"moe_ffn_hidden_size": 9}, "9 features do not divide by tp_size=2"),
        ("grouped", {"moe_ffn_hidden_size": 9, "gated_linear_unit": True}, "18 .* tp_size=2 for each of gate and up"),
    ],
)
def test_what_cannot_be_is_refused_by_name(form: str, options: dict[str, Any], words: str) -> None:
    two = SimpleNamespace(size=lambda: 2, rank=lambda: 0)
    made = config()
    for name, value in options.items():
        setattr(made, name, value)
    groups = SimpleNamespace(ep=ALONE, expt_tp=two, expt_dp=ALONE)
    with pytest.raises(ConfigError, match=words):
        built(form, made, groups)
