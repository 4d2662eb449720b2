"""The operators that the grouped linear map and its gradients are made of.

    trimtab::grouped_linear              y[segment i]  = x[segment i] W_i^T + b_i     zero behind the last segment
    trimtab::grouped_linear (the other)  dx[segment i] = dy[segment i] W_i            the same, W_i turned
    trimtab::grouped_weight_gradient_    dW_i  = dy[segment i]^T x[segment i]         written, or added
    trimtab::grouped_sum                 db_i  = sum of dy[segment i]
    trimtab::group_offsets               group sizes to the offsets of segments

Legend: S rows in segments, e groups, A in features, B out features, C either width.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import index
from typing import Any, SupportsIndex

import torch
from torch import Tensor

from trimtab.errors import InputError
from trimtab.kernels.api import Backend, put
from trimtab.kernels.choose import kernels_of
from trimtab.kernels.compiled import at_once
from trimtab.layout import segment_offsets
from trimtab.operators import operator
from trimtab.validation import assert_on_device, is_whole

GroupSizes = Iterable[SupportsIndex] | Tensor


def by_row(weights: Sequence[Tensor], groups: slice, stacked: bool, transposed: bool) -> Tensor:
    """The weights of these groups as [e, A, B]. A copy only where several separate ones are asked for."""
    if stacked:
        w = weights[0][groups]
    else:
        each = weights[groups]
        w = each[0][None] if len(each) == 1 else torch.stack(list(each))
    return w if transposed else w.transpose(1, 2)


def _blocks(kernels: Backend, offsets_e: Tensor, rows: int, weights: Sequence[Tensor], stacked: bool) -> Any:
    """A group each, but all in one where their weights are one tensor that is multiplied at once."""
    whole = stacked and at_once(kernels, weights[0])
    return kernels.blocks(offsets_e, rows, rows + 1 if whole else 0)


def _linear(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], offsets: Tensor, stacked: bool, transposed: bool,
    name: str,
) -> Tensor:  # fmt: skip
    kernels = kernels_of(name, x.device, weights[0].dtype)
    dtype = kernels.compute_dtype(x.dtype)
    result = kernels.empty_rows(x.shape[0], _out_width(weights, transposed), x.dtype, offsets)
    direct = dtype == x.dtype
    for block in _blocks(kernels, offsets, x.shape[0], weights, stacked):
        r = block.rows
        w = by_row(weights, block.experts, stacked, transposed)
        y = kernels.grouped_mm(x[r].to(dtype), w, block, result[r] if direct else None)
        if biases:
            bias = biases[0][block.experts] if stacked else torch.stack(list(biases[block.experts]))
            y += kernels.expand(bias.to(dtype), block)
        if not direct:
            result[r] = y
    return result


def _weight_gradient(
    out: Sequence[Tensor], adds: Sequence[bool], x: Tensor, dy: Tensor, offsets: Tensor, stacked: bool,
    transposed: bool, name: str,
) -> None:  # fmt: skip
    kernels = kernels_of(name, x.device, dy.dtype)
    dtype = kernels.compute_dtype(dy.dtype)
    for block in _blocks(kernels, offsets, dy.shape[0], out, stacked):
        groups, a, b = block.experts, x[block.rows].to(dtype), dy[block.rows].to(dtype)
        if stacked or groups.stop - groups.start == 1:
            i = 0 if stacked else groups.start
            target = by_row(out, groups, stacked, transposed)
            kernels.grouped_wgrad(a, b, block, target, add=adds[i])
            continue
        fresh = out[0].new_empty(groups.stop - groups.start, *out[0].shape)
        kernels.grouped_wgrad(a, b, block, fresh if transposed else fresh.transpose(1, 2))
        for target, value, add in zip(out[groups], fresh.unbind(), adds[groups], strict=True):
            put(target, value, add)


def _sum(rows: Tensor, offsets: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    kernels = kernels_of(name, rows.device, rows.dtype)
    wide = kernels.compute_dtype(rows.dtype)
    blocks = kernels.blocks(offsets, rows.shape[0])
    return torch.cat([kernels.grouped_sum(rows[block.rows].to(wide), block) for block in blocks]).to(dtype)


def _out_width(weights: Sequence[Tensor], transposed: bool) -> int:
    return weights[0].shape[-1 if transposed else -2]


def _linear_flops(x: Any, weights: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return int(2 * x[0] * weights[0][-1] * weights[0][-2])


grouped_linear_op = operator(
    "grouped_linear(Tensor x, Tensor[] weights, Tensor[] biases, Tensor offsets, bool stacked, bool transposed, "
    "str kernels) -> Tensor",
    _linear,
    lambda x, weights, biases, offsets, stacked, transposed, kernels: x.new_empty(
        x.shape[0], _out_width(weights, transposed)
    ),
    _linear_flops,
)
"""[S, B] in x's dtype. weights: one [e, B, A], or e of [B, A] where not `stacked`; last axes turned if `transposed`."""

weight_gradient_op = operator(
    "grouped_weight_gradient_(Tensor(a!)[] out, bool[] adds, Tensor x, Tensor dy, Tensor offsets, bool stacked, "
    "bool transposed, str kernels) -> ()",
    _weight_gradient,
    lambda *args: None,
    lambda out, adds, x, dy, *args, **kwargs: int(2 * x[0] * x[1] * dy[1]),
)
"""Into `out`, tensors of the weights' shapes and any dtype: over what they hold or, where `adds` says so, onto it."""

grouped_sum_op = operator(
    "grouped_sum(Tensor rows, Tensor offsets, ScalarType dtype, str kernels) -> Tensor",
    _sum,
    lambda rows, offsets, dtype, kernels: rows.new_empty(offsets.shape[0] - 1, rows.shape[1], dtype=dtype),
)
"""[e, C] in `dtype`: the sum of each segment's rows."""


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
    _offsets,
    lambda sizes, rows: sizes.new_empty(sizes.shape[0] + 1, dtype=torch.int64),
)
"""[e + 1] int64 on the sizes' device, checked against the number of rows."""
