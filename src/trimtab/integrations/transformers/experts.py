"""transformers' experts modules, run by trimtab: what `experts_implementation="trimtab"` calls.

Every class that transformers decorates with `use_experts_implementation` carries its weights and flags in one
form, read here: gated or not, biased, transposed, interleaved, custom gate, norm behind the experts.

Legend: T rows, K slots per row, D model dim.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from trimtab.autograd import not_in_graphs, refuse_transforms
from trimtab.checkpoint.state import is_transformers_experts
from trimtab.errors import ConfigError, InputError
from trimtab.experts.mlp import expert_mlp
from trimtab.experts.plan import plan_for
from trimtab.experts.replicated import Replicas, replicate
from trimtab.experts.weight import GroupedWeight, LoraFactors
from trimtab.integrations.transformers.gates import gate_of
from trimtab.integrations.transformers.quantized import MARK, codes_of
from trimtab.kernels.choose import KernelChoice, kernels_for
from trimtab.kernels.tensor_checks import unsupported_dtype


def experts_forward(
    module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, *, kernels: KernelChoice,
    num_slots: int | None = None, part: Callable[[LoraFactors], LoraFactors] | None = None,
    replicas: Replicas | None = None,
) -> Tensor:  # fmt: skip
    """Weighted sum of each row's experts: [T, D]. The registry's signature, plus what our own exchange knows.

    Args:
        module: an experts module of a transformers model, its parameters local tensors.
        hidden_states: [T, D] rows, T >= 0.
        top_k_index: [T, K] int ids; under expert parallelism any id outside 0..num_experts - 1 drops its slot.
        top_k_weights: [T, K], any floating dtype; its gradient comes back in it.
        kernels: what computes, tested at its first use and shared by the layers of a name.
        num_slots: how many slots are kept, or how many at most, where it is known.
        part: of adapters of all ranks' experts, those of the module's.
        replicas: of other ranks' experts, of ids from num_experts on, see `experts.replicated`. Collective then.

    Raises:
        ConfigError: the module lacks the weights that its flags promise, or they are quantized; its adapters are of
            other experts than it has.
        InputError: shapes or ids other than these; under `torch.func`'s transforms or `torch.jit.trace`.
        BackendError: the kernels fail their self-test on the device.

    Under `torch.compile` and `torch.export` it is operators of the graph. A process that loads such a program imports
    `trimtab.moe` and `trimtab.experts.linear` first.
    """
    who = type(module).__name__
    refuse_transforms(who)
    rows, slots, given = hidden_states.shape, top_k_index.shape, top_k_weights.shape
    if len(rows) != 2 or len(slots) != 2 or slots[0] != rows[0] or given != slots:
        raise InputError(
            f"{who}: expected rows [T, D], ids [T, K] and weights [T, K], got {tuple(rows)}, {tuple(slots)} and "
            f"{tuple(given)}",
            phase="experts",
        )
    up, down = read_transformers(module, part)
    chosen = kernels_for(kernels, hidden_states.device, up.computed_in)
    assert chosen is not None  # the registered choice names its kernels
    whole = "" if module._is_expert_parallel else who  # else slots of other ranks have the sentinel
    norm: Any = module.post_expert_norm if module.has_post_expert_norm else None

    def run(up: GroupedWeight, down: GroupedWeight, x: Tensor, ids: Tensor, slots: int | None) -> Tensor:
        plan = plan_for(ids, up.groups, slots, chosen, whole)
        return expert_mlp(x, top_k_weights, plan, up, down, gate_of(module), chosen, norm=norm)

    if replicas is None:
        return run(up, down, hidden_states, top_k_index, num_slots)
    return not_in_graphs(_with_replicas)(run, replicas, hidden_states, top_k_index, up, down)


def _with_replicas(
    run: Callable[..., Tensor], replicas: Replicas, x: Tensor, ids: Tensor, up: GroupedWeight, down: GroupedWeight
) -> Tensor:  # fmt: skip
    """`run` on the experts at home, plus `run` on the replicas. Collective."""
    x, home, of_others = replicate(replicas, x, up, down)
    y = run(*home, x, ids, replicas.num_home_slots)
    return y.add_(run(*of_others, x, ids - up.groups, replicas.num_slots)) if replicas.number else y


def is_ours(module: nn.Module) -> bool:
    """Whether our experts function runs this module."""
    config: Any = getattr(module, "config", None)
    function = ALL_EXPERTS_FUNCTIONS.get(getattr(config, "_experts_implementation", None))
    known = isinstance(function, partial) and function.func is experts_forward
    return known and is_transformers_experts(module)


def check_ours(modules: list[nn.Module], name: str) -> None:
    """Raise ConfigError if another implementation runs one of these: it would read codes as weights."""
    if not all(is_ours(module) for module in modules):
        raise ConfigError(
            f"experts as codes are run by trimtab: pass experts_implementation='trimtab' to from_pretrained, or call "
            f"model.set_experts_implementation('trimtab') before ({name})"
        )


def keep_others_out(module: nn.Module, args: Any) -> None:
    """A hook before the forward: raise ConfigError where another implementation was set since, and codes are left."""
    if hasattr(module, MARK):
        check_ours([module], getattr(module, MARK)[0])


ATTACHED = "_attached_lora"
"""Where a module has the factors of its weights, by the weights' names, for the time of a call."""
UPS = ("gate_up_proj", "up_proj")
_NEEDS = (
    "trimtab runs experts modules that hold their weights as stacked floating tensors; for quantized ones choose one "
    "of transformers' own experts implementations"
)


