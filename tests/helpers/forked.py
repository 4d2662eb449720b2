"""Whole runs in ranks that are forked: what a rank under torchrun does, without its start."""

from __future__ import annotations

import faulthandler
import os
import sys
import time
from pathlib import Path
from typing import Any

from helpers.forks import start
from helpers.ports import free_port
from trimtab.train.config import TrainConfig

DEADLINE = 240.0


def run_forked(config: TrainConfig, ranks: int, absent: str = "", plain: bool = False) -> None:
    """Run `trimtab train` with these options on so many ranks; fails with the ranks' words if one of them does.

    absent: a module that they cannot import. plain: their experts are packed only if the options say so.
    """
    port = free_port()
    log = Path(config.out).with_name(f"{Path(config.out).name}-log")
    processes = [start(_rank, config, rank, ranks, port, str(log), absent, plain) for rank in range(ranks)]
    end = time.monotonic() + DEADLINE
    for process in processes:
        process.join(max(0.1, end - time.monotonic()))
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    assert codes == [0] * ranks, (codes, log.read_text())


def _rank(config: TrainConfig, rank: int, ranks: int, port: int, log: str, absent: str, plain: bool) -> None:
    if absent:
        sys.modules[absent] = None  # type: ignore[assignment]
    import torch

    from trimtab.train import session
    from trimtab.train.plan import plan_run

    if plain:
        session.packed = lambda config, *_: config
    load: Any = session.load_model

    def told(*given: Any) -> Any:
        model = load(*given)
        print("experts are", {getattr(module, "codes_of_experts", ("plain",))[0] for module in model.modules()})
        return model

    session.load_model = told
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(handle, stream)
    faulthandler.dump_traceback_later(DEADLINE - 20, file=handle)  # where a rank hangs is in its words
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "HF_HUB_OFFLINE": "1"}
    session.run_session(plan_run(config, ranks), prepared=False)
