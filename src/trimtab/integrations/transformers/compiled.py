"""transformers' experts modules inside a graph of `torch.compile`: the operators of `ExpertMLP`.

Imported while a graph is traced and at no other time.

Legend: T rows, K slots per row, D model dim.
"""

from __future__ import annotations

from types import FunctionType

import torch
from torch import Tensor, nn

from trimtab.eager import eagerly
from trimtab.errors import InputError
from trimtab.experts.compiled import as_operator, operable
from trimtab.integrations.transformers.experts import experts_forward, refuse_dropped, weights_of
from trimtab.integrations.transformers.gates import _clamped, word_of
from trimtab.kernels.selftest import KernelChoice
from trimtab.routing.ids import wide_ids


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _clamped_word(function: FunctionType, numbers: tuple[tuple[str, str], ...], silu: bool) -> str | None:
    """It tries the gate, which cannot be traced; the answer depends on nothing else."""
    return _clamped(function, numbers, silu)


@torch.library.custom_op("trimtab::whole_ids", mutates_args=())
def whole_ids(ids_TK: Tensor, num_experts: int, who: str) -> Tensor:
    """The ids, if each names an expert; else as `experts_forward` raises."""
    ids = wide_ids(ids_TK)
    refuse_dropped(who, ((ids < 0) | (ids >= num_experts)).sum(), num_experts)
    return ids_TK.clone()


@whole_ids.register_fake
def _(ids_TK: Tensor, num_experts: int, who: str) -> Tensor:
    return torch.empty_like(ids_TK)


def compiled_forward(
    module: nn.Module,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    *,
    kernels: KernelChoice,
    num_slots: int | None,
) -> Tensor:
    """`experts_forward` while a graph is traced."""
    word = None if module.has_post_expert_norm else word_of(module, _clamped_word)
    if word is None or not operable(kernels):
        if torch.compiler.is_exporting():
            raise InputError(
                f"{type(module).__name__}: with an activation, gate or norm that is none of trimtab's, its experts "
                "cannot be exported: use experts_implementation='grouped_mm'"
            )
        given = (module, hidden_states, top_k_index, top_k_weights)
        y: Tensor = eagerly(experts_forward, *given, kernels=kernels, num_slots=num_slots)
        return y
    w, ids = weights_of(module), top_k_index
    if not module._is_expert_parallel:
        ids = whole_ids(ids, w.up.shape[0], type(module).__name__)
    return as_operator(hidden_states, ids, top_k_weights, w, word, "experts", kernels, num_slots)
