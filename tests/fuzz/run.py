"""`python -m fuzz N`: random traffic through the real dispatch, against dense matrices, exactly.

    draw        fuzz_cases    ranks, experts, ids, masks, weights, shards and options of a case, from (seed, index)
    run, check  fuzz_check    dispatcher, plans, kernels and shards on ranks in this process (fuzz_world), forward and
                              backward, with exact experts (fuzz_layer), against the truth (fuzz_truth)
    shrink      fuzz_shrink   a failing case to a small one

Of each 64 cases, which share a shape, one has a world of its own and the others lie side by side in a second world,
each with its own tokens and experts: a call of torch costs more than the arithmetic of a small case.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch

from fuzz.cases import BLOCK, Case, case_of, worlds_of
from fuzz.check import check
from fuzz.shrink import shrink
from trimtab.errors import InputError
from trimtab.verify.run import forkserver, preload

CHUNK = 4
"""Blocks that a worker takes at a time."""
Report = Callable[[int, int], None]
Within = Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True, kw_only=True)
class FuzzFailure:
    """A case that fails, and the smallest one found that fails too.

    index: the case's. wrong: what is wrong with it as drawn; small_wrong: with `small`, the shrunk case, or those that
    fail only beside each other.
    """

    seed: int
    index: int
    wrong: str
    small: tuple[Case, ...]
    small_wrong: str

    @property
    def command(self) -> str:
        """What reproduces the case as drawn."""
        return f"python -m fuzz --case={self.seed}:{self.index}"

    def __str__(self) -> str:
        cases = ",\n".join(case.describe() for case in self.small)
        return (
            f"case {self.index} of seed {self.seed}: {self.wrong}\n\nreproduce it: {self.command}\n\nmade small: "
            f"{self.small_wrong}\n\nfrom fuzz.cases import Case, Shape\n"
            f"from fuzz.check import check\n\nprint(check([{cases}]))\n"
        )


class FuzzResult(NamedTuple):
    """cases: run to the end; worlds: how many worlds they ran in."""

    cases: int
    worlds: int
    failures: list[FuzzFailure]


def run_fuzz(
    cases: int, seed: int = 0, workers: int | None = None, report: Report | None = None, *, within: Within = nullcontext
) -> FuzzResult:
    """Run cases 0 .. `cases` - 1 of `seed`, up to the first world with one that fails.

    Args:
        workers: processes; by default one a core, 0 for this process.
        report: called with (cases done, failures) from time to time.
        within: a module-level function that makes a context which every case runs in, such as one with a fault
            planted: the fuzz must find it.
    """
    workers = (os.cpu_count() or 1) if workers is None else workers
    blocks = range(-(-cases // BLOCK))
    chunks = [blocks[i : i + CHUNK] for i in range(0, len(blocks), CHUNK)]
    result = FuzzResult(0, 0, [])
    with closing(_parts(chunks, cases, seed, workers, within)) as parts:
        for part in parts:
            result = FuzzResult(*(whole + more for whole, more in zip(result, part, strict=True)))
            if report is not None:
                report(result.cases, len(result.failures))
            if result.failures:
                break
    return result


def parse_case(text: str) -> tuple[int, int]:
    """The seed and the number of a case, written SEED:INDEX. Raises InputError where it is written otherwise."""
    found = re.fullmatch(r"(-?\d+):(\d+)", text.strip())
    if found is None:
        raise InputError(f"{text!r} is no fuzz case: write SEED:INDEX, two whole numbers, as the failure shows them")
    return int(found[1]), int(found[2])


def run_case(seed: int, index: int) -> FuzzFailure | None:
    """Case `index` of `seed` alone, then beside the others of its block; the failure, if there is one."""
    case = case_of(seed, index)
    worlds = [(case,), *(tuple(world) for world in worlds_of(seed, index // BLOCK) if case in world)]
    return next((found for world in worlds for found in _failures(seed, index, world)), None)


def _parts(
    chunks: list[range], cases: int, seed: int, workers: int, within: Within
) -> Generator[FuzzResult, None, None]:
    """The chunks' results, in order, so that the first failure does not depend on timing."""
    if workers == 0:
        for chunk in chunks:
            yield _run_chunk(chunk, cases, seed, within)
        return
    preload("fuzz.check")
    pool = ProcessPoolExecutor(workers, mp_context=forkserver(), initializer=torch.set_num_threads, initargs=(1,))
    try:
        for future in [pool.submit(_run_chunk, chunk, cases, seed, within) for chunk in chunks]:
            yield future.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _run_chunk(blocks: range, cases: int, seed: int, within: Within) -> FuzzResult:
    """The blocks up to the first world that fails."""
    done = worlds = 0
    failures: list[FuzzFailure] = []
    with within():
        for world in (world for block in blocks for world in worlds_of(seed, block)):
            index = blocks.start * BLOCK + done
            world = world[: max(cases - index, 0)]
            if not world or failures:
                break
            failures += _failures(seed, index, world)
            done, worlds = done + len(world), worlds + 1
    return FuzzResult(done, worlds, failures)


def _failures(seed: int, first: int, world: Sequence[Case]) -> Iterator[FuzzFailure]:
    """The first case of a world that fails alone, or those that fail only beside each other; shrunk."""
    wrong = check(world)
    if wrong is None:
        return
    alone = ((i, check([case])) for i, case in enumerate(world))
    place, own = next(((i, found) for i, found in alone if found is not None), (0, None))
    guilty = world if own is None else world[place : place + 1]
    small = shrink(guilty, lambda some: check(some) is not None)
    yield FuzzFailure(
        seed=seed,
        index=first + place,
        wrong=own or f"beside {len(world) - 1} others of its block: {wrong}",
        small=small,
        small_wrong=str(check(small)),
    )
