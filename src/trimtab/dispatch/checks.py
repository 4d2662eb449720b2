"""Whether what a rank was given can be dispatched. Local, and without a host sync.

Legend: T local tokens, K experts per token.
"""

from __future__ import annotations

import torch
from torch import Tensor


def shape_problems(x: Tensor, ids: Tensor, w: Tensor, mask: Tensor | None) -> list[str]:
    """What is wrong with shapes and dtypes, and what was expected. The host knows these."""
    problems = []
    if x.dim() != 2 or not x.is_floating_point():
        problems.append(f"tokens must be floating [T, D], got {x.dtype} {tuple(x.shape)}")
    if ids.dim() != 2 or ids.is_floating_point() or ids.shape[0] != x.shape[0] or ids.shape[1] < 1:
        problems.append(f"expert ids must be int [{x.shape[0]}, K >= 1], got {ids.dtype} {tuple(ids.shape)}")
    if w.shape != ids.shape or not w.is_floating_point():
        problems.append(f"weights must be floating {tuple(ids.shape)} like the ids, got {w.dtype} {tuple(w.shape)}")
    if mask is not None and (mask.dtype != torch.bool or mask.shape != x.shape[:1]):
        problems.append(f"the token mask must be bool [{x.shape[0]}], got {mask.dtype} {tuple(mask.shape)}")
    return problems


def bad_slots(ids_TK: Tensor, w_TK: Tensor, num_experts: int) -> Tensor:
    """How many ids are neither -1 nor an expert, plus how many weights in use are not finite: [] int64."""
    bad_ids = (ids_TK < -1) | (ids_TK >= num_experts)
    return (bad_ids | ((ids_TK >= 0) & ~w_TK.detach().isfinite())).sum()
