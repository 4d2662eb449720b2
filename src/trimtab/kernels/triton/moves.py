"""Moves of slots and rows. No atomics and nothing read back, so the same bits each time, also in a CUDA graph.

    place_slots   in three launches: `count`, each chunk's slots for each expert; `scan`, one program, running sums over
                  the chunks and the experts' offsets, aligned; `place`, slot -> its expert's offset + that expert's
                  slots in the chunks before + those before it in its own. Scratch: an int32 per chunk and expert.
                  Chunks are long, for `scan` takes one after the other, and `place` takes parts of them
    gather        x[index]
    combine       sums over bags in the bag's order, in float32

Legend: M rows, K slots per row, N = M * K slots, R expert rows (with padding), e experts, C chunks, n rows of a source,
D row width.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from trimtab.kernels.rows import Csr, ExpertPlan
from trimtab.kernels.triton.language import FUSED, kernel, on_device_of, row_step, segments_power, tl, triton
from trimtab.validation import wide_ids

BLOCK = 1024
CHUNK, PART = 1024, 128
STEP, SCANNED = 32, 16384
"""Chunks that are summed up in a step, and counts of theirs at most: more do not fit the memory of AMD's blocks."""


def _key(ids, slot, slots, experts):  # type: ignore[no-untyped-def]
    """The expert of each of these slots, `experts` for one that is dropped or none."""
    expert = tl.load(ids + slot, mask=slot < slots, other=-1)
    kept = (expert >= 0) & (expert < experts)  # before it is narrowed: a wild id must not wrap around to a good one
    return tl.where(kept, expert, experts).to(tl.int32)


key_of = triton.jit(_key)


def _count(  # type: ignore[no-untyped-def]
    ids, counts, slot_R, row_R, bag_index, slots, experts, total, EXPERTS: tl.constexpr, CHUNK: tl.constexpr,
    PART: tl.constexpr,
):  # fmt: skip
    """Column e of `counts` [C, EXPERTS] is the number of kept slots; the columns behind it are zero. And what is behind
    the last segment: -1 in `slot_R` and `row_R`, 0 in `bag_index`."""
    chunk = tl.program_id(0)
    column = tl.arange(0, EXPERTS)
    found = tl.zeros((EXPERTS,), dtype=tl.int32)
    for first in range(chunk * CHUNK, chunk * CHUNK + CHUNK, PART):
        found += tl.histogram(key_of(ids, first + tl.arange(0, PART), slots, experts), EXPERTS)
    tl.store(counts + chunk * EXPERTS + column, tl.where(column == experts, CHUNK - found, found))
    for first in range(chunk * CHUNK, total, tl.num_programs(0) * CHUNK):
        place = first + tl.arange(0, CHUNK)
        nothing = tl.zeros((CHUNK,), dtype=tl.int64)
        tl.store(slot_R + place, nothing - 1, mask=place < total)
        tl.store(row_R + place, nothing - 1, mask=place < total)
        tl.store(bag_index + place, nothing, mask=place < total)


def _scan(  # type: ignore[no-untyped-def]
    counts,  # [C, EXPERTS] int32: becomes what lies before each chunk
    counts_e,  # [e] int64
    offsets_e,  # [e + 1] int64
    chunks, experts, alignment, total, EXPERTS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, EXPERTS)
    before = tl.zeros((EXPERTS,), dtype=tl.int32)
    for first in range(0, chunks, STEP):
        chunk = first + tl.arange(0, STEP)
        at = counts + chunk[:, None] * EXPERTS + column[None, :]
        found = tl.load(at, mask=(chunk < chunks)[:, None], other=0)
        tl.store(at, before[None, :] + tl.cumsum(found, axis=0) - found, mask=(chunk < chunks)[:, None])
        before += tl.sum(found, axis=0)
    each = tl.where(column < experts, before, 0).to(tl.int64)
    tl.store(counts_e + column, each, mask=column < experts)
    each = (each + alignment - 1) // alignment * alignment
    start = tl.minimum(tl.cumsum(each, axis=0) - each, total)  # of more slots than were promised nobody reads the rest
    tl.store(offsets_e + column, start, mask=column <= experts)


