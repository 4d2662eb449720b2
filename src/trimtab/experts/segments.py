"""Rows in segments: their offsets from group sizes, wherever these live, and rows to their experts and back.

    offsets_of     group sizes -> [e + 1]
    ToExperts      rows [M, D] -> expert rows [R, D]        and its transpose
    FromExperts    expert rows [R, D] -> sums of weight * row [M, D]

Legend: e groups (experts), M rows, K slots per row, R expert rows, D model dim.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import index
from typing import Any, SupportsIndex

import torch
from torch import Tensor
from torch.autograd.function import Function

from trimtab.autograd import once_differentiable
from trimtab.errors import InputError
from trimtab.experts.matrix import row_dot
from trimtab.experts.plan import ExpertPlan, slot_grads, slot_weights
from trimtab.kernels.rows import combine_rows, gather_padded
from trimtab.layout import segment_offsets
from trimtab.operators import operator
from trimtab.validation import assert_on_device, is_whole

GroupSizes = Iterable[SupportsIndex] | Tensor


def offsets_of(group_sizes: GroupSizes, num_groups: int, rows: int, device: torch.device) -> Tensor:
    """[e + 1] int64 on `device`: the start of each group's segment, and the end of the last.

    Sizes on the host are checked. Those on `device` are never read by the host; wrong ones trip an assertion there.

    Args:
        group_sizes: list or NumPy array, CPU tensor or tensor on `device`, `num_groups` of them; tensors of int32 or
            int64.
        rows: how many rows there are; the sizes may sum to fewer.

    Raises:
        InputError: wrong length, dtype or device; on the host also a negative size or a sum beyond the rows.
    """
    if not isinstance(group_sizes, Tensor):
        try:
            sizes = list(group_sizes)
        except TypeError:
            raise _bad(f"must be a list, array or tensor of ints, got {group_sizes!r}") from None
        wrong = [size for size in sizes if isinstance(size, Tensor) or not is_whole(size)]
        if wrong:
            raise _bad(f"must hold ints, found {wrong[0]!r}")
        group_sizes = torch.tensor([index(size) for size in sizes], dtype=torch.int64, device="cpu")
    if group_sizes.dtype not in (torch.int32, torch.int64):
        raise _bad(f"must be int32 or int64, got {group_sizes.dtype}")
    if group_sizes.ndim != 1:
        raise _bad(f"must be one-dimensional, got the shape {tuple(group_sizes.shape)}")
    if group_sizes.device.type != "cpu" and group_sizes.device != device:
        raise _bad(f"are on {group_sizes.device} and the rows on {device}: put them on the CPU or on {device}")
    if group_sizes.shape[0] != num_groups:
        raise _bad(f"have {group_sizes.shape[0]} entries for {num_groups} groups")
    offsets_e: Tensor = group_offsets_op(group_sizes, rows)
    return offsets_e.to(device, non_blocking=True)


def _offsets(sizes_e: Tensor, rows: int) -> Tensor:
    if sizes_e.device.type != "cpu":
        return _on_device(sizes_e, rows)
    sizes = sizes_e.tolist()
    negative = [i for i, size in enumerate(sizes) if size < 0]
    if negative:
        raise _bad(f"must not be negative, but group {negative[0]} has {sizes[negative[0]]}")
    offsets = segment_offsets(sizes)
    if offsets[-1] > rows:
        raise _bad(f"sum to {offsets[-1]}, but there are only {rows} rows")
    return torch.tensor(offsets, dtype=torch.int64, device="cpu")


def _on_device(sizes_e: Tensor, rows: int) -> Tensor:
    offsets_e = torch.nn.functional.pad(sizes_e.cumsum(0, dtype=torch.int64), (1, 0))
    legal = (sizes_e >= 0).all() & (offsets_e[-1] <= rows)
    assert_on_device(legal, "group_sizes are negative or sum to more than there are rows")
    return offsets_e


def _bad(what: str) -> InputError:
    return InputError(f"group_sizes {what}", phase="experts")


group_offsets_op = operator(
    "group_offsets(Tensor sizes, SymInt rows) -> Tensor",
    _offsets, lambda sizes, rows: sizes.new_empty(sizes.shape[0] + 1, dtype=torch.int64),
)  # fmt: skip
"""[e + 1] int64 on the sizes' device, checked against the number of rows."""


class ToExperts(Function):
    """Rows [M, D] -> expert rows [R, D], once for each kept slot; zeros in padding. `back`: its transpose, the sums."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, plan: ExpertPlan, back: bool) -> Tensor:
        ctx.plan, ctx.back = plan, back
        return _moved(rows, plan, back)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, None, None]:
        return _moved(d.contiguous(), ctx.plan, not ctx.back), None, None


def _moved(rows: Tensor, plan: ExpertPlan, back: bool) -> Tensor:
    return combine_rows(rows, plan.row_csr) if back else gather_padded(rows, plan.row_R)


class FromExperts(Function):
    """Expert rows [R, D] -> sums of weight * row [M, D], in the order of a row's slots; padding is not read.

    Backward: weight * gradient, and a dot product for the weights, for which the experts' outputs are kept. Products
    and sums are taken in the weights' dtype at least, which is that of the result.
    """

    @staticmethod
    def forward(ctx: Any, out_RD: Tensor, w_MK: Tensor, plan: ExpertPlan) -> Tensor:
        ctx.plan = plan
        ctx.save_for_backward(out_RD, w_MK)
        weighted_RD = out_RD.to(torch.promote_types(out_RD.dtype, w_MK.dtype)).mul(slot_weights(w_MK, plan))
        return combine_rows(weighted_RD, plan.row_csr)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_MD: Tensor) -> tuple[Tensor, Tensor, None]:
        out_RD, w_MK = ctx.saved_tensors
        dy_RD = gather_padded(dy_MD, ctx.plan.row_R)
        dw_MK = slot_grads(row_dot(out_RD, dy_RD).to(w_MK.dtype), ctx.plan, w_MK)
        return dy_RD.mul(slot_weights(w_MK, ctx.plan)).to(out_RD.dtype), dw_MK, None
