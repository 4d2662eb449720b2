"""transformers' experts modules, run by trimtab: what `experts_implementation="trimtab"` calls.

Every class that transformers decorates with `use_experts_implementation` carries its weights and flags in one
form, read here: gated or not, biased, transposed, interleaved, custom gate, norm behind the experts.

Legend: T rows, K slots per row, D model dim.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trimtab.autocast import computed_in
from trimtab.errors import ConfigError, InputError
from trimtab.experts.grouped_module import refuse_transforms
from trimtab.experts.mlp import ExpertMath, ExpertWeights, expert_mlp
from trimtab.experts.plan import ExpertPlan, plan_experts
from trimtab.experts.recomputed import Recomputed
from trimtab.integrations.transformers.gates import activation_of
from trimtab.kernels.memory import codes, no_values
from trimtab.kernels.rows import static_by_default
from trimtab.kernels.selftest import KernelChoice


def experts_forward(
    module: nn.Module,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    *,
    kernels: KernelChoice,
    num_slots: int | None = None,
) -> Tensor:
    """Weighted sum of each row's experts: [T, D]. The registry's signature, plus what our own exchange knows.

    Args:
        module: an experts module of a transformers model, its parameters local tensors.
        hidden_states: [T, D] rows, T >= 0.
        top_k_index: [T, K] int ids; under expert parallelism any id outside 0..num_experts - 1 drops its slot.
        top_k_weights: [T, K], any floating dtype; its gradient comes back in it.
        kernels: what computes, tested at its first use and shared by the layers of a name.
        num_slots: how many slots are kept, or how many at most, where it is known.

    Raises:
        ConfigError: the module lacks the weights that its flags promise, or they are quantised.
        InputError: shapes or ids other than these; under `torch.func`'s transforms or, eagerly, `torch.jit.trace`.
        BackendError: the kernels fail their self-test on the device.

    Under `torch.compile` they are operators of the graph; with an activation or gate that is none of ours, or a norm
    behind the experts, they run eagerly, between two graphs, and `torch.export` raises InputError.
    """
    who = type(module).__name__
    if not torch.compiler.is_compiling():
        refuse_transforms(who)
    rows, slots = tuple(hidden_states.shape), tuple(top_k_index.shape)
    if len(rows) != 2 or len(slots) != 2 or slots[0] != rows[0] or tuple(top_k_weights.shape) != slots:
        raise InputError(
            f"{who}: expected rows [T, D], ids [T, K] and weights [T, K], got {rows}, {slots} and "
            f"{tuple(top_k_weights.shape)}",
            phase="experts",
        )
    if torch.compiler.is_compiling():
        from trimtab.integrations.transformers.compiled import compiled_forward

        given = (module, hidden_states, top_k_index, top_k_weights)
        return compiled_forward(*given, kernels=kernels, num_slots=num_slots)
    weights, math = weights_of(module), math_of(module)
    chosen = kernels.on(hidden_states.device, computed_in(weights.up), weights.shape)
    plan = plan_experts(top_k_index, weights.up.shape[0], num_slots=num_slots, kernels=chosen)
    if not module._is_expert_parallel:  # else slots of other ranks have the sentinel
        refuse_dropped(who, _dropped(plan, top_k_index), weights.up.shape[0])
    return expert_mlp(hidden_states, top_k_weights, plan, weights, math, chosen)


def _dropped(plan: ExpertPlan, ids_TK: Tensor) -> int | Tensor:
    """How many slots are in no expert's segment, without a host sync; 0 where nobody can tell."""
    if static_by_default(ids_TK):
        return 0 if no_values(ids_TK.device) else ids_TK.numel() - plan.counts_e.sum()
    return ids_TK.numel() - plan.row_csr.indices.shape[0]


def refuse_dropped(who: str, dropped: int | Tensor, num_experts: int) -> None:
    """Raise InputError where slots name no expert; on a device, trip an assertion there."""
    if isinstance(dropped, Tensor) and dropped.device.type != "cpu":
        torch._assert_async(dropped == 0, f"trimtab: {who}: ids outside 0..{num_experts - 1}")
    elif int(dropped):
        raise InputError(
            f"{who}: {int(dropped)} slot(s) have an id outside 0..{num_experts - 1}. Does the router score as many "
            "experts as there are?",
            phase="experts",
        )


_NEEDS = (
    "trimtab runs experts modules that hold their weights as stacked floating tensors; for quantised ones choose one "
    "of transformers' own experts implementations"
)


def weights_of(module: nn.Module) -> ExpertWeights:
    """The expert parameters of a module, by transformers' names."""
    names = ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")
    up, down = (_or_none(module, name) for name in names)
    if not isinstance(up, Tensor) or not isinstance(down, Tensor):
        missing = [name for name, t in zip(names, (up, down), strict=True) if not isinstance(t, Tensor)]
        raise ConfigError(f"{type(module).__name__} has no {' and no '.join(missing)}: {_NEEDS}")
    return ExpertWeights(
        up=_of_values(module, up),
        down=_of_values(module, down),
        up_bias=_of_values(module, getattr(module, f"{names[0]}_bias")) if module.has_bias else None,
        down_bias=_of_values(module, module.down_proj_bias) if module.has_bias else None,
        transposed=bool(module.is_transposed),
    )


def math_of(module: nn.Module) -> ExpertMath:
    """Activation and norm of a module."""
    post_norm = None
    if module.has_post_expert_norm:
        norm = module.post_expert_norm
        assert isinstance(norm, nn.Module)
        post_norm = Recomputed(norm, module=norm)
    return ExpertMath(activation=activation_of(module), post_norm=post_norm)


def _or_none(module: nn.Module, name: str) -> object:
    try:  # Dynamo guards a getattr with a default by what the module's dict holds: not a parametrised tensor
        return getattr(module, name)
    except AttributeError:
        return None


def _of_values(module: nn.Module, value: object) -> Tensor:
    assert isinstance(value, Tensor)
    if held := codes(value):
        raise ConfigError(f"{type(module).__name__} has weights in {held}: {_NEEDS}")
    return value
