"""Functions on real ranks over Gloo, with a deadline: a hang is a failure in seconds."""

from __future__ import annotations

import io
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from helpers.forks import start

LEAVES = 5.0
"""Seconds for a rank to end, once all have answered: with an exchange given up, its group may take longer."""


def packed(value: Any) -> bytes:
    """Tensors that go to ranks in one piece: each by itself would take a file descriptor."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def unpacked(value: bytes) -> Any:
    return torch.load(io.BytesIO(value), weights_only=False)


def run_ranks(fn: Callable[..., Any], ranks: int, *args: Any, deadline: float = 60.0) -> list[Any]:
    """`fn(*args)` on each of `ranks` ranks of a Gloo group; what each returned, by rank.

    `fn` is a module-level function. Raises AssertionError with the tracebacks if a rank fails or time runs out.
    """
    pipes, processes = [], []
    answers: list[Any] = []
    problems: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(ranks):
            ours, theirs = Pipe()
            work = (fn, rank, ranks, os.path.join(folder, "store"), deadline, args)
            processes.append(start(_rank_main, *work, pipes=[theirs]))
            theirs.close()
            pipes.append(ours)
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
                answers.append(unpacked(answer))
            else:
                problems.append(f"rank {rank}: {answer}")
        for pipe in pipes:
            pipe.close()  # all have answered
        for process in processes:
            process.join(0.0 if problems else LEAVES)
            process.kill()
    assert not problems, "\n".join(problems)
    return answers


def meet(place: str) -> None:
    """All ranks have come to `place`. No collective, which a guard would watch, or which one given up would hold up."""
    come(place)
    for rank in range(dist.get_world_size()):
        wait_until(place, rank)


def come(place: str) -> None:
    """This rank has come to `place`."""
    dist.group.WORLD.get_group_store().set(f"{place}/{dist.get_rank()}", "")


def wait_until(place: str, rank: int) -> None:
    """`rank` has come to `place`."""
    dist.group.WORLD.get_group_store().wait([f"{place}/{rank}"], timedelta(seconds=60))


def _rank_main(
    fn: Callable[..., Any], rank: int, ranks: int, store: str, deadline: float, args: tuple[Any, ...],
    *pipes: Connection,
) -> None:  # fmt: skip
    """The last pipe is for what `fn` returns; others are its first arguments."""
    *own, pipe = pipes
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    where, timeout = f"file://{store}", timedelta(seconds=deadline)
    try:
        dist.init_process_group("gloo", init_method=where, rank=rank, world_size=ranks, timeout=timeout)
        pipe.send((True, packed(fn(*own, *args))))
        pipe.poll(deadline)  # nobody leaves while a peer may still talk to it; a barrier may wait for one given up
        dist.destroy_process_group()
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    finally:
        pipe.close()
