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

from trimtab.autograd import not_in_graphs, refuse_transforms
from trimtab.errors import ConfigError, InputError
from trimtab.experts.adapters import Adapters, Pair
from trimtab.experts.mlp import ExpertWeights, expert_mlp
from trimtab.experts.ops import plan_for
from trimtab.experts.quantized import Codes, packed
from trimtab.experts.replicated import Replicas, run_with_replicas
from trimtab.integrations.transformers.gates import gate_of
from trimtab.integrations.transformers.quantized.params import codes_of
from trimtab.kernels.choose import KernelChoice, kernels_for
from trimtab.kernels.tensor_checks import codes


def experts_forward(
    module: nn.Module,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    *,
    kernels: KernelChoice,
    num_slots: int | None = None,
    part: Callable[[Pair], Pair] | None = None,
    replicas: Replicas | None = None,
) -> Tensor:
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
        ConfigError: the module lacks the weights that its flags promise, or they are quantised; its adapters are of
            other experts than it has.
        InputError: shapes or ids other than these; under `torch.func`'s transforms or `torch.jit.trace`.
        BackendError: the kernels fail their self-test on the device.

    Under `torch.compile` and `torch.export` it is operators of the graph.
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
    weights = weights_of(module, part)
    chosen = kernels_for(kernels, hidden_states.device, weights.computed_in)
    assert chosen is not None  # the registered choice names its kernels
    whole = "" if module._is_expert_parallel else who  # else slots of other ranks have the sentinel
    norm: Any = module.post_expert_norm if module.has_post_expert_norm else None

    def run(some: ExpertWeights, x: Tensor, ids: Tensor, w: Tensor, slots: int | None) -> Tensor:
        plan = plan_for(ids, some.down.shape[0], slots, chosen, whole)
        return expert_mlp(x, w, plan, some, gate_of(module), chosen, norm=norm)

    if replicas is None:
        return run(weights, hidden_states, top_k_index, top_k_weights, num_slots)
    return not_in_graphs(run_with_replicas)(run, weights, hidden_states, top_k_index, top_k_weights, replicas)


def is_ours(module: nn.Module) -> bool:
    """Whether our experts function runs this module."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    config: Any = getattr(module, "config", None)
    function = ALL_EXPERTS_FUNCTIONS.get(getattr(config, "_experts_implementation", None))
    known = isinstance(function, partial) and function.func is experts_forward
    return known and hasattr(module, "has_post_expert_norm")


LENT = "_lent_pairs"
"""Where a module has the adapters of its weights, by the weights' names, for the time of a call."""
UPS = ("gate_up_proj", "up_proj")
_NEEDS = (
    "trimtab runs experts modules that hold their weights as stacked floating tensors; for quantised ones choose one "
    "of transformers' own experts implementations"
)


def weights_of(module: nn.Module, part: Callable[[Pair], Pair] | None = None) -> ExpertWeights:
    """The expert parameters of a module, by transformers' names, or the codes in their place."""
    names = (UPS[0] if module.has_gate else UPS[1], "down_proj")
    up, down = (_or_none(module, name) for name in names)
    if not isinstance(up, Tensor) or not isinstance(down, Tensor):
        missing = [name for name, t in zip(names, (up, down), strict=True) if not isinstance(t, Tensor)]
        raise ConfigError(f"{type(module).__name__} has no {' and no '.join(missing)}: {_NEEDS}")
    held = codes_of(module, names[0])
    if held is not None:
        up, down = up.detach().view(torch.uint8), down.detach().view(torch.uint8)
    else:
        up, down = _of_values(module, up), _of_values(module, down)
    return ExpertWeights(
        up=up,
        down=down,
        codes=held,
        up_bias=_of_values(module, getattr(module, f"{names[0]}_bias")) if module.has_bias else None,
        down_bias=_of_values(module, module.down_proj_bias) if module.has_bias else None,
        transposed=held is None and bool(module.is_transposed),
        adapters=_lent(module, {"up": (names[0], _wide(up, held)), "down": (names[1], _wide(down, held))}, part),
    )


def _wide(weight: Tensor, held: Codes | None) -> list[int]:
    """The shape of a weight, or of what its codes stand for."""
    return [*weight.shape[:-1], weight.shape[-1] * packed("" if held is None else held.format)]


def _lent(
    module: nn.Module, weights: dict[str, tuple[str, list[int]]], part: Callable[[Pair], Pair] | None
) -> Adapters | None:
    lent: dict[str, Pair] | None = getattr(module, LENT, None)
    if not lent:
        return None
    pairs: dict[str, Pair] = {}
    for own, (name, shape) in weights.items():
        if name not in lent:
            continue
        pairs[own] = pair = lent[name] if part is None else part(lent[name])
        sizes = pair.a.shape[0], *sorted((pair.a.shape[2], pair.b.shape[1]))
        if sizes != (shape[0], *sorted(shape[1:])):
            raise ConfigError(
                f"{type(module).__name__}.{name} {shape} has adapters of {pair.a.shape[0]} experts, "
                f"{pair.a.shape[2]} to {pair.b.shape[1]}: of sharded experts those run under tp_size=, and under "
                "ep_size= with ep_implementation='trimtab'"
            )
    return Adapters(up=pairs.get("up"), down=pairs.get("down"))


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
