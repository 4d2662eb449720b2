"""The expert MLP by grouped products, block by block: what every backend can do that has no kernel of its own for it.

    pre = x[row] W_up^T + b_up                                  saved
    h   = activation(pre) * w
    out = h W_down^T + w b_down                                 one row per kept (row, expert)
    y   = sum of a row's outs

Gathered rows and activations live as long as their block and are made again in the backward; the routing weight's
gradient is sum(activation * dh), without the output rows (SonicMoE, arXiv 2512.14080). Where a backend sums weighted
rows at no cost, the weight is taken there: the same function. Adapters add thin products of their own to each product.
Codes are decoded for a block and again for the next product with it; a block then is one expert, or all of them.

Legend: M rows, R expert rows, e local experts, D model dim, I width of the pre-activations, F expert hidden dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from trimtab.experts.expert_call import cast_weights, joined
from trimtab.experts.operands import Operands, Targets, row_dot
from trimtab.experts.plan import slot_grads, slot_weights
from trimtab.experts.quantized import decoded, packed
from trimtab.kernels.api import Block, put
from trimtab.kernels.compiled import at_once
from trimtab.kernels.rows import combine_rows

TOGETHER, AT_ONCE = 256, 2048
"""Rows in all of the experts that may share a block: the calls between their products cost more than the work. The
second where one call takes all."""


@dataclass
class _Pass:
    """What a pass reads of its operands. multiplies: whether it reads the weights, which later passes may not."""

    o: Operands
    multiplies: bool = True

    def __post_init__(self) -> None:
        o = self.o
        self.kernels, self.plan, self.rows = o.kernels, o.plan, o.plan.row_R.shape[0]
        if o.codes is not None:
            self.up_bias, self.down_bias = (
                b if b is None else b.flatten(1).to(o.x.dtype) for b in (o.up_bias, o.down_bias)
            )
        elif self.multiplies:
            cast = cast_weights(o.up, o.down, o.up_bias, o.down_bias, o.plan, o.x, o.kernels)
            self.up, self.down = (o.by_row(weight) for weight in cast[:2])
            self.up_bias, self.down_bias = cast[2:]
        self.dtype = o.kernels.compute_dtype(o.x.dtype)
        self.direct = self.dtype == o.x.dtype
        self.w_R1 = slot_weights(o.w, o.plan).to(self.dtype)
        self.adapters = [pair.read(o.x.dtype) if pair.rank else None for pair in o.thin or ()] or [None, None]

    def blocks(self) -> Iterator[Block]:
        if self.o.codes is not None:
            return self.kernels.blocks(self.plan.offsets_e, self.rows)
        many = at_once(self.kernels, joined(self.o.up), self.o.down, dtype=self.o.x.dtype)
        return self.kernels.blocks(self.plan.offsets_e, self.rows, AT_ONCE if many else TOGETHER)

    def gather(self, x: Tensor, block: Block) -> Tensor:
        return self.kernels.gather(x, self.plan.row_R[block.rows]).to(self.dtype)

    def rows_of(self, width: int) -> Tensor | None:
        """Where blocks leave what is for all rows; None where there is one block, whose results these are."""
        if self.kernels.whole:
            return None
        return self.kernels.empty_rows(self.rows, width, self.o.x.dtype, self.plan.offsets_e)

    def weight(self, which: int, block: Block) -> Tensor:
        """The block's up, 0, or down, 1, as [e, in, out]."""
        o = self.o
        if o.codes is None:
            return (self.up, self.down)[which][block.experts]
        codes = (joined(o.up), o.down)[which][block.experts]
        wide = codes.new_empty(*codes.shape[:2], codes.shape[2] * packed(o.codes.format), dtype=o.x.dtype)
        if block.sizes != (0,):  # else nobody reads it
            scales = (o.codes.up, o.codes.down)[which][block.experts]
            wide = decoded(codes, scales, o.codes.format, wide.dtype, self.kernels.empty_like(wide))
        return wide.transpose(1, 2)

    def product(
        self, a: Tensor, weight_eAB: Tensor, block: Block, into: Tensor | None, bias: Tensor | None,
        more: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """a times the block's weights, plus its biases and more, in the rows' dtype where `into` is written."""
        y = self.kernels.grouped_mm(a, weight_eAB, block, self._there(into, block))
        for term in (bias, more):
            if term is not None:
                y += term
        if into is not None and not self.direct:
            into[block.rows] = y
        return y

    def _there(self, into: Tensor | None, block: Block) -> Tensor | None:
        return into[block.rows] if into is not None and self.direct else None

    def thin(
        self, a: Tensor, first_eAr: Tensor, scale: float, second_erB: Tensor, block: Block
    ) -> tuple[Tensor, Tensor]:
        """scale * a first, and that times second."""
        dtype = self.o.x.dtype
        first, second = (t[block.experts].to(dtype) for t in (first_eAr, second_erB))
        u = self.kernels.grouped_mm(a, first, block).mul_(scale)
        return u, self.kernels.grouped_mm(u, second, block)

    def expand(self, bias: Tensor | None, block: Block) -> Tensor | None:
        return None if bias is None else self.kernels.expand(bias[block.experts].to(self.dtype), block)


def forward(o: Operands, keep: bool) -> tuple[Tensor, Tensor]:
    """y [M, D], and the pre-activations [R, I], none unless `keep`."""
    p = _Pass(o)
    folded = not (p.direct and o.kernels.weighs_sums)
    out_RD = p.rows_of(o.x.shape[1])
    pre_RI = p.rows_of(o.width) if keep else None
    for block in p.blocks():
        w = p.w_R1[block.rows]
        bias = p.expand(p.up_bias, block)
        x = p.gather(o.x, block)
        more = _adapted(p, 0, x, block, None)
        pre = p.product(x, p.weight(0, block), block, pre_RI, bias, more)
        del x, more
        if keep and pre_RI is None:
            pre_RI = pre
        # The activation sees the bits that its backward will see.
        h = o.activation.forward(pre if p.direct else pre.to(o.x.dtype).to(p.dtype))
        del pre
        bias = p.expand(p.down_bias, block)
        if folded:
            h *= w
            bias = None if bias is None else bias * w
        more = _adapted(p, 1, h, block, None if folded else w)
        out = p.product(h, p.weight(1, block), block, out_RD, bias, more)
        out_RD = out if out_RD is None else out_RD
        del h, out, more
    assert out_RD is not None
    y = combine_rows(out_RD, o.plan.row_csr, None if folded else p.w_R1[:, 0])
    return y, o.x.new_empty(0, o.width) if pre_RI is None else pre_RI


def backward(
    o: Operands, dy: Tensor, pre: Tensor, targets: Targets, need_x: bool, d_pre_RI: Tensor | None
) -> tuple[Tensor | None, Tensor]:
    """dx [M, D] and dw [M, K]. The parameters' gradients go to `targets`, or are left for `weight_gradients`, which
    needs the pre-activations' gradient that is then written into `d_pre_RI`."""
    p = _Pass(o)
    dx_RD = p.rows_of(o.x.shape[1]) if need_x else None
    dw_R = o.w.new_zeros(p.rows)
    for block in p.blocks():
        w, pre_block = p.w_R1[block.rows], pre[block.rows].to(p.dtype)
        d_out = p.gather(dy, block)
        dh = p.kernels.grouped_mm(d_out, p.weight(1, block).transpose(1, 2), block)
        v_down, more = _adapted_back(p, 1, d_out, block)
        if more is not None:
            dh += more
        h = o.activation.forward(pre_block)
        dw_R[block.rows] = row_dot(h, dh)
        bias = p.expand(p.down_bias, block)
        if bias is not None:
            dw_R[block.rows] += row_dot(bias, d_out)
        dh *= w
        if d_pre_RI is None:
            _down_gradients(p, targets, h, w, d_out, block)
        if v_down is not None:
            _pair_gradients(p, 1, h * w, v_down, d_out, block)
        del h, d_out, v_down, more
        d_pre = o.activation.backward(pre_block, dh)
        del pre_block, dh
        if d_pre_RI is None:
            _up_gradients(p, targets, d_pre, block)
        else:
            d_pre_RI[block.rows] = d_pre
        v_up, more = _adapted_back(p, 0, d_pre, block)
        if v_up is not None:
            _pair_gradients(p, 0, p.gather(o.x, block), v_up, d_pre, block)
        if need_x:
            dx = p.product(d_pre, p.weight(0, block).transpose(1, 2), block, dx_RD, None, more)
            dx_RD = dx if dx_RD is None else dx_RD
            del dx
        del d_pre, v_up, more
    d_x = None if dx_RD is None else combine_rows(dx_RD, o.plan.row_csr)
    return d_x, slot_grads(dw_R, o.plan, o.w)


def _adapted(p: _Pass, which: int, rows: Tensor, block: Block, weight: Tensor | None) -> Tensor | None:
    """What an adapter adds to a product; its `u` is kept with the weights that the rows do not have yet."""
    if (thin := p.adapters[which]) is None:
        return None
    u, more = p.thin(rows, thin.a.transpose(1, 2), thin.scale, thin.b.transpose(1, 2), block)
    if thin.u is not None:
        thin.u[block.rows] = u if weight is None else u * weight
    return more


def _adapted_back(p: _Pass, which: int, d_out: Tensor, block: Block) -> tuple[Tensor | None, Tensor | None]:
    """scale d_out b, and what an adapter adds to the gradient of what went into its product."""
    thin = p.adapters[which]
    return (None, None) if thin is None else p.thin(d_out, thin.b, thin.scale, thin.a, block)


def _pair_gradients(p: _Pass, which: int, rows: Tensor, v: Tensor, d_out: Tensor, block: Block) -> None:
    """From what went into a product and what came back for its result; v: scale d_out b."""
    thin = p.adapters[which]
    if thin is None or thin.u is None or thin.d_a is None or thin.d_b is None:
        return
    u = thin.u[block.rows].to(p.dtype)
    p.kernels.grouped_wgrad(v, rows, block, thin.d_a[block.experts])
    p.kernels.grouped_wgrad(u, d_out, block, thin.d_b[block.experts].transpose(1, 2))


def weight_gradients(o: Operands, dy: Tensor, pre: Tensor, d_pre_RI: Tensor, targets: Targets) -> None:
    """The parameters' gradients by the same operations as in the backward, from what it left."""
    p = _Pass(o, multiplies=False)
    for block in p.blocks():
        h = o.activation.forward(pre[block.rows].to(p.dtype))
        _down_gradients(p, targets, h, p.w_R1[block.rows], p.gather(dy, block), block)
        del h
        _up_gradients(p, targets, d_pre_RI[block.rows].to(p.dtype), block)


def _down_gradients(p: _Pass, targets: Targets, h: Tensor, w: Tensor, d_out: Tensor, block: Block) -> None:
    _, down, _, down_bias = targets.each
    if down is not None:
        _weight(p, down, h * w, d_out, block, targets.adds[1])
    if down_bias is not None:
        _bias(p, down_bias, d_out * w, block, targets.adds[3])


def _up_gradients(p: _Pass, targets: Targets, d_pre: Tensor, block: Block) -> None:
    up, _, up_bias, _ = targets.each
    if up is not None:
        _weight(p, up, p.gather(p.o.x, block), d_pre, block, targets.adds[0])
    if up_bias is not None:
        _bias(p, up_bias, d_pre, block, targets.adds[2])


def _weight(p: _Pass, out: Tensor, a: Tensor, b: Tensor, block: Block, add: bool) -> None:
    target = out[block.experts]
    if target.ndim < 4 or target.is_contiguous():
        p.kernels.grouped_wgrad(a, b, block, p.o.by_row(joined(target)), add=add)
        return
    fresh = torch.empty(target.shape, dtype=target.dtype, device=target.device)
    p.kernels.grouped_wgrad(a, b, block, p.o.by_row(joined(fresh)))
    put(target, fresh, add)


def _bias(p: _Pass, out: Tensor, rows: Tensor, block: Block, add: bool) -> None:
    target = out[block.experts]
    put(target, p.kernels.grouped_sum(rows, block).view_as(target), add)
