"""One weight in one pass over blocks of rows: its product, the way back, and its tensors' gradients.

    forward    y  = x W + b + u b^T         u = scale * dropout(x) a^T, kept for the backward
    back       dx = d W^T + dropout^T(v a)  v = scale * d b
    gradients  dW = x^T d, db = sum d, da = v^T dropout(x), db^T = u^T d

Weights are cast, decoded or stacked here and nowhere else. Under a recipe W's products are those of `low_precision`.

Legend: R rows of all groups, n rows of a block, e groups, r rank of an adapter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from trimtab.errors import BackendError
from trimtab.experts.matrix import by_row, cast, joined, row_dot, with_rows
from trimtab.experts.quantized import FORMATS, decoded
from trimtab.experts.weight import GroupedWeight, LoraFactors
from trimtab.experts.weight_grad import Sink
from trimtab.kernels.api import Backend, Block, put, put_each

Rows = Tensor | tuple[Tensor, ...] | None


@dataclass(slots=True, eq=False)
class Product:
    """Of one weight in one pass.

    Args:
        weight: its factors, if it has some, of each group, see `weight.filled`.
        kernels: what multiplies.
        dtype: of the rows that are kept and of results; blocks are computed in `kernels.compute_dtype` of it.
        offsets_e: [e + 1] of the rows' segments.
        w_R1: routing weights of the results' rows: their biases are weighted, and so are rows in gradients.
        weighted: whether rows that go in have these weights already.
        u: [R, r] scale * dropout(x) a^T with the rows' weights: written in the forward, read in gradients; or None.
        seed: of dropout's masks, which are those of (seed, first row of the block) in every pass.
        sink: where gradients go.
        low_precision: a recipe's `LowPrecisionProducts`, or None.
        waits: takes the gradients' products, whose operands are encoded now, where they are made later.
    """

    weight: GroupedWeight
    kernels: Backend
    dtype: torch.dtype
    offsets_e: Tensor
    w_R1: Tensor | None = None
    weighted: bool = True
    u: Tensor | None = None
    seed: int | None = None
    sink: Sink | None = None
    low_precision: Any = None
    waits: list[Callable[[], None]] | None = None
    wide: torch.dtype = field(init=False)
    direct: bool = field(init=False)
    _cast: Tensor | None = field(init=False, default=None)
    _lora: tuple[Tensor, Tensor] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.wide = self.dtype if self.low_precision else self.kernels.compute_dtype(self.dtype)
        self.direct = self.wide == self.dtype

    def matrix(self, block: Block) -> Tensor:
        """The block's weights as [n, in, out], in the rows' dtype."""
        weight = self.weight
        if weight.format:
            return self._decoded(block).transpose(1, 2)
        if weight.stacked:
            if self._cast is None:
                value, runs = joined(weight.values[0]), None
                if value.dtype != self.dtype and not self.low_precision:
                    runs = with_rows(self.offsets_e)
                self._cast = by_row(cast(value, self.dtype, self.kernels, runs), weight.transposed)
            return self._cast[block.experts]
        each = weight.values[block.experts]
        value = each[0][None] if len(each) == 1 else torch.stack(each)
        return by_row(value.to(self.dtype), weight.transposed)

    def forward(self, rows: Tensor, block: Block, into: Tensor | None = None) -> Tensor:
        """A block's products, biases and adapters added, in the rows' dtype; in `into` [R, out] if it is given."""
        w, low, biased = None if self.w_R1 is None else self.w_R1[block.rows], self.low_precision, self.weight.biases
        more = self._adapted(rows, block, w)
        if low is not None:  # which adds what is not weighted before it rounds
            inside = biased and w is None
            y = low.forward(rows, self.matrix(block), self._biases(block) if inside else None)
            biased = () if inside else biased
        else:
            y = self.kernels.grouped_mm(rows, self.matrix(block), block, self._there(into, block))
        if biased:
            bias = self._bias(block)
            y += bias if w is None or not self.weighted else bias * w
        return self._ended(y, more, block, into)

    def v(self, d: Tensor, block: Block) -> Tensor | None:
        """scale * d b, None without an adapter."""
        lora = self.weight.lora
        return None if lora is None else self._thin(d, self._factors()[1], block).mul_(lora.scale)

    def back(self, d: Tensor, v: Tensor | None, block: Block, into: Tensor | None = None) -> Tensor:
        """The gradient of a block's rows, of the results' gradient `d` and of `v`."""
        lora, low, more = self.weight.lora, self.low_precision, None
        if lora is not None and v is not None:
            more = self._dropped(self._thin(v, self._factors()[0], block), lora, block)
        matrix = self.matrix(block)
        if low is not None:
            return self._ended(low.dgrad(d, matrix), more, block, into)
        dx = self.kernels.grouped_mm(d, matrix.transpose(1, 2), block, self._there(into, block))
        return self._ended(dx, more, block, into)

    def bias_dot(self, d: Tensor, block: Block) -> Tensor | None:
        """What a bias gives to the gradient of the routing weights: [n], or None."""
        return row_dot(self._bias(block), d) if self.weight.biases else None

    @property
    def trains(self) -> bool:
        """Whether a gradient is wanted of any of the weight's tensors."""
        return self.sink is not None and any(self.sink.wanted)

    def gradients(self, rows: Rows, d: Tensor, v: Tensor | None, block: Block) -> None:
        """Of all that the sink wants, from a block's rows, weighted, and the results' gradient `d`, not weighted.

        Under a recipe operands are encoded now, also where `waits` takes their product: scales belong to this step.
        rows: also what a recipe kept of them; None where nothing that is wanted is made of them.
        """
        sink, weight = self.sink, self.weight
        if sink is None or not any(sink.wanted):
            return
        values, biases = len(weight.values), len(weight.biases)
        jobs: list[Callable[[], None]] = []
        if any(sink.wanted[:values]):
            low = self.low_precision
            if low is None:
                assert isinstance(rows, Tensor)
                jobs.append(partial(self._write_values, sink, rows, d, block))
            else:
                kept = low.keep(rows, "activation") if isinstance(rows, Tensor) else rows
                assert kept is not None
                jobs.append(partial(self._write_low, sink, low, kept, low.keep(d, "gradient")))
        if any(sink.wanted[values : values + biases]):
            wide = torch.promote_types(d.dtype, torch.float32)  # weights may be float64 beside narrower rows
            weighted = d if self.w_R1 is None else d * self.w_R1[block.rows].to(wide)
            jobs.append(partial(self._write_biases, sink, weighted, block))
        if weight.lora is not None and any(sink.wanted[-2:]):
            jobs.append(partial(self._write_factors, sink, rows, d, v, block))
        if self.waits is None:
            while jobs:
                jobs.pop(0)()
        else:
            self.waits += jobs

    def _write_values(self, sink: Sink, rows: Tensor, d: Tensor, block: Block) -> None:
        weight, into, adds, groups = self.weight, sink.into, sink.adds, block.experts
        if weight.stacked:
            out = into[0]
            assert out is not None
            target = out[groups]
            if target.ndim < 4 or target.is_contiguous():
                there = by_row(joined(target), weight.transposed)
                self.kernels.grouped_wgrad(rows, d, block, there, add=adds[0])
                return
            fresh = torch.empty(target.shape, dtype=target.dtype, device=target.device)
            self.kernels.grouped_wgrad(rows, d, block, by_row(joined(fresh), weight.transposed))
            put(target, fresh, adds[0])
            return
        targets = into[groups]
        if len(targets) == 1:
            if targets[0] is not None:
                there = by_row(targets[0][None], weight.transposed)
                self.kernels.grouped_wgrad(rows, d, block, there, add=adds[groups][0])
            return
        like = next((t for t in targets if t is not None), None)
        if like is None:
            return
        fresh = like.new_empty(len(targets), *like.shape)
        self.kernels.grouped_wgrad(rows, d, block, by_row(fresh, weight.transposed))
        put_each(targets, fresh.unbind(), adds[groups])

    def _write_low(self, sink: Sink, low: Any, rows: tuple[Tensor, ...], d: tuple[Tensor, ...]) -> None:
        """Into buffers, which may be in no memory that can be viewed as [e, out, in]."""
        values = self.weight.values
        into, adds = sink.into[: len(values)], sink.adds[: len(values)]
        own = [t is not None and (t.ndim < 4 or t.is_contiguous()) for t in into]
        made = [
            target if target is not None and here else torch.empty_like(value).contiguous()
            for target, value, here in zip(into, values, own, strict=True)
        ]
        flags = [add and here for add, here in zip(adds, own, strict=True)]
        low.wgrad(rows, d, [joined(m) for m in made], flags, self.weight.stacked)
        put_each([None if here else target for target, here in zip(into, own, strict=True)], made, adds)

    def _write_biases(self, sink: Sink, d: Tensor, block: Block) -> None:
        first, count = len(self.weight.values), len(self.weight.biases)
        into, adds = sink.into[first : first + count], sink.adds[first : first + count]
        sums = self.kernels.grouped_sum(d.to(self.kernels.compute_dtype(d.dtype)), block)
        if self.biases_stacked:
            target = into[0]
            assert target is not None
            put(target[block.experts], sums.view_as(target[block.experts]), adds[0])
        else:
            put_each(into[block.experts], sums.unbind(), adds[block.experts])

    @property
    def biases_stacked(self) -> bool:
        return len(self.weight.biases) == 1 and self.weight.biases[0].ndim > 1

    def _write_factors(self, sink: Sink, rows: Rows, d: Tensor, v: Tensor | None, block: Block) -> None:
        """Each by itself: one of the two may be frozen."""
        lora, (d_a, d_b) = self.weight.lora, sink.into[-2:]
        assert lora is not None
        if d_a is not None:
            assert v is not None
            assert isinstance(rows, Tensor)
            dropped = self._dropped(rows, lora, block)
            self.kernels.grouped_wgrad(v, dropped, block, d_a[block.experts], add=sink.adds[-2])
        if d_b is not None:
            assert self.u is not None
            u = self.u[block.rows].to(self.wide)
            self.kernels.grouped_wgrad(u, d, block, d_b[block.experts].transpose(1, 2), add=sink.adds[-1])

    def _there(self, into: Tensor | None, block: Block) -> Tensor | None:
        return into[block.rows] if into is not None and self.direct else None

    def _ended(self, y: Tensor, more: Tensor | None, block: Block, into: Tensor | None) -> Tensor:
        if more is not None:
            y += more
        if into is not None and (not self.direct or self.low_precision is not None):
            into[block.rows] = y
        return y

    def _adapted(self, rows: Tensor, block: Block, w: Tensor | None) -> Tensor | None:
        """What an adapter adds to a product; its `u` is kept with the weights that the rows may not have yet."""
        lora = self.weight.lora
        if lora is None:
            return None
        a, b = self._factors()
        u = self._thin(self._dropped(rows, lora, block), a.transpose(1, 2), block).mul_(lora.scale)
        if self.u is not None:
            self.u[block.rows] = u if self.weighted or w is None else u * w
        return self._thin(u, b.transpose(1, 2), block)

    def _factors(self) -> tuple[Tensor, Tensor]:
        """As they are multiplied."""
        if self._lora is None:
            assert self.weight.lora is not None
            a, b = (t.to(self.dtype).contiguous() for t in (self.weight.lora.a, self.weight.lora.b))
            self._lora = a, b
        return self._lora

    def _thin(self, rows: Tensor, factor_eAB: Tensor, block: Block) -> Tensor:
        return self.kernels.grouped_mm(rows, factor_eAB[block.experts], block)

    def _dropped(self, rows: Tensor, lora: LoraFactors, block: Block) -> Tensor:
        """Dropout's mask, the same in each pass, on rows or on their gradient."""
        if not lora.dropout:
            return rows
        assert self.seed is not None
        if rows.is_cuda and torch.cuda.is_current_stream_capturing():
            raise BackendError(
                "dropout in adapters cannot be captured in a CUDA graph: every replay would drop the same values. Set "
                "dropout=0 or call eval()", phase="experts",
            )  # fmt: skip
        generator = torch.Generator(rows.device).manual_seed(self.seed + block.rows.start)
        keep = torch.rand(rows.shape, generator=generator, device=rows.device, dtype=torch.float32) >= lora.dropout
        return rows * (keep / (1 - lora.dropout) if lora.dropout < 1 else keep).to(rows.dtype)

    def _biases(self, block: Block) -> Tensor:
        """[n, out] of the block's groups, in the rows' dtype."""
        biases = self.weight.biases
        found = biases[0][block.experts].flatten(1) if self.biases_stacked else torch.stack(biases[block.experts])
        return found.to(self.dtype)

    def _bias(self, block: Block) -> Tensor:
        """Broadcastable to the block's rows."""
        return self.kernels.expand(self._biases(block).to(self.wide), block)

    def _decoded(self, block: Block) -> Tensor:
        weight, scales = self.weight, self.weight.scales
        assert scales is not None
        codes = joined(weight.values[0])[block.experts]
        wide = codes.new_empty(FORMATS[weight.format].shape_of(codes), dtype=self.dtype)
        if block.sizes == (0,):  # nobody reads it
            return wide
        return decoded(codes, joined(scales)[block.experts], weight.format, self.dtype, self.kernels.empty_like(wide))
