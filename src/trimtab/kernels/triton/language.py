"""Triton, where it is installed; the shape of a launch; and what all kernels here share.

A kernel walks over the tiles of all segments in strides of its programs ("persistent"): how many tiles there are, and
whose they are, is read from the segments' offsets on the device, so a launch depends on bounds alone and can be
captured in a CUDA graph.

Legend: e segments (experts), R rows of all segments.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from trimtab.errors import BackendError

try:
    triton: Any = import_module("triton")  # untyped, and not everywhere: not for a type checker to follow
    tl: Any = import_module("triton.language")
except ImportError as error:
    raise BackendError(f"kernels of Triton need the triton package: {error}") from error


BAND = tl.constexpr(8)
"""Row tiles that take turns at one column of a weight."""

SEARCHED = tl.constexpr(512)
"""Segments that the search for a tile's looks at together: with more, registers spill."""
FUSED = {"enable_fp_fusion": True}
"""Options of every launch: a product that is added is rounded once. Triton 3.10 will not do so by itself."""


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """One GEMM's tile: m rows by n columns, in steps of k along the contracted axis.

    per_sm: programs that share a multiprocessor. While one writes its tile, another multiplies.
    """

    m: int
    n: int
    k: int
    warps: int
    stages: int
    per_sm: int = 1

    def options(self) -> dict[str, int]:
        """The arguments of a launch that say so."""
        return {"BM": self.m, "BN": self.n, "BK": self.k, "num_warps": self.warps, "num_stages": self.stages, **FUSED}


@dataclass(frozen=True, kw_only=True)
class Gemms:
    """The tiles of each GEMM, here those of Hopper.

    rows, across: of a GEMM over rows whose weight has the contracted axis contiguous, and the other one.
    gate_up, dh, wgrad: those of the other GEMMs.
    wgrad_gathered: those of a weight gradient with an index. Triton gives half of the stages to the index that a row
        waits for, so that as many rows are under way with 5 as without an index with 3.
    float32: those of every GEMM of float32 rows, which no tensor core multiplies: larger tiles spill kilobytes.
    """

    rows: Tiles = Tiles(m=128, n=256, k=64, warps=8, stages=3)
    across: Tiles = Tiles(m=128, n=256, k=32, warps=8, stages=4)
    gate_up: Tiles = Tiles(m=128, n=128, k=64, warps=8, stages=3)
    dh: Tiles = Tiles(m=128, n=128, k=64, warps=8, stages=4)
    wgrad: Tiles = Tiles(m=128, n=256, k=64, warps=8, stages=3)
    wgrad_gathered: Tiles = Tiles(m=128, n=256, k=64, warps=8, stages=5)
    float32: Tiles = Tiles(m=64, n=64, k=16, warps=8, stages=3)


HOPPER = Gemms()
_SQUARE, _NARROW = Tiles(m=128, n=128, k=64, warps=8, stages=3), Tiles(m=128, n=64, k=64, warps=8, stages=3)
_SHORT = Tiles(m=128, n=128, k=64, warps=8, stages=2)
AMPERE = replace(HOPPER, wgrad=_SQUARE, wgrad_gathered=replace(_SQUARE, stages=5))
BLACKWELL = replace(
    HOPPER, across=replace(HOPPER.across, stages=3), gate_up=Tiles(m=128, n=128, k=32, warps=8, stages=4), dh=_SQUARE
)
WARPS = replace(AMPERE, rows=_SQUARE, across=_SQUARE, gate_up=_NARROW, dh=_SQUARE)
CDNA = Gemms(
    rows=_SHORT, across=_SHORT, gate_up=replace(_NARROW, stages=2), dh=_SHORT, wgrad=_SHORT, wgrad_gathered=_SHORT
)
TILES = (((12, 0), WARPS), ((10, 0), BLACKWELL), ((9, 0), HOPPER), ((8, 6), WARPS), ((0, 0), AMPERE))
"""By the lowest CUDA compute capability that takes them. Compiled for 8.0, 9.0, 10.0, 12.0 and gfx942 they fit the
shared memory and spill at most 64 bytes of a thread. None was tuned on a device."""


@lru_cache(maxsize=64)
def on(device: torch.device) -> tuple[Gemms, int]:
    """The tiles of a device, and its multiprocessors."""
    found = torch.cuda.get_device_properties(device)
    usual = next(tiles for least, tiles in TILES if (found.major, found.minor) >= least)
    return CDNA if torch.version.hip else usual, found.multi_processor_count


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Options of launches.

    programs: of a persistent kernel; 0 takes as many as its tiles want on each of the device's multiprocessors.
    wide: multiply in float32 after each load, as Triton's interpreter needs it for bfloat16.
    gemms: instead of the device's.
    """

    programs: int = 0
    wide: bool = False
    gemms: Gemms | None = None

    def tiles(self, gemm: str, rows: Tensor) -> Tiles:
        """Of one of the `Gemms`, over these rows."""
        gemms = self.gemms or on(rows.device)[0]
        return gemms.float32 if rows.dtype is torch.float32 else getattr(gemms, gemm)

    def grid(self, device: torch.device, tiles: Tiles, bound: int) -> tuple[int]:
        """A grid for at most `bound` of these tiles, at least one program."""
        most = self.programs or on(device)[1] * tiles.per_sm
        return (max(1, min(most, bound)),)

    def run(self, kernel: Any, tiles: Tiles, bound: int, *args: Any, **constants: Any) -> None:
        """Launch a GEMM of at most `bound` tiles on the device of its first tensor: Triton launches on the current."""
        with on_device_of(args[0]):
            kernel[self.grid(args[0].device, tiles, bound)](*args, WIDE=self.wide, **constants, **tiles.options())


def on_device_of(tensor: Tensor) -> torch.cuda.device_of:
    """Within: launches go to `tensor`'s device; Triton launches on the current one. Does nothing on the CPU."""
    return torch.cuda.device_of(tensor)  # type: ignore[no-untyped-call]


