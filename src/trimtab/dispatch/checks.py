"""Checks of what a rank is given to dispatch, and the operator that checks ids and weights.

Legend: T local tokens, K experts per token, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from trimtab.errors import InputError
from trimtab.kernels.tensor_checks import dense, described
from trimtab.operators import operator
from trimtab.validation import VALUES, assert_on_device, holds_ids, holds_values, wide_ids

_NAME_BYTES = 64
_SHOWN = 8
"""Tokens that a message names."""


def shape_problems(x: Tensor, ids: Tensor, w: Tensor, mask: Tensor | None) -> list[str]:
    """Problems with layouts, devices, shapes and dtypes, in words. No host sync."""
    given = [("tokens", x), ("expert ids", ids), ("weights", w), *([] if mask is None else [("the token mask", mask)])]
    problems = [f"{name} must be a dense local tensor, got {described(t)}" for name, t in given if not dense(t)]
    if problems:
        return problems  # some have no shape
    if any(t.device != x.device for _, t in given):
        problems.append(f"all must be on one device, got {', '.join(f'{name} on {t.device}' for name, t in given)}")
    if x.dim() != 2 or x.shape[1] < 1 or not holds_values(x.dtype):
        problems.append(f"tokens must be floating [T, D] in {VALUES} with D >= 1, got {x.dtype} {tuple(x.shape)}")
    tokens = sum(x.shape[:1])
    if ids.dim() != 2 or not holds_ids(ids) or ids.shape[0] != tokens or ids.shape[1] < 1:
        problems.append(f"expert ids must be int [{tokens}, K >= 1], got {ids.dtype} {tuple(ids.shape)}")
    if w.shape != ids.shape or not holds_values(w.dtype):
        wanted = f"floating {tuple(ids.shape)} like the ids, in {VALUES}"
        problems.append(f"weights must be {wanted}, got {w.dtype} {tuple(w.shape)}")
    if mask is not None and (mask.dtype != torch.bool or mask.shape != x.shape[:1]):
        problems.append(f"the token mask must be bool [{tokens}], got {mask.dtype} {tuple(mask.shape)}")
    return problems


def rows_problem(y: Tensor, rows: Tensor) -> str:
    """The problem with what experts made of `rows` [M', *], in words, or ""."""
    if not dense(y) or not holds_values(y.dtype) or y.device != rows.device:
        return f"combine takes dense rows in {VALUES} on {rows.device}, got {described(y)} on {y.device}"
    if y.dim() != 2 or y.shape[0] != rows.shape[0] or y.shape[1] < 1:
        got = f"combine got {sum(y.shape[:1])} rows for the {rows.shape[0]} that dispatch gave out"
        return f"{got}, as {tuple(y.shape)}: expected [{rows.shape[0]}, D >= 1]"
    return ""


def meeting_device(*tensors: Tensor) -> torch.device:
    """The device on which ranks are likely to meet: of several, not the CPU, where a tensor was forgotten, and not
    meta, where there are no values."""
    return max((t.device for t in tensors), key=lambda device: ("meta", "cpu", device.type).index(device.type))


def prepared(x_TD: Tensor, ids_TK: Tensor, w_TK: Tensor, mask_T: Tensor | None) -> tuple[Tensor, Tensor]:
    """Ids that compare with any number of experts, -1 in masked tokens; weights in float32 at least."""
    ids_TK = wide_ids(ids_TK)
    if mask_T is not None:
        ids_TK = ids_TK.masked_fill(~mask_T[:, None], -1)
    return ids_TK, w_TK.to(torch.promote_types(x_TD.dtype, torch.float32))


def bad_slots(ids_TK: Tensor, w_TK: Tensor, num_experts: int) -> Tensor:
    """[] int64: ids that are neither -1 nor an expert, plus weights in use that are not finite."""
    return _bad(ids_TK, w_TK, num_experts).sum()


def count_bad(ids_TK: Tensor, w_TK: Tensor, num_experts: int) -> int:
    """`bad_slots` on the CPU, where hardly ever one is."""
    good = torch.equal(ids_TK.clamp(-1, num_experts - 1), ids_TK) and math.isfinite(w_TK.detach().sum())
    return 0 if good else int(bad_slots(ids_TK, w_TK, num_experts))


def _bad(ids_TK: Tensor, w_TK: Tensor, num_experts: int) -> Tensor:
    bad_ids = ids_TK.clamp(-1, num_experts - 1) != ids_TK
    return bad_ids | ((w_TK.detach() * 0 != 0) & (ids_TK >= 0))  # of what is not finite it is NaN


def raise_if_bad(
    bad_P: Sequence[int], ids_TK: Tensor, w_TK: Tensor, num_experts: int, *, layer: str, ranked: bool = False
) -> None:
    """Raise InputError if any rank has bad slots, naming this rank's own tokens that have some. ranked: the counts are
    those of the ranks of a group."""
    guilty = {rank: f"rank {rank}: {bad} slot(s)" for rank, bad in enumerate(bad_P) if bad}
    if guilty:
        tokens = _bad(ids_TK, w_TK, num_experts).any(1).nonzero()[:, 0].tolist()
        own = f", here those of token(s) {', '.join(map(str, tokens[:_SHOWN]))}" if tokens else ""
        more = f" and {len(tokens) - _SHOWN} more" if len(tokens) > _SHOWN else ""
        raise InputError(
            f"{'; '.join(guilty.values())} with an expert id outside -1..{num_experts - 1} or a weight that "
            f"is not finite{own}{more}. Look at the router's logits there (and at sequence ids, which num_sequences "
            "bounds); -1 drops a slot",
            ranks=tuple(guilty) if ranked else (), layer=layer, phase="route",
        )  # fmt: skip


def name_bytes(layer: str) -> Tensor:
    """A layer's name as data on the host: layers that differ in it alone share one graph of `torch.compile`."""
    name = layer.encode()[:_NAME_BYTES].ljust(_NAME_BYTES)
    return torch.tensor(list(name), dtype=torch.uint8, device="cpu")


def _checked_ids(ids_TK: Tensor, w_TK: Tensor, name: Tensor, num_experts: int) -> Tensor:
    if ids_TK.device.type != "cpu":
        return _checked_on_device(ids_TK, w_TK, name, num_experts)
    if bad := count_bad(ids_TK, w_TK, num_experts):
        raise_if_bad([bad], ids_TK, w_TK, num_experts, layer=_layer(name))
    return ids_TK.clone()


def _checked_on_device(ids_TK: Tensor, w_TK: Tensor, name: Tensor, num_experts: int) -> Tensor:
    problem = f"an expert id is outside -1..{num_experts - 1} or a weight is not finite"
    error = InputError(problem, layer=_layer(name), phase="route")
    assert_on_device(bad_slots(ids_TK, w_TK, num_experts) == 0, str(error))
    return ids_TK.clone()


def _layer(name: Tensor) -> str:
    return bytes(name.tolist()).decode(errors="replace").rstrip()


checked_ids = operator(
    "checked_ids(Tensor ids_TK, Tensor w_TK, Tensor name, SymInt num_experts) -> Tensor",
    _checked_ids, lambda ids_TK, *_: torch.empty_like(ids_TK),
)  # fmt: skip
"""(ids, weights without a gradient, `name_bytes`, E) -> the ids, if all slots are good. What is made of them needs this
operator, so that it stays in a graph. Raises InputError; on a device an assertion there."""
