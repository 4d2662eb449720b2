"""Grouped products of bfloat16 as oneDNN computes them fastest, where the CPU has instructions for them.

oneDNN reads its left operand as it lies if that lies row by row, and brings the right one into an order of its own at
each call. So

    one `bmm`   of neighbours that have as many rows: the calls cost less, and on several threads each has
                experts to itself
    turned      w^T x^T, turned back, where few rows meet a weight whose columns lie in memory as rows: only the rows
                are brought into order
    a^T b       a is turned first, where b is wide and products are made of tiles: they take twice the time to read a
                left operand by its columns

Products of tiles (AMX) cost so little that bringing operands costs as much again; those of vectors (AVX512-BF16) cost
several times as much, so the same forms pay elsewhere: `Pays`.

A kernel is made for each number of rows that was not met before, in milliseconds, so segments are filled up to few
different ones: `level`.

Legend: R rows, e experts, A and B the widths of a GEMM.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trimtab.kernels.pages import Pages

FEW = 128
"""Rows up to which a result may be turned."""
SCARCE = 4
"""Rows an expert below which filling up costs more than it saves."""
TOGETHER, EACH = 1152, 384
"""Rows in all of neighbours that are filled up to the same number, and of each."""
GRAIN = 1 << 15
"""Values below which PyTorch leaves a copy to one thread."""
AT_ONCE = ((4096, 64), (1024, 32))
"""Of so many columns or more, rows that one thread turns at a time: whole, a matrix takes up to twice as long."""


@dataclass(frozen=True)
class Pays:
    """From where a form pays.

    deep: contracted values a row from which turning the result costs less than bringing the weight into order.
    wide: columns of b from which turning a costs less than reading it by its columns; None for never.
    alike: rows in all of experts with as many each, `EACH` at most, that one call may multiply.
    turned: of what number of rows a multiple may be turned: vectors take other numbers of columns at 0.7 of the speed.
    step: rows to which a segment is filled up. Tiles run at 0.7 to 0.9 of the speed with other numbers than of 32,
        vectors as fast with any.
    """

    deep: int
    wide: int | None
    alike: int
    turned: int
    step: int


TILES = Pays(deep=5, wide=512, alike=1152, turned=1, step=32)
VECTORS = Pays(deep=16, wide=None, alike=2304, turned=32, step=8)


def pays() -> Pays:
    """What pays on this CPU."""
    return TILES if torch.cpu._is_amx_tile_supported() else VECTORS


def native() -> bool:
    """Whether this CPU has instructions for products of bfloat16."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def level(counts: Sequence[int]) -> list[int]:
    """Rows of each expert's segment: `counts` filled up to a step, and to the same for neighbours.

    For the sake of few kernels the step of 64 steps or more is a 64th of the next power of two. Neighbours share a
    number if that makes `TOGETHER` rows at most, `EACH` for each, and about a quarter of them are filling at most. An
    expert without rows has none, for its weights would be read. Nothing is filled up where there are few rows an
    expert: their products are short, whatever their shape.

    How far a segment is filled up, and so the order in which its sums are taken, depends on the neighbours.
    """
    if sum(counts) < SCARCE * sum(count > 0 for count in counts):
        return list(counts)
    lengths: list[int] = []
    first = most = real = 0
    step = pays().step
    for i, count in enumerate(counts):
        grain = max(step, 1 << count.bit_length() >> 6)
        own = -(-count // grain) * grain
        n, top, total = i + 1 - first, max(most, own), real + count
        apart = min(own, most) == 0 or top > EACH or n * top > min(TOGETHER, total * 5 // 4 + n * step)
        if i > first and apart:
            lengths += [most] * (i - first)
            first, top, total = i, own, count
        most, real = top, total
    return lengths + [most] * (len(counts) - first)


def rows_times(x_RA: Tensor, w_eAB: Tensor, sizes: Sequence[int], out_RB: Tensor, pages: Pages) -> Tensor:
    """x w for each expert's rows into `out`."""
    form = pays()
    for x, w, y in _products(x_RA, w_eAB, out_RB, sizes):
        rows = x.shape[-2]
        few = rows <= min(x.shape[-1] // form.deep, FEW) and rows % form.turned == 0
        if w.stride(-2) == 1 and few:
            turned = pages.empty(*y.mT.shape, dtype=y.dtype)
            torch.matmul(w.mT, x.mT, out=turned)
            _turn_each(turned, y)
        else:
            torch.matmul(x, w, out=y)
    return out_RB


def weight_gradients(
    a_RA: Tensor, b_RB: Tensor, sizes: Sequence[int], out_eAB: Tensor, pages: Pages, *, add: bool = False
) -> None:  # fmt: skip
    """a^T b of each expert's rows into `out` of their dtype, whatever it held; with `add` on top of it."""
    wide = pays().wide
    for a, out, b in _products(a_RA, out_eAB, b_RB, sizes):
        left = a.mT
        if wide is not None and b.shape[-1] >= wide:
            left = pages.empty(*left.shape, dtype=a.dtype)
            _turn_each(a, left)
        if add:
            (torch.addmm if a.ndim == 2 else torch.baddbmm)(out, left, b, out=out)
        else:
            torch.matmul(left, b, out=out)


def _products(
    x_RA: Tensor, w_eAB: Tensor, y_RB: Tensor, sizes: Sequence[int]
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:  # fmt: skip
    """The operands of each product: one for all neighbours that have as many rows."""
    first = row = 0
    for size, run in itertools.groupby(sizes):
        count = len(list(run))
        e, r = slice(first, first + count), slice(row, row + count * size)
        first, row = e.stop, r.stop
        if count == 1:
            yield x_RA[r], w_eAB[e.start], y_RB[r]
        else:
            yield _apart(x_RA[r], count, size), w_eAB[e], _apart(y_RB[r], count, size)


def _apart(rows_RA: Tensor, count: int, size: int) -> Tensor:
    return rows_RA.view(count, size, rows_RA.shape[1])


def _turn_each(matrices: Tensor, out: Tensor) -> None:
    """The transpose of a matrix or of each of several, into `out`, by all threads."""
    if min(matrices.shape[-2:]) <= FEW:
        out.copy_(matrices.mT)
    elif matrices.ndim == 3:
        for matrix, target in zip(matrices, out, strict=True):
            _turn_each(matrix, target)
    elif torch.get_num_threads() == 1:
        step = next((rows for wide, rows in AT_ONCE if matrices.shape[1] >= wide), len(matrices))
        for part, target in zip(torch.split(matrices, step), torch.split(out, step, 1), strict=True):
            target.copy_(part.t())
    else:
        columns = max(64, -(-GRAIN // max(matrices.shape[1], 1)))
        for part, target in zip(torch.split(matrices, columns), torch.split(out, columns, 1), strict=True):
            target.copy_(part.t())