def _place(  # type: ignore[no-untyped-def]
    ids,  # [N] int32 or int64
    before,  # [C, EXPERTS] int32
    offsets_e,  # [e + 1] int64
    slot_R,  # [R] int64, -1 before
    row_R,  # [R] int64, -1 before
    bag_index,  # int64, a place for each kept slot, in slot order
    bag_offsets,  # [M + 1] int64
    slots, experts, top_k, total, EXPERTS: tl.constexpr, CHUNK: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0) * PART
    lane = tl.arange(0, PART)
    slot = start + lane
    key = key_of(ids, slot, slots, experts)
    kept = key < experts
    before += start // CHUNK * EXPERTS
    earlier = (key[:, None] == key[None, :]) & (lane[None, :] < lane[:, None])
    place = tl.load(offsets_e + key, mask=kept, other=0) + tl.load(before + key, mask=kept, other=0)
    place += tl.sum(earlier.to(tl.int32), axis=1)
    through = tl.load(before + experts)
    for first in range(start // CHUNK * CHUNK, start, PART):
        other = key_of(ids, first + lane, slots, experts)
        place += tl.sum((key[:, None] == other[None, :]).to(tl.int32), axis=1)
        through += tl.sum((other < experts).to(tl.int32), axis=0)
    fits = kept & (place < total)  # a caller who promised fewer slots than there are gets no wild write
    tl.store(slot_R + place, slot.to(tl.int64), mask=fits)
    tl.store(row_R + place, (slot // top_k).to(tl.int64), mask=fits)
    through = (through + tl.cumsum(kept.to(tl.int32), axis=0)).to(tl.int64)
    tl.store(bag_index + through - 1, place.to(tl.int64), mask=fits & (through <= total))
    tl.store(bag_offsets + (slot + 1) // top_k, through, mask=(slot < slots) & ((slot + 1) % top_k == 0))
    tl.store(bag_offsets + lane, tl.zeros((PART,), dtype=tl.int64), mask=(slot == lane) & (lane == 0))


count_kernel = kernel(_count, "slots", "experts", "total")
scan_kernel = kernel(_scan, "chunks", "experts", "alignment", "total")
place_kernel = kernel(_place, "slots", "experts", "top_k", "total")


def place_slots(ids_MK: Tensor, num_experts: int, alignment: int = 1, num_slots: int | None = None) -> ExpertPlan:
    """Group the slots of `ids_MK` by expert; ids outside 0..e - 1 are dropped. Nothing is read back to the host.

    Args:
        ids_MK: integers, K >= 1.
        num_slots: how many are kept, or how many at most, where it is known; else R is the bound N (+ padding).
    """
    ids_MK = wide_ids(ids_MK).contiguous()
    (rows, top_k), power = ids_MK.shape, segments_power(num_experts)
    slots = rows * top_k
    total = (slots if num_slots is None else min(num_slots, slots)) + num_experts * (alignment - 1)
    chunks = max(1, triton.cdiv(slots, CHUNK))
    made = partial(torch.empty, dtype=torch.int64, device=ids_MK.device)
    places = ExpertPlan(
        slot_R=made(total), row_R=made(total), bag_index=made(total), bag_offsets=made(rows + 1),
        counts_e=made(num_experts), offsets_e=made(num_experts + 1),
    )  # fmt: skip
    counts = torch.empty(chunks, power, dtype=torch.int32, device=ids_MK.device)
    with on_device_of(ids_MK):
        count_kernel[(chunks,)](
            ids_MK, counts, places.slot_R, places.row_R, places.bag_index, slots, num_experts, total, EXPERTS=power,
            CHUNK=CHUNK, PART=PART, num_warps=4, **FUSED,
        )  # fmt: skip
        scan_kernel[(1,)](
            counts, places.counts_e, places.offsets_e, chunks, num_experts, alignment, total, EXPERTS=power,
            STEP=min(STEP, SCANNED // power), num_warps=8, **FUSED,
        )  # fmt: skip
        place_kernel[(max(1, triton.cdiv(slots, PART)),)](
            ids_MK, counts, places.offsets_e, places.slot_R, places.row_R, places.bag_index, places.bag_offsets, slots,
            num_experts, top_k, total, EXPERTS=power, CHUNK=CHUNK, PART=PART, num_warps=8, **FUSED,
        )  # fmt: skip
    return places


def _gather(x, index, out, rows, width, x_row, UNIT: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """One row's block of columns; zeros where the index is -1."""
    row = tl.program_id(0).to(tl.int64)
    if row >= rows:
        return
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(index + row)
    value = tl.load(x + source * (x_row * UNIT) + column, mask=column < tl.where(source >= 0, width, 0), other=0.0)
    tl.store(out + row * width + column, value, mask=column < width)


def _combine(rows, index, offsets, out, bags, width, row, UNIT: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """One bag's block of columns."""
    bag = tl.program_id(0).to(tl.int64)
    if bag >= bags:
        return
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for i in range(tl.load(offsets + bag), tl.load(offsets + bag + 1)):
        source = tl.load(index + i)
        total += tl.load(rows + source * (row * UNIT) + column, mask=column < width, other=0.0).to(tl.float32)
    tl.store(out + bag * width + column, total.to(out.dtype.element_ty), mask=column < width)


gather_kernel = kernel(_gather, "rows")
combine_kernel = kernel(_combine, "bags")


def block_of(width: int) -> int:
    return min(BLOCK, triton.next_power_of_2(width))  # type: ignore[no-any-return]


def _move(kernel: Any, source_nD: Tensor, rows: int, *by: Tensor) -> Tensor:
    """A launch for so many rows that come out, from rows that may be parts of longer ones."""
    source_nD, step, unit = row_step(source_nD)
    width = source_nD.shape[1]
    out, block = source_nD.new_empty(rows, width), block_of(width)
    with on_device_of(out):
        kernel[(max(rows, 1), triton.cdiv(width, block))](  # a grid has a program at least
            source_nD, *by, out, rows, width, step, UNIT=unit, BLOCK=block, num_warps=4, **FUSED
        )
    return out


def gather(x_nD: Tensor, index_R: Tensor) -> Tensor:
    """x[index], and a row of zeros where the index is -1: [R, D]."""
    return _move(gather_kernel, x_nD, index_R.shape[0], index_R)


def combine(rows_nD: Tensor, csr: Csr) -> Tensor:
    """Sum of each bag's rows in its order, in float32, rounded once: [M, D]."""
    return _move(combine_kernel, rows_nD, csr.indptr.shape[0] - 1, csr.indices, csr.indptr)
