"""The GEMMs in Triton's interpreter, against float64: every dtype, the tiles that ship, weights with gaps, addresses
beyond 2^31 elements. Run by test_interpreted.py as interpreted.py is. Prints a line for each part.

Rows behind the last segment, gaps and results hold NaN before; what must be left holds 7.

Legend: R rows of all segments, n rows of a source, e experts, A and B widths, D model dim, F hidden dim.
"""

from __future__ import annotations

import itertools
import math
import mmap
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from helpers.comparing import assert_close
from trimtab.kernels.rows import Csr
from trimtab.kernels.triton import glue, moves, products, swiglu
from trimtab.kernels.triton.language import CDNA, TILES, Gemms, Launch, Tiles

BOUNDS = {torch.float32: 3e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}
SIZES = ([0], [0, 0, 0], [1], [130], [0, 1, 130, 0, 5], [127, 129, 0], [3, 0, 17, 1, 0])
WIDTHS = ((16, 16), (40, 36), (96, 80), (33, 17), (65, 300))
SETS = [tiles for _, tiles in TILES] + [CDNA]
TAIL, NAN = 5, torch.nan


def gemms_of(tiles: Tiles) -> Gemms:
    return Gemms(**{f.name: tiles for f in fields(Gemms)})


def launch_of(dtype: torch.dtype, gemms: Gemms) -> Launch:
    """On a few programs, so that each takes several tiles."""
    return Launch(programs=3, wide=dtype == torch.bfloat16, gemms=gemms)


SMALL = gemms_of(Tiles(m=32, n=32, k=32, warps=1, stages=1))