def attached_lora(module: nn.Module) -> dict[str, LoraFactors]:
    """The factors that a module has now, by its weights' names."""
    return getattr(module, ATTACHED, {})


def read_transformers(
    module: nn.Module, part: Callable[[LoraFactors], LoraFactors] | None = None
) -> tuple[GroupedWeight, GroupedWeight]:
    """The weights of a module, by transformers' names, or the codes in their place. part: see `experts_forward`."""
    names = (UPS[0] if module.has_gate else UPS[1], "down_proj")
    held = [_or_none(module, name) for name in names]
    if missing := [name for name, t in zip(names, held, strict=True) if not isinstance(t, Tensor)]:
        raise ConfigError(f"{type(module).__name__} has no {' and no '.join(missing)}: {_NEEDS}")
    up, down = (_read(module, name, value, part) for name, value in zip(names, held, strict=True))
    return up, down


def _read(module: nn.Module, name: str, value: Any, part: Callable[[LoraFactors], LoraFactors] | None) -> GroupedWeight:
    coded = codes_of(module, name)
    weight = GroupedWeight(
        values=(_of_values(module, value) if coded is None else _codes(value.detach()),),
        biases=(_of_values(module, getattr(module, f"{name}_bias")),) if module.has_bias else (),
        transposed=coded is None and bool(module.is_transposed),
    )  # fmt: skip
    if coded is not None:
        weight.format, weight.scales, weight.dtype = coded
    lora = attached_lora(module).get(name)
    if lora is not None:
        lora = weight.lora = lora if part is None else part(lora)
        if (lora.a.shape[0], lora.a.shape[2], lora.b.shape[1]) != (weight.groups, weight.ins, weight.outs):
            raise ConfigError(
                f"{type(module).__name__}.{name} of {weight.groups} experts, {weight.ins} to {weight.outs}, has "
                f"adapters of {lora.a.shape[0]} experts, {lora.a.shape[2]} to {lora.b.shape[1]}: of sharded experts "
                "those run under tp_size=, and under ep_size= with ep_implementation='trimtab'"
            )
    return weight


def _or_none(module: nn.Module, name: str) -> object:
    try:  # Dynamo guards a getattr with a default by what the module's dict holds: not a parametrized tensor
        return getattr(module, name)
    except AttributeError:
        return None


def _codes(value: Tensor) -> Tensor:
    return value.view(torch.uint8) if value.element_size() == 1 else value


def _of_values(module: nn.Module, value: object) -> Tensor:
    assert isinstance(value, Tensor)
    if held := unsupported_dtype(value):
        raise ConfigError(f"{type(module).__name__} has weights in {held}: {_NEEDS}")
    return value
