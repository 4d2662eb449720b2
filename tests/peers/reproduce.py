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
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

from peers.preludes import PRELUDES
from peers.registry import ROOT

if TYPE_CHECKING:
    from peers.failures import Failure

LONGEST = 220
"""Characters of an error that are shown."""
PATIENCE = 12.0
"""Seconds after which a rank that says nothing hangs; 3 once another has raised."""
START = 120.0
"""Seconds that a rank has to begin."""


VERSIONS = {(): "Megatron-Core 0.16", ("megatron-0.19",): "Megatron-Core 0.19"}
"""What is in front of the path, and what it is."""


def reproduce_all(failures: Sequence[Failure]) -> tuple[dict[str, dict[str, list[str]]], int]:
    """Run them, of each version of a peer; what the ranks ended with, by failure and version, and 1 where one ended
    otherwise than is expected."""
    seen: dict[str, dict[str, list[str]]] = {}
    missed = 0
    batches: dict[tuple[str, tuple[str, ...]], list[tuple[Failure, bool]]] = {}
    for failure in failures:
        for folders in VERSIONS if failure.prelude == "megatron" else (failure.folders,):
            batch = batches.setdefault((failure.prelude, folders), [])
            batch += [(failure, False), *([(failure, True)] if failure.ours else [])]
    for (prelude, folders), batch in batches.items():
        if absent := [folder for folder in folders if not (ROOT / folder).exists()]:
            print(f"not reproduced, {', '.join(absent)} is not in .peers: {', '.join(f.id for f, _ in batch)}")
            continue
        for (failure, ours), found in zip(batch, run_all(batch, folders), strict=True):
            version = VERSIONS[folders] if prelude == "megatron" else "as it is"
            label = f"{version}, with trimtab" if ours else version
            seen.setdefault(failure.id, {})[label] = found
            for said in failure.missed(found, ours=ours, version=version.split()[-1]):
                print(f"{failure.id}, {label}: {said}")
                missed = 1
            print(f"{failure.id}, {label}: {found}", flush=True)
    return seen, missed


def run_all(asked: Sequence[tuple[Failure, bool]], folders: tuple[str, ...] = ()) -> list[list[str]]:
    """What each rank ended with, of failures that have a prelude in common, with trimtab where the second of a pair
    says so. All in one Python of their own, which imports once."""
    places = [str(ROOT.parent / "tests"), *(str(ROOT / name) for name in folders), os.environ.get("PYTHONPATH", "")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, places)), "OMP_NUM_THREADS": "1"}
    prelude = asked[0][0].prelude
    work = [(len(f.ours if ours else f.expected), ours, f.lines) for f, ours in asked]
    done = subprocess.run(
        [sys.executable, "-m", "peers.reproduce", prelude], input=json.dumps(work), env=env, capture_output=True,
        text=True, timeout=400.0, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"reproductions of {prelude} did not run: {done.stderr.strip().splitlines()[-1]}")
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
