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
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass

import torch

from fuzz.cases import BLOCK, Case, case_of, worlds_of
from fuzz.check import check
from fuzz.shrink import shrink
from trimtab.errors import InputError
from trimtab.verify.ranks import forkserver, preload

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


@dataclass(frozen=True, kw_only=True)
class FuzzResult:
    """What a run did. cases: run to the end; worlds: how many worlds they ran in.

    seconds: wall clock; cpu_seconds: of all workers, without their start.
    """

    seed: int
    cases: int
    worlds: int
    seconds: float
    cpu_seconds: float
    failures: tuple[FuzzFailure, ...]


def run_fuzz(
    cases: int,
    seed: int = 0,
    workers: int | None = None,
    report: Report | None = None,
    *,
    within: Within = nullcontext,
) -> FuzzResult:
    """Run cases 0 .. `cases` - 1 of `seed`, up to the first world with one that fails.

    Args:
        workers: processes; by default one a core, 0 for this process.
        report: called with (cases done, failures) from time to time.
        within: a module-level function that makes a context which every case runs in, such as one with a fault
            planted: the fuzz must find it.

    Raises:
        InputError: a negative number of cases or workers.
    """
    workers = (os.cpu_count() or 1) if workers is None else workers
    if cases < 0 or workers < 0:
        raise InputError(f"{cases} cases on {workers} workers: neither may be negative")
    start = time.perf_counter()
    blocks = range(-(-cases // BLOCK))
    chunks = [blocks[i : i + CHUNK] for i in range(0, len(blocks), CHUNK)]
    done = worlds = 0
    cpu_seconds = 0.0
    failures: list[FuzzFailure] = []
    with closing(_parts(chunks, cases, seed, workers, within)) as parts:
        for part in parts:
            done, worlds, cpu_seconds = done + part.cases, worlds + part.worlds, cpu_seconds + part.cpu_seconds
            failures += part.failures
            if report is not None:
                report(done, len(failures))
            if failures:
                break
    return FuzzResult(
        seed=seed,
        cases=done,
        worlds=worlds,
        seconds=time.perf_counter() - start,
        cpu_seconds=cpu_seconds,
        failures=tuple(failures),
    )


def parse_case(text: str) -> tuple[int, int]:
    """The seed and the number of a case, written SEED:INDEX.

    Raises:
        InputError: written otherwise.
    """
    found = re.fullmatch(r"(-?\d+):(\d+)", text.strip())
    if found is None:
        raise InputError(f"{text!r} is no fuzz case: write SEED:INDEX, two whole numbers, as the failure shows them")
    return int(found[1]), int(found[2])


def run_case(seed: int, index: int) -> FuzzFailure | None:
    """Case `index` of `seed` alone, then beside the others of its block; the failure, if there is one."""
    if index < 0:
        raise InputError(f"case {index}: cases are numbered from 0")
    case = case_of(seed, index)
    worlds = [(case,), *(tuple(world) for world in worlds_of(seed, index // BLOCK) if case in world)]
    return next((found for world in worlds for found in _failures(seed, index, world)), None)


@dataclass(frozen=True, kw_only=True)
class _Part:
    cases: int
    worlds: int
    cpu_seconds: float
    failures: tuple[FuzzFailure, ...]


def _parts(chunks: list[range], cases: int, seed: int, workers: int, within: Within) -> Generator[_Part, None, None]:
    """The chunks' parts, in order, so that the first failure does not depend on timing."""
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


def _run_chunk(blocks: range, cases: int, seed: int, within: Within) -> _Part:
    """The blocks up to the first world that fails."""
    done = worlds = 0
    start = time.process_time()
    with within():
        for block in blocks:
            index = block * BLOCK
            for world in worlds_of(seed, block):
                world = world[: max(cases - index, 0)]
                if not world:
                    continue
                done, worlds = done + len(world), worlds + 1
                failures = tuple(_failures(seed, index, world))
                if failures:
                    return _Part(cases=done, worlds=worlds, cpu_seconds=time.process_time() - start, failures=failures)
                index += len(world)
    return _Part(cases=done, worlds=worlds, cpu_seconds=time.process_time() - start, failures=())


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
