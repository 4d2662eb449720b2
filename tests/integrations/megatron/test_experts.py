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

from helpers import megatron_experts
from helpers.megatron_cpu import megatron, megatron_ranks
from trimtab.errors import ConfigError
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
        "num_layers": 1, "hidden_size": H, "num_attention_heads": 2, "num_moe_experts": EXPERTS,
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


def test_no_rows_and_no_slots_give_zeros_everywhere() -> None:
    experts = experts_of()
    for count, top_k in ((0, 2), (5, 0)):
        experts.zero_grad()
        y, _ = experts(torch.randn(count, H), torch.zeros(count, top_k, dtype=torch.long), torch.rand(count, top_k))
        y.sum().backward()
        assert y.shape == (count, H)
        assert not y.any()
        assert all(param.grad is not None and not param.grad.any() for param in experts.parameters())


@pytest.mark.parametrize("single_parameter", [True, False])
@pytest.mark.parametrize("frozen", ["linear_fc1", "linear_fc2", "linear_fc"])
def test_what_is_frozen_has_no_gradient_and_the_rest_has_its_own(frozen: str, single_parameter: bool) -> None:
    experts = experts_of(single_parameter=single_parameter)
    for fused, later in ((False, False), (True, True)):
        experts = rebuilt(experts, fused=fused, later=later)
        for name, param in experts.named_parameters():
            param.requires_grad_(not name.startswith(frozen))
            param.main_grad, param.grad_added_to_main_grad = torch.zeros_like(param), False
        x, ids, w = rows()
        y_true, of, x_true, _ = truth(experts, x, ids, w)
        y, _ = experts(x, ids, w)
        y.sum().backward()
        y_true.sum().backward()
        experts.backward_dw()
        close(x.grad, x_true.grad)
        for name, param in experts.named_parameters():
            mine = param.main_grad if fused else param.grad
            if not param.requires_grad:
                assert param.grad is None
                assert not param.main_grad.any()
                assert not param.grad_added_to_main_grad
            elif single_parameter:
                zeros = torch.zeros_like(of[name][0])
                close(mine, torch.stack([zeros if one.grad is None else one.grad for one in of[name]]))


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


@pytest.mark.parametrize("single_parameter", [True, False])
def test_hooks_before_a_linear_run_before_its_parameters_are_read(single_parameter: bool) -> None:
    """Megatron gathers parameters there."""
    experts, whole = experts_of(single_parameter=single_parameter), experts_of(single_parameter=single_parameter)
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
        assert torch.equal(experts(x, ids, w)[0], whole(x, ids, w)[0])
    assert calls == ["linear_fc1", "linear_fc2"]


@pytest.mark.parametrize("single_parameter", [True, False])
@pytest.mark.parametrize(("ep", "etp", "tp"), [(1, 1, 1), (2, 1, 1), (1, 1, 2), (2, 2, 1), (1, 2, 2)])
def test_megatron_is_told_who_sums_what(ep: int, etp: int, tp: int, single_parameter: bool) -> None:
    of_tp = SimpleNamespace(size=lambda: etp, rank=lambda: etp - 1)
    options = {"expert_model_parallel_size": ep, "expert_tensor_parallel_size": etp, "tensor_model_parallel_size": tp}
    made = config(gated_linear_unit=True, activation_func=F.silu, sequence_parallel=tp > 1, **options)
    torch.manual_seed(3)
    groups = SimpleNamespace(ep=ALONE, expt_tp=of_tp, expt_dp=ALONE)
    experts = Experts(EXPERTS, made, pg_collection=groups, single_parameter=single_parameter)
    torch.manual_seed(3)
    for i in range(EXPERTS):  # as SequentialMLP draws: the whole, then a share of gate and of up
        up, down = torch.empty(2 * HIDDEN, H), torch.empty(H, HIDDEN)
        made.init_method(up)
        made.output_layer_init_method(down)
        up = torch.cat([half.chunk(etp)[etp - 1] for half in up.chunk(2)])
        down = down.chunk(etp, 1)[etp - 1]
        found = dict(experts.named_parameters())
        if single_parameter:
            mine = found["linear_fc1.weight"][i], found["linear_fc2.weight"][i]
        else:
            mine = found[f"linear_fc1.weight{i}"], found[f"linear_fc2.weight{i}"]
        assert torch.equal(mine[0], up)
        assert torch.equal(mine[1], down)
    for name, param in experts.named_parameters():
        first = name.startswith("linear_fc1")
        assert param.allreduce == (ep == 1 and etp == tp)
        assert param.tensor_model_parallel
        assert param.partition_dim == (0 if first else 1) + single_parameter
        assert param.partition_stride == (2 if first else 1)


@pytest.mark.parametrize("single_parameter", [True, False])
def test_a_parameter_may_ask_to_be_overwritten_and_for_zeros(single_parameter: bool) -> None:
    experts = rebuilt(experts_of(single_parameter=single_parameter), fused=True, later=False)
    for param in experts.parameters():
        param.main_grad, param.overwrite_main_grad, param.zero_out_wgrad = torch.full_like(param, 5.0), True, True
    check(experts, attribute="main_grad")
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
    each = experts_of(add_bias_linear=True, single_parameter=False)
    assert all(param.ndim == 1 for name, param in each.named_parameters() if "bias" in name)


def test_state_dicts_of_every_form_load_and_extra_states_do_not_matter() -> None:
    stacked = experts_of(add_bias_linear=True)
    state = {name: value.clone() for name, value in stacked.state_dict().items()}
    sequential = {
        f"local_experts.{i}.{name}": value[i] for name, value in state.items() for i in range(EXPERTS)
    }  # fmt: skip
    each = experts_of(add_bias_linear=True, single_parameter=False)
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
    ("options", "words"),
    [
        ({"add_bias_linear": True}, "no biases"),
        ({"moe_apply_probs_on_input": True}, "moe_router_topk=1"),
        ({"use_te_activation_func": True}, "activations of TransformerEngine"),
        ({"fp8": "hybrid"}, "8 bits"),
        ({"moe_ffn_hidden_size": 9}, "9 features do not divide by tp_size=2"),
    ],
)
def test_what_cannot_be_is_refused_by_name(options: dict[str, Any], words: str) -> None:
    two = SimpleNamespace(size=lambda: 2, rank=lambda: 0)
    made = config()
    for name, value in options.items():
        setattr(made, name, value)
    with pytest.raises(ConfigError, match=words):
        Experts(EXPERTS, made, pg_collection=SimpleNamespace(ep=ALONE, expt_tp=two, expt_dp=ALONE))