def sample(count: int, *axes: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    """Some of all combinations, the same each time."""
    drawn = random.Random(7)
    for _ in range(count):
        yield tuple(drawn.choice(axis) for axis in axes)


def randn(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def with_tail(rows: Tensor, value: float = NAN) -> Tensor:
    return torch.cat((rows, rows.new_full((TAIL, *rows.shape[1:]), value)))


def segments(sizes: Sequence[int]) -> tuple[Tensor, list[slice]]:
    cuts = [0, *itertools.accumulate(sizes)]
    return torch.tensor(cuts), [slice(*cut) for cut in itertools.pairwise(cuts)]


def laid(w_eAB: Tensor, layout: str) -> Tensor:
    """The same values elsewhere."""
    if layout == "turned":
        return w_eAB.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "with gaps":
        e, a, b = w_eAB.shape
        base = torch.full((e, a + 3, b + 5), NAN, dtype=w_eAB.dtype)
        base[:, :a, :b] = w_eAB
        return base[:, :a, :b]
    return w_eAB


def grouped_rows(dtype: torch.dtype, gemms: Gemms, sizes: list[int], widths: Any, layout: str, weighted: bool) -> None:
    (A, B), R, (offsets, cut) = widths, sum(sizes), segments(sizes)
    x, w = with_tail(randn(R, A, dtype=dtype, seed=1)), randn(len(sizes), A, B, dtype=dtype, seed=2)
    scale = with_tail(torch.rand(R, generator=torch.Generator().manual_seed(3)))
    out = torch.full((R + TAIL, B), 7.0, dtype=dtype)
    products.grouped_rows(
        x, laid(w, layout), offsets, out, launch_of(dtype, gemms), scale_R=scale if weighted else None,
        zero_tail=not weighted,
    )  # fmt: skip
    wanted = torch.full((R + TAIL, B), 7.0 if weighted else 0.0, dtype=torch.float64)
    for e, r in enumerate(cut):
        wanted[r] = x[r].double() @ w[e].double() * (scale[r, None].double() if weighted else 1)
    assert_close(out, wanted, BOUNDS[dtype], f"rows {dtype} {sizes} {widths} {layout} weighted={weighted}")


def weight_grad(dtype: torch.dtype, gemms: Gemms, sizes: list[int], widths: Any, which: str, how: Any) -> None:
    (A, B), R, (offsets, cut), (add, layout, into) = widths, sum(sizes), segments(sizes), how
    a, b = (with_tail(randn(R, width, dtype=dtype, seed=i)) for i, width in enumerate((A, B)))
    source = randn(20, A if which == "a" else B, dtype=dtype, seed=4)
    index = torch.randint(-1, 20, (R + TAIL,), generator=torch.Generator().manual_seed(5))
    source = laid(source[None], "with gaps")[0] if layout and which == "a" else source
    read = torch.where((index < 0)[:, None], 0, source[index])
    true_a, true_b = read if which == "a" else a, read if which == "b" else b
    out = laid(torch.full((len(sizes), A, B), 2.0 if add else NAN, dtype=into or dtype), layout)
    products.weight_grad(
        source if which == "a" else a, source if which == "b" else b, offsets, out, launch_of(dtype, gemms), add=add,
        a_index_R=index if which == "a" else None, b_index_R=index if which == "b" else None,
    )  # fmt: skip
    wanted = torch.stack([true_a[r].double().T @ true_b[r].double() for r in cut]) + 2 * add
    assert_close(out, wanted, BOUNDS[into or dtype], f"wgrad {dtype} {sizes} {widths} gathered={which} {how}")


def experts(dtype: torch.dtype, gemms: Gemms, sizes: list[int], widths: Any) -> None:
    """Both fused products, with indexes of -1."""
    (D, F), R, (offsets, cut), launch = widths, sum(sizes), segments(sizes), launch_of(dtype, gemms)
    x, dy = (randn(20, D, dtype=dtype, seed=i) for i in (1, 2))
    up = randn(len(sizes), 2 * F, D, dtype=dtype, seed=3) * D**-0.5
    down = randn(len(sizes), D, F, dtype=dtype, seed=4)
    index = torch.randint(-1, 20, (R + TAIL,), generator=torch.Generator().manual_seed(5))
    w = with_tail(torch.rand(R, generator=torch.Generator().manual_seed(6)))
    x = laid(x[None], "with gaps")[0] if len(sizes) % 2 else x
    pre, h = torch.full((R + TAIL, 2 * F), 7.0, dtype=dtype), torch.full((R + TAIL, F), 7.0, dtype=dtype)
    swiglu.gate_up(x, index, up, offsets, pre, h, launch)
    d_pre, hw, dots = swiglu.hidden_grad(dy, index, down, w, offsets, pre, launch)
    xs, ds = (torch.where((index < 0)[:, None], 0, t[index]).double() for t in (x, dy))
    assert bool((pre[R:] == 7).all()), "rows behind the last segment"
    assert bool((h[R:] == 7).all()), "rows behind the last segment"
    for e, r in enumerate(cut):
        words = f"{dtype} {sizes} {widths} expert {e}"
        assert_close(pre[r], xs[r] @ up[e].double().T, BOUNDS[dtype], f"pre {words}")
        kept = pre[r].double().requires_grad_()  # as it was rounded
        true_h, dh = torch.nn.functional.silu(kept[:, :F]) * kept[:, F:], ds[r] @ down[e].double()
        (true,) = torch.autograd.grad(true_h, kept, dh * w[r, None].double())
        assert_close(h[r], true_h, BOUNDS[dtype], f"h {words}")
        assert_close(d_pre[r], true, BOUNDS[dtype], f"d_pre {words}")
        assert_close(hw[r], true_h * w[r, None].double(), BOUNDS[dtype], f"hw {words}")
        assert_close(dots[r].sum(1), (true_h * dh).sum(1), max(BOUNDS[dtype], 1e-5), f"dots {words}")


def sparse(*shape: int, stride: Sequence[int] = (), dtype: torch.dtype = torch.float32) -> Tensor:
    """Zeros, in memory that is taken only where it is written."""
    stride = stride or [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    span = sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) + 1
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE, which Python 3.11 has no name for
    return torch.frombuffer(mmap.mmap(-1, span * dtype.itemsize, flags=flags), dtype=dtype).as_strided(shape, stride)


@contextmanager
def in_sparse_memory(rows: int) -> Iterator[None]:
    """Within: matrices of as many rows that are made are sparse."""
    new_empty, empty_like = Tensor.new_empty, torch.empty_like
    Tensor.new_empty = lambda t, *shape, **more: (  # type: ignore[method-assign, assignment]
        sparse(*shape) if len(shape) == 2 and shape[0] == rows else new_empty(t, *shape, **more)
    )
    torch.empty_like = lambda t, **more: sparse(*t.shape) if t.shape[0] == rows else empty_like(t, **more)  # type: ignore
    try:
        yield
    finally:
        Tensor.new_empty, torch.empty_like = new_empty, empty_like  # type: ignore[method-assign]


def far_rows() -> None:
    """Rows of the last segment, experts and results that lie more than 2^31 elements behind the first."""
    D, F, dtype = 7168, 24, torch.float32
    launch, high = (
        Launch(programs=2, gemms=gemms_of(Tiles(m=m, n=n, k=k, warps=1, stages=1)))
        for m, n, k in ((16, 1024, 512), (1024, 32, 32))
    )
    n = 2**31 // D + 40
    first, at = n - 20, slice(n - 20, n)
    x, h = sparse(n, D), sparse(n, F)
    x[at], h[at] = randn(20, D, dtype=dtype, seed=1), randn(20, F, dtype=dtype, seed=2)
    w, y = sparse(2, D, F, stride=(2**31 + 32, F, 1)), sparse(n, F)
    w.copy_(randn(2, D, F, dtype=dtype, seed=3))
    products.grouped_rows(x, w, torch.tensor([first, first + 13, n]), y, launch)
    cut = (slice(first, first + 13), slice(first + 13, n))
    true = torch.cat([x[r].double() @ w[e].double() for e, r in enumerate(cut)])
    assert_close(y[at], true, 1e-5, "rows and experts")
    w, ends = sparse(6, D, F, stride=(2**29, F, 1)), torch.tensor([first] * 6 + [n])
    w[5] = randn(D, F, dtype=dtype, seed=4)
    products.grouped_rows(x, w, ends, y, launch)  # a stride of 32 bits, e times it more
    assert_close(y[at], x[at].double() @ w[5].double(), 1e-5, "experts of a stride that fits")
    out, turned = sparse(n, D), randn(1, F, D, dtype=dtype, seed=5)
    products.grouped_rows(h, turned, torch.tensor([first, n]), out, launch)
    assert_close(out[at], h[at].double() @ turned[0].double(), 1e-5, "results")
    wanted, index = x[at].double().T @ h[at].double(), torch.full((n,), -1)
    index[at] = torch.arange(first, n)
    for gathered in (None, index):
        dw = sparse(5, D, F, stride=(2**30, F, 1))
        products.weight_grad(x, h, torch.tensor([first] * 5 + [n]), dw, high, a_index_R=gathered)
        assert_close(dw[4], wanted, 1e-5, f"weight gradient, gathered={gathered is not None}")
    picked = torch.tensor([n - 1, -1, n - 3])
    assert torch.equal(moves.gather(x, picked), torch.where(picked[:, None] < 0, 0, x[picked])), "gather"
    summed = moves.combine(x, Csr(indices=torch.tensor([n - 1, n - 2, n - 3]), indptr=torch.tensor([0, 2, 3])))
    assert_close(summed, torch.stack((x[n - 1].double() + x[n - 2], x[n - 3].double())), 1e-6, "combine")


def far_experts() -> None:
    """Pre-activations, hidden rows and gradients that end more than 2^31 elements behind the first."""
    D, F, dtype = 32, 14336, torch.float32
    R = 2**31 // F + 12
    first, at = R - 12, slice(R - 12, R)
    launch = Launch(programs=2, gemms=gemms_of(Tiles(m=16, n=1024, k=32, warps=1, stages=1)))
    x, up, down = (randn(*shape, dtype=dtype, seed=i) for i, shape in enumerate(((12, D), (1, 2 * F, D), (1, D, F))))
    index, w, offsets = torch.full((R,), -1), torch.rand(R), torch.tensor([first, R])
    index[at] = torch.arange(12)
    pre, h = sparse(R, 2 * F), sparse(R, F)
    swiglu.gate_up(x, index, up, offsets, pre, h, launch)
    true = (x.double() @ up[0].double().T).requires_grad_()
    true_h, dh = torch.nn.functional.silu(true[:, :F]) * true[:, F:], x.double() @ down[0].double()
    (d_true,) = torch.autograd.grad(true_h, true, dh * w[at, None])
    assert_close(pre[at], true, 1e-5, "pre")
    assert_close(h[at], true_h, 1e-5, "h")
    with in_sparse_memory(R):
        d_pre, hw, dots = swiglu.hidden_grad(x, index, down, w, offsets, pre, launch)
    assert_close(d_pre[at], d_true, 1e-5, "d_pre")
    assert_close(hw[at], true_h * w[at, None], 1e-5, "hw")
    assert_close(dots[at].sum(1), (true_h * dh).sum(1), 1e-5, "dots")


def far_glue() -> None:
    """The same of what lies between grouped GEMMs."""
    F, R = 2**18, 2**13 + 2
    at, slot_R, w = slice(R - 2, R), torch.full((R,), -1), torch.tensor([[0.5, 2.0]])
    slot_R[at] = torch.arange(2)
    pre, d_out = sparse(R, 2 * F), sparse(R, F)
    pre[at], d_out[at] = (randn(2, width, dtype=torch.float32, seed=width) for width in (2 * F, F))
    with in_sparse_memory(R):
        h = sparse(R, F)
        glue.activate_kernel[(R, 1)](pre, w, slot_R, h, F, ACT=0, GATE=True, BLOCK=1024)  # the first columns
        d_pre, hw, dw = glue.activate_backward("swiglu", pre, d_out, w, slot_R, None, True)
    assert hw is not None
    true, weight = pre[at].double().requires_grad_(), w[0, :, None].double()
    true_h = torch.nn.functional.silu(true[:, :F]) * true[:, F:]
    (d_true,) = torch.autograd.grad(true_h, true, d_out[at] * weight, retain_graph=True)
    for name, got, wanted in (
        ("h", h[at, :1024], true_h[:, :1024] * weight), ("hw", hw[at], true_h * weight), ("d_pre", d_pre[at], d_true),
        ("dw", dw[0], (true_h * d_out[at]).sum(1)),
    ):  # fmt: skip
        assert_close(got, wanted, 1e-5, f"glue: {name}")
    source, out = (sparse(5, 512, stride=(2**29, 1)) for _ in range(2))
    source[4] = 3
    glue.write_kernel[(1, 5)](source, torch.tensor([0, 0, 0, 0, 0, 1]), out, 2**29, ADD=False, BLOCK=512)
    assert bool((out[4] == 3).all()), "glue: write"


def main() -> None:
    dtypes = list(BOUNDS)
    for case in sample(
        60, dtypes, [SMALL, SMALL, SMALL, *SETS], SIZES, WIDTHS, ("", "turned", "with gaps"), (True, False)
    ):
        grouped_rows(*case)
    print("rows")
    hows = [(add, layout, into) for add in (True, False) for layout in ("", "turned") for into in (None, torch.float32)]
    for case in sample(60, dtypes, [SMALL, *SETS], SIZES, WIDTHS, ("", "a", "b"), hows):
        weight_grad(*case)
    print("weight gradients")
    for case in sample(40, dtypes, [SMALL, *SETS], SIZES, ((40, 36), (33, 17), (72, 150))):
        experts(*case)
    print("experts")
    far_rows()
    print("rows beyond 2^31 elements")
    far_experts()
    far_glue()
    print("experts beyond 2^31 elements")


if __name__ == "__main__":
    main()
