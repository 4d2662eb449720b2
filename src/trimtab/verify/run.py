"""A run: on this machine, in pools of ranks that are started anew after one that broke, or on the ranks of torchrun."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from multiprocessing.context import ForkServerContext
from multiprocessing.forkserver import ensure_running
from multiprocessing.util import get_temp_dir
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore

from trimtab.processes import leave_group
from trimtab.verify.cases import Case
from trimtab.verify.collect import Verdict, collect
from trimtab.verify.implementation import get_implementation, home_of
from trimtab.verify.on_rank import COLLECTORS, run_on_rank

LONGEST = 71
"""Bytes of a folder for temporary files. A socket's path has 104 on macOS, 108 on Linux; Python's takes 33 of them."""
_PRELOAD = ["torch.distributed.tensor", "trimtab.moe", "trimtab.verify.run", "trimtab.verify.tested_kernels"]
"""Modules that the server imports before it forks, so that ranks start in milliseconds."""
Around = Callable[[], contextlib.AbstractContextManager[None]]
"""Entered by each rank around its cases; picklable."""
Report = Callable[[Verdict], None]


def run_local(
    cases: Sequence[Case], implementation: str, *, deadline: float, repeat: int = 1,
    around: Around = contextlib.nullcontext, anew: bool = False,
) -> Iterator[Verdict]:  # fmt: skip
    """Verdicts, in the order of `cases` within those of one number of ranks. Cases that can't be asked for come first.

    A case that hangs or kills its ranks costs its own verdict and a new pool, no more; with `anew` one that raises,
    too: its groups may be out of step.
    """
    for ranks, group in groupby(cases, key=lambda case: case.topology.ranks):
        asked, lacking = _asked(implementation, list(group))
        yield from lacking
        while asked:
            pool = _pool(ranks, asked, implementation, repeat, around)
            with pool as (store, died, last_words):
                for verdict in collect(asked, store, deadline, died=died, said=last_words):
                    asked = asked[1:]
                    yield verdict
                    if anew and verdict.status in ("error", "refused"):
                        break


def run_cluster(
    cases: Sequence[Case], implementation: str, *, deadline: float, repeat: int, report: Report,
    finish: Callable[[], int],
) -> int:  # fmt: skip
    """Run the cases on the ranks that torchrun has started, with their devices and backend. Every rank calls this.

    Rank 0 collects in a thread, from the store: when a case hangs, in whatever collective, the run still ends and says
    so. Returns the exit code; `report` and `finish` run on rank 0 alone, which raises what they raise.
    """
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    store, rank, ranks = next(dist.rendezvous("env://", timeout=COLLECTORS))
    made = PrefixStore("ranks", store)
    dist.init_process_group("nccl" if cuda else "gloo", store=made, rank=rank, world_size=ranks, timeout=COLLECTORS)
    store = PrefixStore("trimtab-verify", store)
    asked, lacking = _asked(implementation, cases)

    def collect_all(mine: Store) -> int:
        for verdict in lacking:
            report(verdict)
        for verdict in collect(asked, mine, deadline, said=lambda _: "the cases behind it were not run"):
            report(verdict)
            if verdict.stalled:
                try:
                    finish()
                except Exception as error:
                    print(f"trimtab: {error}", file=sys.stderr, flush=True)
                finally:
                    os._exit(1)  # this process may itself be in the collective that hangs; torchrun ends the others
        return finish()

    with ThreadPoolExecutor(1) as pool:  # which is waited for
        mine = store.clone()  # type: ignore[attr-defined]  # a client serves one thread at a time
        code = pool.submit(collect_all, mine) if rank == 0 else None
        run_on_rank(asked, get_implementation(implementation), store, device, repeat)
    dist.barrier()
    leave_group()
    return 0 if code is None else code.result()


def _asked(implementation: str, cases: Sequence[Case]) -> tuple[list[tuple[int, Case]], list[Verdict]]:
    """(numbered cases that the implementation can be asked for, verdicts on the others)."""
    judged, asked, lacking = get_implementation(implementation), [], []
    for index, case in enumerate(cases):
        reason = judged.lacks(case.topology, case.pattern)
        if reason is None:
            asked.append((index, case))
        else:
            lacking.append(Verdict(case=case, status="lacking", details=[reason]))
    return asked, lacking


@contextlib.contextmanager
def _pool(
    ranks: int, cases: Sequence[tuple[int, Case]], implementation: str, repeat: int, around: Around
) -> Iterator[tuple[Store, Callable[[], list[int]], Callable[[list[int]], str]]]:
    """Start `ranks` processes on `cases`; (the store of their answers, which of them died, their last words)."""
    preload(home_of(implementation)[0])
    context = forkserver()
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(prefix="trimtab-") as folder:
        logs = [Path(folder, str(rank)) for rank in range(ranks)]
        work = (ranks, store.port, cases, implementation, repeat, around)
        processes = [
            context.Process(target=_rank_main, args=(rank, log, *work), daemon=True) for rank, log in enumerate(logs)
        ]

        def died() -> list[int]:
            return [rank for rank, process in enumerate(processes) if process.exitcode is not None]

        def last_words(silent: list[int]) -> str:
            said = [_last_words(processes[rank].exitcode, logs[rank]) for rank in silent]
            return "; ".join(filter(None, said))

        try:
            for process in processes:
                process.start()
            yield store, died, last_words
        finally:
            for process in processes:
                if process.pid is not None:  # a signal may come before it was started
                    process.kill()
                    process.join()


def preload(*modules: str) -> None:
    """Have the server import these, too, before it forks. Of no effect once anything has been forked."""
    _PRELOAD.extend(module for module in modules if module not in _PRELOAD)


def forkserver() -> ForkServerContext:
    """The context that forks from the server. Where TMPDIR is too long for its socket, as job managers' may be, the
    socket alone is elsewhere: before 3.14, Python ends with "AF_UNIX path too long"."""
    before = tempfile.tempdir
    if len(os.fsencode(tempfile.gettempdir())) > LONGEST:
        tempfile.tempdir = "/tmp"
    get_temp_dir()  # made once in a process, which removes it when it ends
    tempfile.tempdir = before
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    before_path = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # before 3.13 the server is told of it in no other way
    ensure_running()
    if before_path is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before_path
    return context


def _last_words(code: int | None, log: Path) -> str:
    """The exit of a process, if it ended, and the last line that it printed."""
    how = "" if code is None else signal.Signals(-code).name if code < 0 else f"exit code {code}"
    lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    return ", ".join(filter(None, (how, *lines[-1:])))


def _rank_main(
    rank: int, log: Path, ranks: int, port: int, cases: Sequence[tuple[int, Case]], implementation: str, repeat: int,
    around: Around,
) -> None:  # fmt: skip
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
    store.wait(["end"], COLLECTORS)  # to be killed, or left alone: nobody leaves while a peer may still talk to it
