"""Functions on real ranks over Gloo, with a deadline: a hang is a failure in seconds.

Ranks are forked from a server that has imported torch, but never run a backward, and has tested the kernels: they start
in milliseconds.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.util import get_temp_dir
from typing import Any

import torch
import torch.distributed as dist

LEAVES = 5.0
"""Seconds for a rank to end, once all have answered: with an exchange given up, its group may take longer."""
LONGEST = 71
"""Bytes of a folder for temporary files. A socket's path has 104 on macOS, 108 on Linux; Python's takes 33 of them."""
_PRELOAD = ["torch.distributed.tensor", "trimtab.moe", "trimtab.verify.tested_kernels"]


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
    return context


def run_ranks(fn: Callable[..., Any], ranks: int, *args: Any, deadline: float = 60.0) -> list[Any]:
    """`fn(*args)` on each of `ranks` ranks of a Gloo group; what each returned, by rank.

    `fn` is a module-level function. Raises AssertionError with the tracebacks if a rank fails or time runs out.
    """
    context = forkserver()
    pipes, processes = [], []
    answers: list[Any] = []
    problems: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            work = (fn, rank, ranks, os.path.join(folder, "store"), deadline, args, theirs)
            process = context.Process(target=_rank_main, args=work, daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        end = time.monotonic() + deadline
        for rank, pipe in enumerate(pipes):
            try:
                if not pipe.poll(2.0 if problems else max(0.0, end - time.monotonic())):
                    problems.append(f"rank {rank}: no answer within {deadline} s")
                    continue
                good, answer = pipe.recv()
            except EOFError:
                good, answer = False, "process died"
            if good:
                answers.append(torch.load(io.BytesIO(answer), weights_only=False))
            else:
                problems.append(f"rank {rank}: {answer}")
        for pipe in pipes:
            pipe.close()  # all have answered
        for process in processes:
            process.join(0.0 if problems else LEAVES)
            process.kill()
            process.join()
    assert not problems, "\n".join(problems)
    return answers


def _rank_main(
    fn: Callable[..., Any],
    rank: int,
    ranks: int,
    store: str,
    deadline: float,
    args: tuple[Any, ...],
    pipe: Connection,
) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    where, timeout = f"file://{store}", timedelta(seconds=deadline)
    try:
        dist.init_process_group("gloo", init_method=where, rank=rank, world_size=ranks, timeout=timeout)
        buffer = io.BytesIO()
        torch.save(fn(*args), buffer)
        pipe.send((True, buffer.getvalue()))
        pipe.poll(deadline)  # nobody leaves while a peer may still talk to it; a barrier may wait for one given up
        dist.destroy_process_group()
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    finally:
        pipe.close()
