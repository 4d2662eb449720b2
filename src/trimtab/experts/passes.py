"""The expert MLP's two products in one loop over blocks: what every backend can do that has no kernel of its own.

    pre = x[row] W_up^T + b_up                                  saved
    h   = activation(pre) * w
    out = h W_down^T + w b_down                                 one row per kept (row, expert)
    y   = sum of a row's outs

Gathered rows and activations live as long as their block and are made again in the backward; the routing weight's
gradient is sum(activation * dh), without the output rows (SonicMoE, arXiv 2512.14080). Where a backend sums weighted
rows at no cost, the weight is taken there: the same function. What a weight is made of is for `product` to know.

A module of kernels of a backend's own has `covers(p)` and these three functions: `on_cpu`, `on_triton`.

Legend: M rows, K slots per row, R expert rows, D model dim, I width of the pre-activations, F expert hidden dim, r an
adapter's rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from trimtab.experts.activations import Activation, activation_of
from trimtab.experts.matrix import blocks_of, row_dot
from trimtab.experts.plan import ExpertPlan, slot_grads, slot_weights
from trimtab.experts.product import Product
from trimtab.experts.weight import GroupedWeight
from trimtab.experts.weight_grad import Sink
from trimtab.kernels.api import Backend, Block
from trimtab.kernels.rows import combine_rows, gather_padded


@dataclass(slots=True, eq=False)
class Pass:
    """What a pass reads and where it writes.

    x: [M, D] in the dtype that is computed in. w: [M, K] in float32 or wider. up, down: in the model's dtype, `filled`.
    word: the activation's. seed: [] int64, of dropout's masks. low_precision: a recipe's products with up and with
    down; the plan's segments are aligned for them. waits: see `Product`. The pairs are of up and of down:

    u: see `Product.u`. v: [R, r] scale * d b, where gradients come later. sinks: where gradients go.
    """

    x: Tensor
    w: Tensor
    up: GroupedWeight
    down: GroupedWeight
    word: str
    plan: ExpertPlan
    kernels: Backend
    seed: Tensor | None = None
    low_precision: tuple[Any, Any] | None = None
    u: Sequence[Tensor | None] = (None, None)
    v: Sequence[Tensor | None] = (None, None)
    sinks: tuple[Sink | None, Sink | None] = (None, None)
    waits: list[Callable[[], None]] | None = None
    up_product: Product = field(init=False)
    down_product: Product = field(init=False)
    w_R1: Tensor = field(init=False)
    fused: Any = field(init=False, default=None)
    """Kernels that weigh and activate in one launch, where they know how."""

    @property
    def activation(self) -> Activation:
        return activation_of(self.word)

    def keep_u(self) -> list[Tensor]:
        """Memory for u, and that which there is."""
        rows, both = self.plan.row_R.shape[0], (self.up.lora, self.down.lora)
        self.u = [None if lora is None else self.x.new_zeros(rows, lora.rank) for lora in both]
        return [u for u in self.u if u is not None]

    def placed(self, thin: Sequence[Tensor]) -> list[Tensor | None]:
        """u, or v, of those that there are."""
        rest = iter(thin)
        return [None if weight.lora is None else next(rest) for weight in (self.up, self.down)]

    def wants(self, wanted: Sequence[bool]) -> None:
        """Say which gradients are asked for, of up's tensors and then of down's."""
        count = len(self.up.tensors())
        self.sinks = Sink(wanted[:count]), Sink(wanted[count:])

    def write_to(self, out: Iterable[Tensor], wanted: Sequence[bool], adds: Iterable[bool]) -> None:
        """Take where they go from the lists that operators take."""
        if self.sinks == (None, None):
            self.wants(wanted)
        buffers, flags = iter(out), iter(adds)
        for sink in self.sinks:
            assert sink is not None
            sink.fill(buffers, flags)

    def begin(self) -> tuple[Product, Product, bool]:
        """The two products, and whether hidden rows are weighted: else sums of rows are."""
        low, dtype = self.low_precision or (None, None), self.x.dtype
        each = {"kernels": self.kernels, "dtype": dtype, "offsets_e": self.plan.offsets_e, "waits": self.waits}
        seed = None if self.seed is None else int(self.seed)
        other = None if seed is None else seed ^ (1 << 61)
        up = Product(self.up, u=self.u[0], seed=seed, sink=self.sinks[0], low_precision=low[0], **each)  # type: ignore[arg-type]
        if low[0] is None and up.direct and self.w.dtype is torch.float32:
            self.fused = self.kernels if self.word in getattr(self.kernels, "words", ()) else None
        w_R1 = None
        if self.fused is None or self.down.biases:
            w_R1 = slot_weights(self.w, self.plan, low[0] is not None)
            if low[0] is not None or w_R1.device.type == "cpu":
                w_R1 = w_R1.to(up.wide)
            self.w_R1 = w_R1
        folded = low[0] is not None or not (up.direct and self.kernels.weighs_sums)
        down = Product(
            self.down, w_R1=w_R1, weighted=folded, u=self.u[1], seed=other, sink=self.sinks[1], low_precision=low[1],
            **each,  # type: ignore[arg-type]
        )  # fmt: skip
        self.up_product, self.down_product = up, down
        return up, down, folded

    def blocks(self) -> Iterator[Block]:
        rows, low = self.plan.row_R.shape[0], self.low_precision is not None
        blocks = blocks_of(self.kernels, self.plan.offsets_e, rows, self.x.dtype, self.up, self.down, low_precision=low)
        return blocks if low or not self.kernels.whole else (replace(block, tail=False) for block in blocks)

    def gather(self, x: Tensor, block: Block) -> Tensor:
        index_R = self.plan.row_R[block.rows]
        if self.low_precision is not None:
            return getattr(self.kernels, "gather_padded", gather_padded)(x, index_R)
        return self.kernels.gather(x, index_R).to(self.up_product.wide)

    def rows_of(self, width: int) -> Tensor | None:
        """Where blocks leave what is for all rows; None where there is one block, whose results these are."""
        if self.kernels.whole or self.low_precision is not None:
            return None
        return self.kernels.empty_rows(self.plan.row_R.shape[0], width, self.x.dtype, self.plan.offsets_e)


def forward(p: Pass, keep: bool) -> tuple[Tensor, Tensor | None]:
    """y [M, D], and with `keep` the pre-activations [R, I]."""
    up, down, folded = p.begin()
    out_RD, pre_RI = p.rows_of(p.x.shape[1]), p.rows_of(p.up.outs) if keep else None
    for block in p.blocks():
        x = p.gather(p.x, block)
        pre = up.forward(x, block, pre_RI)
        del x
        if keep and pre_RI is None:
            pre_RI = pre
        if p.fused:
            h = p.fused.activate(p.word, pre, p.w, p.plan.slot_R)
        else:  # the activation sees the bits that its backward will see
            h = p.activation.forward(pre if up.direct else pre.to(p.x.dtype).to(up.wide))
            if folded:
                h *= p.w_R1[block.rows]
        del pre
        out = down.forward(h, block, out_RD)
        out_RD = out if out_RD is None else out_RD
        del h, out
    assert out_RD is not None
    y = getattr(p.kernels, "combine", combine_rows)(out_RD, p.plan.row_csr, None if folded else p.w_R1[:, 0])
    return y, pre_RI


def backward(p: Pass, dy: Tensor, pre: Tensor, need_x: bool, d_pre_RI: Tensor | None) -> tuple[Tensor | None, Tensor]:
    """dx [M, D] and dw [M, K]. The tensors' gradients go to `p.sinks`, or are left for `gradients`, which needs the
    pre-activations' gradient that is then written into `d_pre_RI`, and `p.v`."""
    up, down, _ = p.begin()
    dx_RD = p.rows_of(p.x.shape[1]) if need_x else None
    dw, dw_R = None, None if p.kernels.whole else p.w.new_zeros(p.plan.row_R.shape[0])
    for block in p.blocks():
        pre_block = pre[block.rows].to(up.wide)
        d_out = p.gather(dy, block)
        v = down.v(d_out, block)
        dh = down.back(d_out, v, block)
        of_bias, now = down.bias_dot(d_out, block), down.trains and d_pre_RI is None
        if p.fused:
            d_pre, dh, dw = p.fused.activate_backward(p.word, pre_block, dh, p.w, p.plan.slot_R, of_bias, now)
            hw = dh  # in whose place it comes
        else:
            w, h = p.w_R1[block.rows], p.activation.forward(pre_block)
            d_w = row_dot(h, dh).to(p.w.dtype)
            if of_bias is not None:
                d_w += of_bias
            if dw_R is None:
                dw_R = d_w
            else:
                dw_R[block.rows] = d_w
            dh *= w
            hw = h.mul_(w) if now else None
            del h
        if d_pre_RI is not None:
            _keep(p.v[1], v, block)
        elif now:
            down.gradients(hw, d_out, v, block)
        del hw, d_out, v
        if not p.fused:
            d_pre = p.activation.backward(pre_block, dh)
        del pre_block, dh
        v = up.v(d_pre, block) if need_x or up.trains or d_pre_RI is not None else None
        if d_pre_RI is not None:
            d_pre_RI[block.rows] = d_pre
            _keep(p.v[0], v, block)
        elif up.trains and up.low_precision is None:  # before dx, which is as large as the gathered rows
            up.gradients(p.gather(p.x, block), d_pre, v, block)
        if need_x:
            dx = up.back(d_pre, v, block, dx_RD)
            dx_RD = dx if dx_RD is None else dx_RD
            del dx
        if up.trains and up.low_precision is not None:  # behind dx: some recipes draw numbers, in this order
            up.gradients(p.gather(p.x, block), d_pre, v, block)
        del d_pre, v
    combine = getattr(p.kernels, "combine", combine_rows)
    d_x = None if dx_RD is None else combine(dx_RD, p.plan.row_csr)
    if dw is None:
        assert dw_R is not None
        dw = slot_grads(dw_R, p.plan, p.w)
    return d_x, dw


def _keep(there: Tensor | None, v: Tensor | None, block: Block) -> None:
    if there is not None and v is not None:
        there[block.rows] = v


def gradients(p: Pass, dy: Tensor, pre: Tensor, d_pre_RI: Tensor) -> None:
    """The tensors' gradients by the same operations as in the backward, from what it left. Of the weights only shapes
    are read, which FSDP2 leaves when it takes their memory."""
    up, down, _ = p.begin()
    v_up, v_down = p.v
    for block in p.blocks():
        if down.trains:
            if p.fused:
                hw = p.fused.activate(p.word, pre, p.w, p.plan.slot_R)
            else:
                hw = p.activation.forward(pre[block.rows].to(up.wide)).mul_(p.w_R1[block.rows])
            v = None if v_down is None else v_down[block.rows].to(up.wide)
            down.gradients(hw, p.gather(dy, block), v, block)
            del hw
        if up.trains:
            v = None if v_up is None else v_up[block.rows].to(up.wide)
            up.gradients(p.gather(p.x, block), d_pre_RI[block.rows].to(up.wide), v, block)
