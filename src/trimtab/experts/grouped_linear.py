"""The grouped linear map as a function, and the three operators that it and its gradients are made of.

    trimtab::grouped_linear              y[segment i]  = x[segment i] W_i^T + b_i     zero behind the last segment
    trimtab::grouped_linear (the other)  dx[segment i] = dy[segment i] W_i            the same, W_i turned
    trimtab::grouped_weight_gradient_    dW_i  = dy[segment i]^T x[segment i]         written, or added
    trimtab::grouped_sum                 db_i  = sum of dy[segment i]

Legend: S rows in segments, e groups, A in features, B out features, C either width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function

from trimtab.backward import forward_of, needed, once_differentiable, without_autocast
from trimtab.experts.library import kernels_of, name_of
from trimtab.kernels.api import Backend, put
from trimtab.kernels.compiled import at_once
from trimtab.operators import operator


def grouped_linear(
    x_SA: Tensor,
    weight: Tensor,
    offsets_e: Tensor,
    bias: Tensor | None = None,
    *,
    transposed: bool = False,
    kernels: Backend | str = "auto",
) -> Tensor:
    """x W_i^T + b_i, i the group of the row: [S, B] in the weight's dtype. Differentiable in x, weight and bias, once.

    Every gradient has its tensor's full shape, zeros for a group without rows. Rows from offsets_e[-1] on may hold
    anything: their output is zero and so is their gradient. S may be 0. Autocast is not heeded.

    Args:
        x_SA: rows, the groups' one after the other, in the weight's dtype.
        weight: [e, B, A]; with `transposed` [e, A, B].
        offsets_e: [e + 1] int64 on x's device, the start of each group's segment and the end of the last. Not read on
            the host but by kernels that run on the CPU, and by torch for other dtypes than bfloat16.
        bias: [e, B], in the weight's dtype.
        transposed: how the weight lies.
        kernels: those of a `KernelChoice`, or their names joined by commas, which `torch.compile` can trace.
    """
    biases = () if bias is None else (bias,)
    return linear_of(x_SA, (weight,), biases, offsets_e, stacked=True, transposed=transposed, kernels=kernels)


def linear_of(
    x_SA: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    offsets_e: Tensor,
    *,
    stacked: bool,
    transposed: bool = False,
    kernels: Backend | str,
) -> Tensor:
    """`grouped_linear` in x's dtype, whatever the parameters': gradients are in their own.

    Args:
        weights, biases: one of each and all groups' where `stacked`, else one per group; no biases at all are fine.
    """
    name = kernels if isinstance(kernels, str) else name_of(kernels)
    with without_autocast():
        y: Tensor = forward_of(
            _GroupedLinear,
            x_SA.contiguous(),
            offsets_e,
            len(weights),
            stacked,
            transposed,
            name,
            kernels,
            *weights,
            *biases,
        )
    return y


class _GroupedLinear(Function):
    """What is saved is the parameters, not their copies in x's dtype: others may want the memory (FSDP2)."""

    @staticmethod
    def forward(
        ctx: Any,
        x_SA: Tensor,
        offsets_e: Tensor,
        count: int,
        stacked: bool,
        transposed: bool,
        name: str,
        kernels: Backend | str,
        *params: Tensor,
    ) -> Tensor:
        trained = any(ctx.needs_input_grad[7 : 7 + count])
        ctx.save_for_backward(x_SA if trained else None, offsets_e, *params)
        ctx.count, ctx.options = count, (stacked, transposed, name)
        ctx.kernels = kernels  # their name stands for them as long as they live
        weights, biases = (_cast(part, x_SA.dtype) for part in (params[:count], params[count:]))
        y: Tensor = grouped_linear_op(x_SA, weights, biases, offsets_e, *ctx.options)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x_SA, offsets_e, *params = ctx.saved_tensors
        (stacked, transposed, name), count = ctx.options, ctx.count
        need_x, *needs = (need for i, need in enumerate(needed(ctx)) if i == 0 or i > 6)
        weights, dy_SB, dx = params[:count], dy.contiguous(), None
        grads: list[Tensor | None] = [None] * len(params)
        if need_x:
            dx = grouped_linear_op(dy_SB, _cast(weights, dy.dtype), [], offsets_e, stacked, not transposed, name)
        if any(needs[:count]):
            dw = [torch.empty_like(w) for w in weights]
            weight_gradient_op(dw, [False] * count, x_SA, dy_SB, offsets_e, stacked, transposed, name)
            grads[:count] = dw
        if any(needs[count:]):
            grads[count:] = segment_sums(dy_SB, offsets_e, params[-1].dtype, stacked, name)
        return dx, *(None for _ in range(6)), *(g if need else None for g, need in zip(grads, needs, strict=True))


def _cast(params: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    return [p if p.dtype == dtype else p.to(dtype) for p in params]


def segment_sums(dy_SB: Tensor, offsets_e: Tensor, dtype: torch.dtype, stacked: bool, name: str) -> list[Tensor]:
    """What biases get of the rows: one [e, B], or e of [B], in `dtype`."""
    db_eB = grouped_sum_op(dy_SB, offsets_e, dtype, name)
    return [db_eB] if stacked else [db_B.clone() for db_B in db_eB.unbind()]


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
