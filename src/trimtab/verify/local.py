"""A run on this machine: pools of ranks, one for each number of ranks, started anew after one that broke."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore

from trimtab.verify.adapters import get_implementation, home_of
from trimtab.verify.cases import Case
from trimtab.verify.collect import Verdict, collect
from trimtab.verify.forkserver import forkserver, preload
from trimtab.verify.on_rank import COLLECTORS, run_on_rank

Around = Callable[[], contextlib.AbstractContextManager[None]]
"""Entered by each rank around its cases; picklable."""

START = 60.0
"""Seconds that ranks may take to start."""


def run_local(
    cases: Sequence[Case],
    implementation: str,
    *,
    deadline: float,
    repeat: int = 1,
    around: Around = contextlib.nullcontext,
) -> Iterator[Verdict]:
    """Verdicts, in the order of `cases` within those of one number of ranks. Cases that can't be asked for come first.

    A case that hangs or kills its ranks costs its own verdict and a new pool, no more.
    """
    judged = get_implementation(implementation)
    for ranks, group in groupby(cases, key=lambda case: case.topology.ranks):
        asked: list[Case] = []
        for case in group:
            reason = judged.lacks(case.topology, case.pattern)
            if reason is not None:
                yield Verdict(case=case, status="lacking", details=[reason])
                continue
            asked.append(case)
        while asked:
            pool = _pool(ranks, asked, implementation, repeat, around)
            with contextlib.suppress(_Stalled), pool as (store, died, last_words):
                for verdict in collect(list(enumerate(asked)), store, deadline, START, died, last_words):
                    asked = asked[1:]
                    yield verdict
                    if verdict.stalled:
                        raise _Stalled


class _Stalled(Exception):
    """Ends a pool at once: its ranks answer nothing more."""


@contextlib.contextmanager
def _pool(
    ranks: int, cases: Sequence[Case], implementation: str, repeat: int, around: Around
) -> Iterator[tuple[Store, Callable[[], list[int]], Callable[[list[int]], str]]]:
    """`ranks` processes at work on `cases`: the store they answer in, which have died, what they said."""
    preload("trimtab.verify.local", home_of(implementation)[0])
    context = forkserver()
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(prefix="trimtab-") as folder:
        logs = [Path(folder, str(rank)) for rank in range(ranks)]
        work = (ranks, store.port, list(enumerate(cases)), implementation, repeat, around)
        processes = [
            context.Process(target=_rank_main, args=(rank, log, *work), daemon=True) for rank, log in enumerate(logs)
        ]

        def died() -> list[int]:
            """Who has gone: with code 0, too, for nobody leaves before all have answered."""
            return [rank for rank, process in enumerate(processes) if process.exitcode is not None]

        def last_words(silent: list[int]) -> str:
            said = [_last_words(processes[rank].exitcode, logs[rank]) for rank in silent]
            return "; ".join(filter(None, said))

        patience = 0.0  # for a caller that stops early
        try:
            for process in processes:
                process.start()
            yield store, died, last_words
            patience = 2.0
        finally:
            for process in processes:
                if process.pid is None:  # a signal came before it was started
                    continue
                broken = any(other.exitcode not in (None, 0) for other in processes)
                process.join(0.0 if broken else patience)
                process.kill()
                process.join()


def _last_words(code: int | None, log: Path) -> str:
    """How a process ended, if it did, and the last line that it said."""
    how = "" if code is None else signal.Signals(-code).name if code < 0 else f"exit code {code}"
    lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    return ", ".join(filter(None, (how, *lines[-1:])))


def _rank_main(
    rank: int,
    log: Path,
    ranks: int,
    port: int,
    cases: list[tuple[int, Case]],
    implementation: str,
    repeat: int,
    around: Around,
) -> None:
    try:
        with log.open("wb") as file:  # what C++ says when it ends a process goes to the verdict, not over the table
            os.dup2(file.fileno(), sys.stderr.fileno())
    except FileNotFoundError:  # a signal ended the run before this rank came to itself
        os._exit(1)
    torch.set_num_threads(1)
    store = TCPStore("localhost", port, is_master=False)
    made = PrefixStore("ranks", store)
    dist.init_process_group("gloo", store=made, rank=rank, world_size=ranks, timeout=COLLECTORS)
    with around():
        run_on_rank(cases, get_implementation(implementation), store, torch.device("cpu"), repeat)
    store.set(f"done/{rank}", "")
    store.wait([f"done/{other}" for other in range(ranks)])  # nobody leaves while a peer may still talk to it
    os._exit(0)
