"""One grouped product as operators of `torch.library`: eager mode, graphs, tensors without values, FLOP counters.

    trimtab::grouped_product              y, and u of an adapter      from rows and the weight's tensors
    trimtab::grouped_product_back         the rows' gradient, and v   from the results'
    trimtab::grouped_product_gradients    the tensors' gradients

weight, form: `GroupedWeight.tensors()` and `form`. Rows behind the last segment may hold anything: their results are
zero, and so are their gradients.

Legend: S rows in segments, e groups, r rank of an adapter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from trimtab.autograd import without_autocast
from trimtab.experts.matrix import blocks_of
from trimtab.experts.product import Product
from trimtab.experts.weight import GroupedWeight, gradient_flops, row_flops
from trimtab.experts.weight_grad import Sink
from trimtab.kernels.api import Block
from trimtab.kernels.choose import kernels_of
from trimtab.operators import operator

READS = "Tensor[] weight, Tensor offsets, Tensor? seed, str form, str kernels"


def blocks(p: Product, rows: int) -> Iterator[Block]:
    """A group each, but all in one where their weights are one tensor that is multiplied at once."""
    low = p.low_precision is not None
    return blocks_of(
        p.kernels, p.offsets_e, rows, p.dtype, p.weight, low_precision=low, together=0, at_once_rows=rows + 1
    )


def run_forward(p: Product, x: Tensor, keep: bool) -> list[Tensor]:
    """y, and with `keep` u of an adapter."""
    rows, lora = x.shape[0], p.weight.lora
    if keep and lora is not None:
        p.u = x.new_zeros(rows, lora.rank)  # also behind the last segment
    y = None if p.low_precision else p.kernels.empty_rows(rows, p.weight.outs, x.dtype, p.offsets_e)
    for block in blocks(p, rows):
        made = p.forward(x[block.rows].to(p.wide), block, y)
        y = made if y is None else y
    assert y is not None
    return [y] if p.u is None else [y, p.u]


def run_back(p: Product, d: Tensor, need_x: bool, need_v: bool) -> list[Tensor]:
    """The rows' gradient if it is needed, then v if it is: scale * d b, of which a's gradient is made."""
    rows, lora = d.shape[0], p.weight.lora
    dx = p.kernels.empty_rows(rows, p.weight.ins, d.dtype, p.offsets_e) if need_x and not p.low_precision else None
    kept = d.new_empty(rows, lora.rank) if need_v and lora is not None else None
    for block in blocks(p, rows):
        own = d[block.rows].to(p.wide)
        v = p.v(own, block)
        if kept is not None and v is not None:
            kept[block.rows] = v
        if need_x:
            made = p.back(own, v, block, dx)
            dx = made if dx is None else dx
    return [t for t in (dx, kept) if t is not None]


def run_gradients(p: Product, x: Tensor | tuple[Tensor, ...] | None, d: Tensor, v: Tensor | None) -> None:
    """Into the sink. x: the rows, or what a recipe kept of them; None where nobody wants what is made of them."""
    for block in blocks(p, d.shape[0]):
        rows = x[block.rows].to(p.wide) if isinstance(x, Tensor) else x
        own = None if v is None else v[block.rows].to(p.wide)
        p.gradients(rows, d[block.rows].to(p.wide), own, block)


def product_of(
    x: Tensor, weight: Sequence[Tensor], offsets: Tensor, seed: Tensor | None, form: str, name: str, low: Any = None
) -> Product:
    """From what all three operators read; low: a recipe's products, which are in no operator."""
    kernels, drawn = kernels_of(name, x.device, x.dtype), None if seed is None else int(seed)
    return Product(GroupedWeight.of(weight, form), kernels, x.dtype, offsets, seed=drawn, low_precision=low)


def _forward(x: Tensor, *reads: Any) -> list[Tensor]:
    *reads, keep = reads  # type: ignore[assignment]
    with without_autocast():
        return run_forward(product_of(x, *reads), x, keep)


def _forward_fake(
    x: Tensor, weight: Sequence[Tensor], offsets: Tensor, seed: Any, form: str, name: str, keep: bool
) -> list[Tensor]:
    of = GroupedWeight.of(weight, form)
    y = x.new_empty(x.shape[0], of.outs)
    return [y, x.new_empty(x.shape[0], of.lora.rank)] if keep and of.lora is not None else [y]


def _back(d: Tensor, *reads: Any) -> list[Tensor]:
    *reads, need_x, need_v = reads  # type: ignore[assignment]
    with without_autocast():
        return run_back(product_of(d, *reads), d, need_x, need_v)


def _back_fake(
    d: Tensor, weight: Sequence[Tensor], offsets: Tensor, seed: Any, form: str, name: str, need_x: bool, need_v: bool
) -> list[Tensor]:
    of = GroupedWeight.of(weight, form)
    dx = [d.new_empty(d.shape[0], of.ins)] if need_x else []
    return [*dx, d.new_empty(d.shape[0], of.lora.rank)] if need_v and of.lora is not None else dx


def _gradients(
    out: Sequence[Tensor], wanted: Sequence[bool], adds: Sequence[bool], x: Tensor | None, d: Tensor,
    u: Tensor | None, v: Tensor | None, *reads: Any,
) -> None:  # fmt: skip
    p = product_of(d, *reads)
    p.u, p.sink = u, Sink(wanted)
    p.sink.fill(out, adds)
    with without_autocast():
        run_gradients(p, x, d, v)


def _forward_flops(x: Any, weight: Any, offsets: Any, seed: Any, form: str, *rest: Any, **kwargs: Any) -> int:
    return 2 * int(x[0]) * sum(row_flops(weight, form))


def _back_flops(
    d: Any, weight: Any, offsets: Any, seed: Any, form: str, name: Any, need_x: bool, need_v: bool, **kwargs: Any
) -> int:
    own, a, b = row_flops(weight, form)
    return 2 * int(d[0]) * ((own + a) * need_x + b * (need_x or need_v))


def _gradients_flops(
    out: Any, wanted: Sequence[bool], adds: Any, x: Any, d: Any, u: Any, v: Any, weight: Any, offsets: Any, seed: Any,
    form: str, *rest: Any, **kwargs: Any,
) -> int:  # fmt: skip
    return 2 * int(d[0]) * gradient_flops(weight, form, wanted)


product_op = operator(
    f"grouped_product(Tensor x, {READS}, bool keep) -> Tensor[]", _forward, _forward_fake, _forward_flops
)
"""y [S, out] in x's dtype; with `keep` also scale * dropout(x) a^T [S, r] of an adapter."""

product_back_op = operator(
    f"grouped_product_back(Tensor d, {READS}, bool need_x, bool need_v) -> Tensor[]", _back, _back_fake, _back_flops
)
"""dx [S, in] where `need_x`, then v [S, r] where `need_v`: scale * d b, of an adapter."""

product_gradients_op = operator(
    f"grouped_product_gradients(Tensor(a!)[] out, bool[] wanted, bool[] adds, Tensor? x, Tensor d, Tensor? u, "
    f"Tensor? v, {READS}) -> ()",
    _gradients, lambda *args: None, _gradients_flops,
)  # fmt: skip
"""Into `out`, which has an entry for each tensor that is wanted, of its shape and any dtype: over what it holds or,
where `adds` says so, onto it. Of the weights only shapes are read, which FSDP2 leaves when it takes their memory."""
