"""Plans and experts in Triton's interpreter, against float64. Run by test_interpreted.py as interpreted.py is. Prints a
line for each part. Fresh memory holds NaN.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import torch
from torch.utils.flop_counter import FlopCounterMode

from helpers.triton_checks import FALLS, Case, experts_are_true, inputs_of, module_of, plan_is_true
from trimtab.experts.plan import plan_experts
from trimtab.kernels.choose import KernelChoice
from trimtab.kernels.expert_check import first_triton_fault
from trimtab.kernels.triton import moves, swiglu
from trimtab.kernels.triton.language import (
    BAND,
    Gemms,
    Launch,
    Tiles,
    segment_tiles,
    segments_power,
    tile_of,
    tl,
    triton,
)
from trimtab.kernels.triton.moves import place_slots
from trimtab.kernels.triton.products import TritonBackend

SMALL = Tiles(m=32, n=32, k=32, warps=1, stages=1)
GEMMS = Gemms(rows=SMALL, across=SMALL, gate_up=SMALL, dh=SMALL, wgrad=SMALL, wgrad_gathered=SMALL, float32=SMALL)
LAUNCH = Launch(programs=3, gemms=GEMMS)
WIDE = Tiles(m=32, n=256, k=32, warps=1, stages=1)  # an epilogue takes its columns in parts
CHOICE = KernelChoice(TritonBackend(LAUNCH))


def ids_in_any_integers() -> None:
    """Compared as what they are, none wraps around to another."""
    for ids, experts in (
        (torch.tensor([[255], [3]], dtype=torch.uint8), 256), (torch.tensor([[127], [-1]], dtype=torch.int8), 128),
        (torch.tensor([[2**32], [1], [2 - 2**40]]), 4),
    ):  # fmt: skip
        wanted, got = plan_experts(ids.long(), experts, static=True), place_slots(ids, experts)
        assert torch.equal(got.slot_R, wanted.slot_R), (ids, got.slot_R)
        assert torch.equal(got.counts_e, wanted.counts_e), (ids, got.counts_e)


def _tiles(offsets, found, experts, rows, columns, EXPERTS: tl.constexpr, BM: tl.constexpr):  # type: ignore[no-untyped-def]
    for tile in range(segment_tiles(offsets, experts, rows, True, EXPERTS, BM) * columns):
        segment, row, end, column = tile_of(offsets, experts, rows, tile, columns, True, EXPERTS, BM)
        tl.store(found + tile * 4, segment)
        tl.store(found + tile * 4 + 1, row)
        tl.store(found + tile * 4 + 2, end)
        tl.store(found + tile * 4 + 3, column)


def every_tile_once() -> None:
    """Segment by segment, with the tail as the last: in bands of row tiles, within them column by column."""
    cuts, rows, columns, bm = (0, 0, 20 * 4 - 1, 20 * 4 + 2, 29 * 4), 41 * 4, 3, 4
    wanted = []
    for segment, (start, end) in enumerate(pairwise((*cuts, rows))):
        for band in batched(range(start, end, bm), BAND.value):
            wanted += [[segment, row, end, column] for column in range(columns) for row in band]
    found = torch.full((len(wanted) + 1, 4), -1)
    experts = len(cuts) - 1
    triton.jit(_tiles)[(1,)](torch.tensor(cuts), found, experts, rows, columns, EXPERTS=segments_power(experts), BM=bm)
    assert found.tolist() == [*wanted, [-1] * 4]


def batched(items: range, count: int) -> list[range]:
    return [items[i : i + count] for i in range(0, len(items), count)]


def a_wrong_kernel_is_found() -> None:
    """The self-test of the fused kernels sees a gradient that is off by a factor."""
    right = swiglu.hidden_grad
    swiglu.hidden_grad = lambda *args: (2 * right(*args)[0], *right(*args)[1:])
    fault = first_triton_fault(LAUNCH, torch.device("cpu"), torch.float32)
    swiglu.hidden_grad = right
    assert fault is not None
    assert "d_up is wrong" in fault or "dx is wrong" in fault


def flops_are_counted(case: Case) -> None:
    """Each product once, with rows for all slots: how many of them are kept stays on the device."""
    module, (x, ids, w, dy) = module_of(case, "cpu"), inputs_of(case, "cpu")
    with FlopCounterMode(display=False) as counter:
        module(x, ids, w).backward(dy)
    assert counter.get_total_flops() == 3 * 2 * ids.numel() * 3 * case.dim * case.hidden


def main() -> None:
    torch.use_deterministic_algorithms(True)
    for fall in FALLS:
        for rows in (37, 0):
            plan_is_true(Case(fall=fall, rows=rows), "cpu", 1)
        plan_is_true(Case(fall=fall, rows=20, experts=5, top_k=3), "cpu", 8)
        print(f"plan {fall}")
    moves.STEP = 2
    plan_is_true(Case(fall="dropped", rows=2200), "cpu", 1)  # more chunks than the scan takes in a step
    ids_in_any_integers()
    print("plan of many chunks")
    every_tile_once()
    print("every tile once")
    for dtype in (torch.float32, torch.float16):
        CHOICE.on(torch.device("cpu"), dtype)
        assert CHOICE.reports[-1].fault is None
        print(f"self-test {dtype}")
    a_wrong_kernel_is_found()
    experts = Case(kernels=CHOICE, rows=30, experts=5, dtype=torch.float32, dim=40, hidden=36)
    for fall in FALLS:
        experts_are_true(replace(experts, fall=fall), "cpu")
        print(f"experts {fall}")
    flops_are_counted(replace(experts, fall="dropped"))
    experts_are_true(replace(experts, rows=0), "cpu")
    experts_are_true(replace(experts, rows=1, dim=256, hidden=128, fall="dropped"), "cpu")  # as on a GPU
    experts_are_true(replace(experts, rows=1, dim=32, hidden=64, main_grad="accumulate"), "cpu")
    experts_are_true(replace(experts, fall="cold", dim=32, hidden=32, main_grad="overwrite"), "cpu")
    experts_are_true(replace(experts, dtype=torch.float16), "cpu")
    wide = KernelChoice(TritonBackend(replace(LAUNCH, gemms=replace(GEMMS, float32=WIDE))))
    wide._chosen[torch.device("cpu"), torch.float32] = wide.candidates[0]  # type: ignore[assignment]  # untested
    experts_are_true(replace(experts, kernels=wide, hidden=300, main_grad="accumulate"), "cpu")
    experts_are_true(replace(experts, fall="cold", autocast=torch.float16), "cpu")
    experts_are_true(replace(experts, fall="one_expert", rows=300, top_k=1, hidden=72), "cpu")  # two bands
    print("experts without rows, with main_grad, in float16, under autocast")


if __name__ == "__main__":
    main()
