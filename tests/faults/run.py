"""Faults: kill, freeze, delay or derail one rank at a chosen place of a small MoE, and see what the others say.

Each case runs on a few local processes over Gloo, which end as a program of their own would, interpreter and all, so
that a guard whose error is right but whose process never ends is found out too.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from faults.cases import Fault, FaultResult, Outcome, problems_of
from faults.on_rank import fault_main
from helpers.forks import start
from helpers.ports import free_port

LIMIT = 40.0
"""Seconds after which all processes of a case are killed."""


def run_fault(fault: Fault, deadline: float, slack: float) -> FaultResult:
    """Run one case.

    deadline: of the guard. slack: added to the times that are allowed, for a loaded machine. Both in seconds.
    """
    pipes: list[Connection] = []
    processes = []
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{folder}/store" if fault.store == "file" else f"tcp://127.0.0.1:{free_port()}"
        for rank in range(fault.ranks):
            ours, theirs = Pipe(duplex=False)
            processes.append(start(fault_main, fault, rank, store, deadline, Path(folder, str(rank)), pipes=[theirs]))
            theirs.close()
            pipes.append(ours)
        end = time.monotonic() + LIMIT
        stays = {fault.rank} if fault.kind in ("kill", "freeze") else set()
        codes: dict[int, tuple[int | None, float]] = {}
        while len(codes) < fault.ranks and time.monotonic() < end:
            for rank, process in enumerate(processes):
                if rank in codes:
                    continue
                code = process.exitcode
                if code is not None:
                    codes[rank] = (code, time.monotonic())
            if stays | set(codes) >= set(range(fault.ranks)):
                break
            time.sleep(0.01)
        for process in processes:
            process.kill()
        told = [_all_of(pipe) for pipe in pipes]
        said = [f"rank {rank} said {words}" for rank in range(fault.ranks) if (words := _said(Path(folder, str(rank))))]
    when = next((m["at"] for messages in told for m in messages if m["what"] == "fault"), None)
    outcomes = tuple(
        _outcome(rank, messages, when, codes.get(rank, (None, 0.0)))
        for rank, messages in enumerate(told)
        if rank not in stays
    )
    problems = problems_of(fault, outcomes, when, deadline, slack)
    return FaultResult(fault=fault, outcomes=outcomes, problems=(*problems, *(said if problems else ())))


def run_faults(
    cases: Sequence[Fault],
    report: Callable[[FaultResult], None],
    *,
    jobs: int = 2,
    deadline: float = 2.0,
    slack: float = 0.0,
) -> list[FaultResult]:
    """All cases, `jobs` at a time; `report` hears of each as it ends, in order. Local processes only."""
    results = []
    with ThreadPoolExecutor(max_workers=jobs) as pool:
        for result in pool.map(lambda case: run_fault(case, deadline, slack), cases):
            results.append(result)
            report(result)
    return results


def _said(log: Path) -> str:
    """The last words of a rank, without what bindings say of objects that outlive the interpreter."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return " / ".join([line for line in lines if not line.startswith(("nanobind", " - ", "See https"))][-5:])


def _all_of(pipe: Connection) -> list[dict[str, Any]]:
    messages = []
    try:
        while pipe.poll(0):
            messages.append(pipe.recv())
    except (EOFError, OSError):
        pass
    return messages


def _outcome(rank: int, told: list[dict[str, Any]], when: float | None, end: tuple[int | None, float]) -> Outcome:
    code, ended = end
    for message in told:
        if message["what"] == "raised":
            at = message["at"]
            named = {key: message[key] for key in ("error", "message", "ranks", "phase", "layer")}
            seconds, leaving = at - (at if when is None else when), ended - at
            return Outcome(rank=rank, seconds=seconds, exit_code=code, exit_seconds=leaving, **named)
    return Outcome(rank=rank, exit_code=code)
