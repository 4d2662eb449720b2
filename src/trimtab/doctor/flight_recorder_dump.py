"""Flight Recorder dumps on any backend, also of a process whose main thread is stuck in a collective.

NCCL writes its own when it times out; Gloo records, in torch 2.13 or a build with CUDA, and writes nothing by itself.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import torch

from trimtab.atomic_write import whole
from trimtab.errors import BackendError


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
    """torch's function that gives the dump."""
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