def row_step(t_nD: Tensor) -> tuple[Tensor, int, int]:
    """(t, step, UNIT): rows begin step * UNIT apart. The compiler sees units of 16 bytes, and loads as wide."""
    t_nD = t_nD if t_nD.stride(1) == 1 or t_nD.shape[1] == 1 else t_nD.contiguous()
    unit = 8 if t_nD.stride(0) % 8 == 0 else 1
    return t_nD, t_nD.stride(0) // unit, unit


def _tiles_of(offsets, index, experts, rows, TAIL: tl.constexpr, BM: tl.constexpr):  # type: ignore[no-untyped-def]
    """The number of tiles of each of these segments."""
    starts = tl.load(offsets + index, mask=index <= experts, other=0)
    ends = tl.load(offsets + 1 + index, mask=index < experts, other=0)
    ends = tl.where(index < experts, ends, tl.where((index == experts) & TAIL, rows, starts))
    return ((ends - starts + BM - 1) // BM).to(tl.int32)  # 64 bits spill


def _segment_tiles(offsets, experts, rows, TAIL: tl.constexpr, EXPERTS: tl.constexpr, BM: tl.constexpr):  # type: ignore[no-untyped-def]
    """The number of tiles of BM rows in all segments; with TAIL the rows behind the last one are a segment too."""
    return tl.sum(tiles_of(offsets, tl.arange(0, EXPERTS), experts, rows, TAIL, BM), axis=0)


def _tile_of(  # type: ignore[no-untyped-def]
    offsets, experts, rows, tile, columns, TAIL: tl.constexpr, EXPERTS: tl.constexpr, BM: tl.constexpr
):  # fmt: skip
    """(segment, first row, end of the segment, column) of tile number `tile`. The tail is segment `experts`.

    A segment's tiles are numbered in bands of BAND row tiles, and within a band column by column: what runs at one time
    shares rows and weights, so that most are read from the cache.
    """
    segment = tl.full((), 0, dtype=tl.int64)
    before = tl.full((), 0, dtype=tl.int32)
    through = before
    for first in range(0, EXPERTS, SEARCHED):
        index = first + tl.arange(0, EXPERTS if EXPERTS < SEARCHED else SEARCHED)
        tiles = tiles_of(offsets, index, experts, rows, TAIL, BM)
        passed = through + tl.cumsum(tiles, axis=0) <= tile // columns
        segment += tl.sum(passed.to(tl.int64), axis=0)
        before += tl.sum(tl.where(passed, tiles, 0), axis=0)
        through += tl.sum(tiles, axis=0)
    place = tile - before * columns
    start = tl.load(offsets + segment)
    end = tl.load(offsets + segment + 1, mask=segment < experts, other=rows)
    band = place // (BAND * columns) * BAND
    place -= band * columns
    high = tl.minimum(((end - start + BM - 1) // BM).to(tl.int32) - band, BAND)
    row = start + (band + place % high).to(tl.int64) * BM
    return segment, row, end, place // high


def _halves(tile):  # type: ignore[no-untyped-def]
    """The left columns of a tile and the right ones."""
    return tl.split(tl.permute(tl.reshape(tile, (tile.shape[0], 2, tile.shape[1] // 2)), (0, 2, 1)))


def _of_rows(at, read, inside, EVEN: tl.constexpr, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """A tile of rows, zero where they are not `read` or, unless EVEN, a column is not `inside`."""
    mask = read[:, None] if EVEN else read[:, None] & inside[None, :]
    tile = tl.load(at, mask=mask, other=0.0)
    return tile.to(tl.float32) if WIDE else tile


def _of_weight(at, inside, across, EVEN: tl.constexpr, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """A tile of a weight, zero outside, which nothing is where EVEN."""
    tile = tl.load(at) if EVEN else tl.load(at, mask=inside[:, None] & across[None, :], other=0.0)
    return tile.to(tl.float32) if WIDE else tile


of_rows = triton.jit(_of_rows)
of_weight = triton.jit(_of_weight)
halves = triton.jit(_halves)
tiles_of = triton.jit(_tiles_of)
segment_tiles = triton.jit(_segment_tiles)
tile_of = triton.jit(_tile_of)


def kernel(function: Any, *counts: str) -> Any:
    """`function` as a kernel that is compiled once for all values of its integers called `counts`.

    Where any other integer is 1, or a multiple of 16, Triton compiles another kernel: so widths and strides make loads
    wide. Counts follow the batch, and a step with another batch would wait for the compiler.
    """
    return triton.jit(function, do_not_specialize=counts)


def segments_power(experts: int) -> int:
    """EXPERTS: the least power of two above e, so that there is a place behind the last segment."""
    power: int = triton.next_power_of_2(experts + 1)
    return power
