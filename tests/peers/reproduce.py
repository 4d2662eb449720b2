"""Failures outside of the ledger: a few lines on one or more processes, without trimtab; what each process ends with.

Lines run after those of a prelude, with `rank` and `world` set and Gloo begun where there are several. Ranks wait for
each other at the end, or for `PATIENCE`, as they would in training.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from peers.fetch import ROOT
from peers.preludes import PRELUDES

LONGEST = 220
"""Characters of an error that are shown."""
PATIENCE = 12.0
"""Seconds after which a rank that says nothing hangs; 3 once another has raised."""
START = 120.0
"""Seconds that a rank has to begin."""


@dataclass(frozen=True, kw_only=True)
class Reproduction:
    """prelude: whose. lines: what runs, two as a rule. expected: a pattern for what each rank ends with, in turn.

    folders: of `.peers`. ours: run a second time with trimtab in Megatron's layer, and what each rank ends with there.
    fails: of Megatron's versions those in which it does; in the others all ranks end.
    """

    prelude: str
    lines: str
    expected: Sequence[str]
    folders: tuple[str, ...] = ()
    ours: Sequence[str] = ()
    fails: tuple[str, ...] = ()

    def missed(self, found: Sequence[str], *, ours: bool = False, version: str = "") -> list[str]:
        """What did not come out as expected."""
        wanted = self.ours if ours else self.expected
        if self.fails and version and version not in self.fails and not ours:
            wanted = ["^ends"] * len(wanted)
        pairs = enumerate(zip(wanted, found, strict=True))
        return [f"rank {rank}: expected {w!r}, found {f!r}" for rank, (w, f) in pairs if not re.search(w, f)]


def run_all(
    asked: Sequence[tuple[Reproduction, bool]], *, folders: tuple[str, ...] = (), limit: float = 400.0
) -> list[list[str]]:
    """What each rank ended with, of reproductions that have a prelude and folders in common (or `folders` instead),
    with trimtab where the second of a pair says so. All in one Python of their own, which imports once."""
    (first, _), *_ = asked
    tests = str(ROOT.parent / "tests")
    places = [tests, *(str(ROOT / name) for name in folders or first.folders), os.environ.get("PYTHONPATH", "")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, places)), "OMP_NUM_THREADS": "1"}
    work = [(len(r.ours if ours else r.expected), ours, r.lines) for r, ours in asked]
    done = subprocess.run(
        [sys.executable, "-m", "peers.reproduce", first.prelude], input=json.dumps(work), env=env, capture_output=True,
        text=True, timeout=limit, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"reproductions of {first.prelude} did not run: {done.stderr.strip().splitlines()[-1]}")
    found: list[list[str]] = json.loads(done.stdout.splitlines()[-1])
    return found


def run_here(names: dict[str, object], ranks: int, lines: str) -> list[str]:
    """What `ranks` processes end with that are forked from this one. names: what the prelude has left."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(ranks):
            mine, theirs = context.Pipe()
            process = context.Process(target=_rank, args=(rank, ranks, folder, names, lines, theirs), daemon=True)
            process.start()
            theirs.close()
            pipes.append(mine)
            processes.append(process)
        for pipe in pipes:  # patience begins when all have: a start takes what the machine leaves it
            with contextlib.suppress(EOFError):
                _ = pipe.poll(START) and pipe.recv()
        ends, raised = [""] * ranks, False
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end and not all(ends):
            for rank, pipe in enumerate(pipes):
                if not ends[rank] and pipe.poll(0.02):
                    ends[rank] = _heard(pipe, processes[rank], Path(folder, str(rank)))
            if not raised and any(e and not e.startswith("ends") for e in ends):
                raised, end = True, min(end, time.monotonic() + 3.0)
        for process in processes:
            process.kill()
            process.join()
    silent = "waits for it" if raised else f"hangs: no end within {PATIENCE:g} s"
    return [e or silent for e in ends]


def plain(said: str) -> str:
    """Without what changes from run to run: addresses, ports, and where somebody's build had its sources."""
    said = re.sub(r"\[/__w/\S*/(\S+\.cc:\d+)\]|/__w/\S*/(\S+\.cc:\d+)", lambda m: m[1] or m[2], said)
    return re.sub(r"(\[127\.0\.0\.1\]):\d+", r"\1", re.sub(r" object at 0x[0-9a-f]+", "", said))[:LONGEST]


def _heard(pipe: Connection, process: multiprocessing.process.BaseProcess, log: Path) -> str:
    try:
        return str(pipe.recv())
    except EOFError:
        process.join(5.0)
        code = process.exitcode
        last = next((line for line in log.read_text(errors="replace").splitlines() if "what():" in line), "")
        how = "dies" if code is None or code >= 0 else f"dies: {signal.Signals(-code).name}"
        return f"{how}, {plain(last.strip())}" if last else how


def _rank(rank: int, ranks: int, folder: str, names: dict[str, object], lines: str, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    torch.manual_seed(rank)
    with open(f"{folder}/{rank}", "w") as log:  # what C++ says when it ends a process
        os.dup2(log.fileno(), sys.stderr.fileno())
    patience = datetime.timedelta(seconds=10 * PATIENCE)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks, timeout=patience)
    names["rank"] = rank
    pipe.send("begun")
    try:
        exec(lines, names)
        said = "ends" + (f": {names['said']}" if "said" in names else "")
    except Exception as error:
        said = plain(f"{type(error).__name__}: {(str(error) or traceback.format_exc()).splitlines()[0]}")
    pipe.send(said)
    time.sleep(10 * PATIENCE)  # as in training: nobody leaves the others alone


def main() -> None:
    """(ranks, ours, lines) from the standard input; what each rank of each ended with to the standard output."""
    names: dict[str, object] = {}
    exec(PRELUDES[sys.argv[1]], names)
    asked = json.load(sys.stdin)
    found = []
    for ranks, ours, lines in asked:
        names |= {"world": ranks, "ours": ours}  # the prelude's functions see them
        found.append(run_here(names, ranks, lines))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
