"""Muon on every family of transformers: each matrix, found by what the module computes, against float64 Newton-Schulz.

Legend: E experts, F hidden dim, D model dim, Z pre-activations.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from helpers.families import build_model, experts_modules, family_names
from helpers.optim_ranks import Matrices, small, worst_error
from trimtab.integrations.transformers.routers.find import find_routers
from trimtab.optim import gram
from trimtab.optim.matrices import find_matrices


def outputs_first(module: Any, param: nn.Parameter, *, inputs: bool) -> bool:
    """True where a stack [E, ., .] is out x in: by which of its entries the first expert reads of one input, or writes
    of one output."""
    for width in module.down_proj.shape[1:]:
        x = torch.eye(width, dtype=param.dtype)[1:2] if inputs else torch.ones(1, width, dtype=param.dtype)
        try:
            y = module(x, torch.zeros(1, 1, dtype=torch.long), torch.ones(1, 1, dtype=param.dtype))
        except RuntimeError:  # the other one is D
            continue
        (grad,) = torch.autograd.grad(y.sum() if inputs else y[0, 1], param)
        entries = grad[0].nonzero()
        own = [bool((entries[:, dim] == 1).all()) for dim in (0, 1)]
        assert own.count(True) == 1
        return own[1] if inputs else own[0]
    raise AssertionError(type(module).__name__)


def parts_of(module: Any, rows: int) -> list[Tensor]:
    """Which pre-activations are up and which gates, by feature: h is about linear in up."""
    if not module.has_gate:
        return [torch.arange(rows)]
    z = torch.linspace(-0.7, 0.9, rows, dtype=torch.float64)[torch.randperm(rows)].requires_grad_()

    def h(z: Tensor) -> Tensor:
        return module._apply_gate(z[None])[0]

    feature_of = torch.autograd.functional.jacobian(h, z).ne(0).int().argmax(0)
    bends = torch.autograd.functional.hessian(lambda z: h(z).sum(), z).diagonal().abs()
    pairs = feature_of.argsort(stable=True).view(-1, 2)
    pairs = pairs.gather(1, bends[pairs].argsort(dim=1))
    assert (bends[pairs[:, 0]] < 0.1 * bends[pairs[:, 1]]).all()
    return list(pairs.T)


def experts_truth(module: Any) -> dict[str, Matrices]:
    """The matrices of an experts module."""
    module.config._experts_implementation, found = "eager", {}
    norm = getattr(module, "post_expert_norm", None)
    if norm is not None:
        module.post_expert_norm = nn.Identity()
    for name in ("gate_up_proj" if module.has_gate else "up_proj", "down_proj"):
        param, first = module.get_parameter(name), name != "down_proj"
        where_Eoi = torch.arange(param.numel()).view(param.shape)
        where_Eoi = where_Eoi if outputs_first(module, param, inputs=first) else where_Eoi.mT
        parts = parts_of(module, where_Eoi.shape[1]) if first else [torch.arange(where_Eoi.shape[1])]
        found[name] = [expert[rows] for expert in where_Eoi for rows in parts]
    if norm is not None:
        module.post_expert_norm = norm
    return found


def rows_of_dense(name: str, owner: Any, linear: nn.Linear) -> list[Tensor]:
    """The outputs of each projection of a linear layer, as the module takes them apart."""
    o, rows = owner, torch.arange(linear.out_features)
    own = name.split(".")[-1]
    kind = type(o).__name__
    if own in ("gate_up_proj", "input_linear") or (own == "in_proj" and kind == "JambaMambaMixer"):
        return list(rows.chunk(2))
    if own == "in_proj" and "ShortConv" in kind:
        return list(rows.chunk(3))
    if own == "in_proj":
        gate, mixed, dt = rows.split([o.intermediate_size, o.conv_dim, o.num_heads])
        groups = o.n_groups * o.ssm_state_size
        return [gate, *mixed.split([o.intermediate_size, groups, groups]), dt]
    if own in ("in_proj_qkvz", "in_proj_ba"):
        qkvz = torch.arange(o.in_proj_qkvz.out_features)[None, None]
        taken = o.fix_query_key_value_ordering(qkvz, torch.arange(o.in_proj_ba.out_features)[None, None])
        return [part.flatten() for part in (taken[:4] if own == "in_proj_qkvz" else taken[4:])]
    if own == "in_proj_qkv":
        return list(rows.split([o.key_dim, o.key_dim, o.value_dim]))
    if own == "x_proj":
        return list(rows.split([o.time_step_rank, o.ssm_state_size, o.ssm_state_size]))
    if own == "kv_b_proj":
        return _by_heads(rows, [o.qk_nope_head_dim, o.v_head_dim])
    if own == "q_gate_proj":
        return _by_heads(rows, [o.qk_head_dim, o.v_head_dim])
    if own == "qkv_proj":
        return _by_heads(rows, [o.head_dim] * 3)
    if own == "kv_a_proj_with_mqa":
        return list(rows.split([o.kv_lora_rank, o.qk_rope_head_dim]))
    if own == "index_qk_proj":
        return list(rows.split([o.index_n_heads * o.index_head_dim, o.index_kv_heads * o.index_head_dim]))
    if own == "q_proj" and re.match("Qwen3Next|Qwen3_5|Qwen4", kind):
        return _by_heads(rows, [o.head_dim, o.head_dim])
    return [rows]


def _by_heads(rows: Tensor, sizes: list[int]) -> list[Tensor]:
    return [part.flatten() for part in rows.view(-1, sum(sizes)).split(sizes, dim=-1)]


def truth_of(model: Any) -> dict[str, Matrices]:
    """Every matrix of the model that Muon is to take."""
    found: dict[str, Matrices] = {}
    experts, routers = experts_modules(model), tuple(place.name for place in find_routers(model))
    head = model.get_output_embeddings()
    for path, module in model.named_modules():
        if path in experts:
            found |= {f"{path}.{name}": matrices for name, matrices in experts_truth(module).items()}
        elif type(module).__name__ == "InklingSharedExperts":
            for name, param in module.named_parameters():
                found[f"{path}.{name}"] = list(torch.arange(param.numel()).view(param.shape))
        elif type(module).__name__ == "DeepseekV4GroupedLinear":
            where = torch.arange(module.weight.numel()).view(module.n_groups, -1, module.weight.shape[1])
            found[f"{path}.weight"] = list(where)
        elif type(module) is nn.Linear and module is not head and min(module.weight.shape) > 1 and path != "score":
            if any(f"{path}.".startswith(f"{router}.") for router in routers):
                continue
            where = torch.arange(module.weight.numel()).view(module.weight.shape)
            owner = model.get_submodule(path.rpartition(".")[0])
            found[f"{path}.weight"] = [where[rows] for rows in rows_of_dense(path, owner, module)]
    return found


@pytest.mark.parametrize("name", family_names())
def test_each_matrix_of_a_family_is_orthogonalized_alone(name: str) -> None:
    model = build_model(name, dtype=torch.float64)
    truth = truth_of(model)
    model = small(model, torch.float64)
    assert worst_error(model, truth, "match_rms_adamw", ns_dtype=torch.float64) <= 1e-12
    assert worst_error(model, truth, "original", ns_dtype=torch.float64, newton_schulz=gram) <= 1e-11
    assert worst_error(small(model, torch.float32), truth, "original", ns_dtype=torch.float32) <= 1e-5


# Of families without a registry of experts: what each weight is made of, in the words of its module's forward.
OTHERS = {
    ("JetMoeConfig", "experts.input_linear.weight"): [(8, 2048, 2048)],
    ("JetMoeConfig", "kv_proj.weight"): [(1, 2048, 2048)] * 2,
    ("JetMoeConfig", "router.layer.weight"): None,
    ("Llama4TextConfig", "router.weight"): None,
    ("Phi3Config", "qkv_proj.weight"): [(1, 3072, 3072)] * 3,
    ("Phi3Config", "gate_up_proj.weight"): [(1, 8192, 3072)] * 2,
    ("MambaConfig", "in_proj.weight"): [(1, 1536, 768)] * 2,
    ("Mamba2Config", "in_proj.weight"): [(1, 8192, 4096)] * 2 + [(1, 1024, 4096)] * 2 + [(1, 128, 4096)],
}


@pytest.mark.parametrize("config", dict.fromkeys(config for config, _ in OTHERS))
def test_families_whose_experts_or_projections_have_no_flags(config: str) -> None:
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, config)(num_hidden_layers=1))
    found = {each.name: (each.layout, param) for param, each in find_matrices(model).items()}
    for (_, ending), truth in ((key, truth) for key, truth in OTHERS.items() if key[0] == config):
        (layout, param), *_ = [entry for name, entry in found.items() if f".{name}".endswith(f".{ending}")]
        assert (layout and layout.matrices(param.shape)) == truth, ending
