"""A program of two ranks: rank 1 stays away from an exchange, rank 0 says so and ends; meanwhile rank 1 ends too.

    python rank_that_ends.py RANK FOLDER

At its very end rank 0 keeps the interpreter to itself for a while, so that what other threads want of it then comes too
late. What it prints as it ends rank 1 has as its input, and waits for.
"""

import atexit
import ctypes
import os
import sys
import time

atexit.register(ctypes.PyDLL(None).usleep, 900_000)  # the first to be registered is the last to be called

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from trimtab.dispatch.all_to_all import AllToAll  # noqa: E402
from trimtab.dispatch.transport import SplitSizes  # noqa: E402
from trimtab.errors import PhaseTimeout  # noqa: E402
from trimtab.guard.guard import Guard  # noqa: E402


def main(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    assert dist.group.WORLD is not None
    guard, splits = Guard(deadline=30.0), SplitSizes(outgoing=(1, 1), incoming=(1, 1))
    transport = AllToAll(dist.group.WORLD, guard=guard)
    transport.combine([torch.ones(2, 4)], splits, (2, 2))
    guard.deadline = 0.5  # from when both are there
    if rank == 1:
        print(sys.stdin.readline(), end="", flush=True)
        time.sleep(0.4)
        os._exit(0)
    try:
        transport.combine([torch.ones(2, 4)], splits, (2, 2))
    except PhaseTimeout as error:
        print(error.ranks, flush=True)
        sys.exit(3)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
