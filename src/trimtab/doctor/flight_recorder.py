"""PyTorch's Flight Recorder: what each rank asked of its process groups and what of it is done, written and read.

A dump is a pickle or JSON of {version, pg_config, entries: [...]}, one file per rank. NCCL writes its own when its
watchdog times out; Gloo records, in torch 2.13 or a build with CUDA, and writes nothing by itself: `dump_on_signal`
does, on any backend. JSON dumps have no stack frames.

A pickle can run any code while it is read, as torch's own `torch.distributed.flight_recorder` reads it: only builtin
containers and numbers are let through.

Format: pytorch/torch/csrc/distributed/c10d/FlightRecorderDetail.hpp, version 2.x.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from trimtab.atomic_write import whole
from trimtab.errors import BackendError, InputError


class Frame(NamedTuple):
    """One line of a stack, innermost first."""

    file: str
    name: str
    line: int


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One collective as one rank recorded it.

    group: name of the process group, desc its description. seq: its number in the group, the same on every rank.
    op: such as "all_to_all". done: it is over; on Gloo also one that failed.
    """

    rank: int
    group: str
    desc: str
    seq: int
    op: str
    done: bool
    sizes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    frames: tuple[Frame, ...]
    created_ns: int


@dataclass(frozen=True, kw_only=True)
class Trace:
    """One rank's dump. members: global ranks of each process group by name, where the backend records them."""

    rank: int
    entries: tuple[Entry, ...]
    members: dict[str, tuple[int, ...]]


_LIKELY = re.compile(r"(trace|rank).*\d(\.(json|pickle|pkl))?$")
"""Names that are taken from a folder."""


class _Plain(pickle.Unpickler):
    """Unpickles builtin containers and numbers alone."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise InputError(
            f"it asks for {module}.{name}, and reading it in full would run that. Make the dump again with torch "
            "itself, or with trimtab.doctor.flight_recorder, and do not unpickle this one"
        )


def read_traces(paths: Sequence[Path]) -> list[Trace]:
    """The dumps at `paths`, files or folders of them, by rank.

    Raises:
        InputError: nothing there, a file that is no dump or asks for code when unpickled, two files of one rank.
    """
    files = [file for path in paths for file in (sorted(path.iterdir()) if path.is_dir() else [path])]
    files = [file for file in files if file in paths or (file.is_file() and _LIKELY.search(file.name))]
    if not files:
        raise InputError(f"no Flight Recorder dumps (such as nccl_trace_rank_0) in {', '.join(map(str, paths))}")
    by_rank: dict[int, Trace] = {}
    for trace in map(read_trace, files):
        if trace.rank in by_rank:
            raise InputError(f"rank {trace.rank} has more than one dump: keep the files of one job and one moment only")
        by_rank[trace.rank] = trace
    return [by_rank[rank] for rank in sorted(by_rank)]


def read_trace(path: Path) -> Trace:
    """One dump, pickle or JSON; the rank is the number at the end of its name."""
    numbered = re.search(r"(\d+)(\.(json|pickle|pkl))?$", path.name)
    if not path.exists():
        raise InputError(f"{path}: no such file or folder")
    if numbered is None:
        raise InputError(f"{path}: a dump's name ends in its rank, such as nccl_trace_rank_0; rename it")
    rank = int(numbered[1])
    try:
        data = path.read_bytes()
        dump = json.loads(data) if data[:1] == b"{" else _Plain(io.BytesIO(data)).load()
        entries = tuple(_entry(rank, entry) for entry in dump["entries"] if not entry.get("is_p2p"))
        members = {str(name): _ranks(group) for name, group in dump.get("pg_config", {}).items()}
        return Trace(rank=rank, entries=entries, members=members)
    except InputError as error:
        raise InputError(f"{path} is refused: {error}") from error
    except Exception as error:  # whatever a file that is no dump makes of it
        raise InputError(f"{path} is not a Flight Recorder dump ({type(error).__name__}: {error})") from error


def _entry(rank: int, e: dict[str, Any]) -> Entry:
    (group, desc), name = e["process_group"], str(e["profiling_name"])
    return Entry(
        rank=rank,
        group=str(group),
        desc=str(desc),
        seq=int(e["collective_seq_id"]),
        op=name.rpartition(":")[2],
        # NCCL knows states, and retires what it gave up too; Gloo stays at "scheduled" and retires what is over.
        done=e["state"] == "completed" if name.startswith("nccl:") else bool(e.get("retired")),
        sizes=tuple(tuple(int(n) for n in size) for size in e["input_sizes"]),
        dtypes=tuple(str(dtype) for dtype in e.get("input_dtypes", ())),
        frames=tuple(Frame(str(f["filename"]), str(f["name"]), int(f["line"])) for f in e.get("frames", ())),
        created_ns=int(e.get("time_created_ns") or 0),
    )


def _ranks(group: dict[str, Any] | list[int]) -> tuple[int, ...]:
    """The ranks of a group, written as a list or as the text of one."""
    ranks = group["ranks"] if isinstance(group, dict) else group
    return tuple(int(rank) for rank in (re.findall(r"\d+", ranks) if isinstance(ranks, str) else ranks))


def dump(folder: str | os.PathLike[str], rank: int | None = None) -> Path:
    """Write this process's dump to `folder`/trimtab_trace_rank_N and return its path. No communication.

    Args:
        rank: N; by default the environment's RANK, or 0.

    Raises:
        BackendError: this torch has no recorder.
    """
    record = _recorder()
    path = Path(folder) / f"trimtab_trace_rank_{os.environ.get('RANK', '0') if rank is None else rank}"
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole(path) as unfinished:
        unfinished.write_bytes(record())
    return path


def _recorder() -> Callable[[], bytes]:
    """torch's function that gives the dump. Dumps are read without torch."""
    import torch

    c10d = getattr(torch._C, "_distributed_c10d", None)
    for name in ("_dump_nccl_trace", "_dump_fr_trace") if torch.cuda.is_available() else ("_dump_fr_trace",):
        if (record := getattr(c10d, name, None)) is not None:
            return record  # type: ignore[no-any-return]
    raise BackendError(
        f"torch {torch.__version__} has no Flight Recorder that can be read here: take torch 2.13, or a build with CUDA"
    )


def dump_on_signal(folder: str | os.PathLike[str], number: int = signal.SIGUSR2, rank: int | None = None) -> None:
    """From now on `kill -USR2 PID` writes a dump to `folder`, whatever the main thread does. Call it in that thread.

    Python runs signal handlers between two of its own instructions, which a thread stuck in a collective never
    reaches; the wake-up pipe is written at once, and a thread waits at its other end. A dump that cannot be written is
    said on stderr, and the next signal tries again.

    Raises:
        BackendError: this torch has no recorder.
    """
    _recorder()
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    signal.signal(number, lambda *_: None)
    before = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)

    def watch(kept: socket.socket) -> None:
        while data := ours.recv(64):
            if before >= 0:
                os.write(before, data)  # whoever listened before hears it too
            if number in data:
                try:
                    dump(folder, rank)
                except OSError as error:
                    print(f"trimtab: no Flight Recorder dump in {folder}: {error}", file=sys.stderr, flush=True)
        kept.close()

    threading.Thread(target=watch, args=(theirs,), name="trimtab flight recorder", daemon=True).start()
