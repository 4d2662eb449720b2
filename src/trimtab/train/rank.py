"""The entry of one rank among several: die quietly when told to, and leave word of what went wrong.

`python -m trimtab.train.rank CONFIG_JSON LAUNCHER` is what the launcher starts; under torchrun the command joins here.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import NoReturn

from trimtab.errors import PeerLost, PhaseTimeout, TrimtabError, first_line
from trimtab.integrations.transformers import import_transformers
from trimtab.train.checks import check_options
from trimtab.train.config import TrainConfig
from trimtab.train.report import LOGS


def log_file(out: Path, rank: int) -> Path:
    """Where a rank's output and traceback go."""
    return out / LOGS / f"rank-{rank}.log"


def run_rank(config: TrainConfig, launcher: int | None = None) -> None:
    """Run this process's rank of a group that torchrun, or the launcher of that process id, started; never returns
    after a failure."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)  # whoever stops the group speaks for it
    try:
        if launcher is None:
            check_options(config, int(os.environ["WORLD_SIZE"]))
            import_transformers("trimtab train")
        else:
            _die_with(launcher)
        from trimtab.train.session import run_session

        run_session(config, prepared=launcher is not None)
    except Exception as error:
        _fail(error, config, launched=launcher is not None)


def _fail(error: Exception, config: TrainConfig, *, launched: bool) -> NoReturn:
    rank = int(os.environ.get("RANK", 0))
    expected = isinstance(error, TrimtabError)
    message = str(error) if expected else first_line(error, typed=True)
    trace = traceback.format_exc()
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        follows = isinstance(error, (PeerLost, PhaseTimeout))
        word = {"message": message, "timestamp": int(time.time()), "expected": expected, "follows": follows}
        Path(path).write_text(json.dumps(word), encoding="utf-8")
    if not expected and (folder := log_file(Path(config.out), rank).parent).is_dir():
        with log_file(folder.parent, rank).open("a", encoding="utf-8") as file:
            file.write(trace)
    if config.debug:
        sys.stderr.write(trace)
    # What the user got wrong is wrong on every rank of a machine: once is enough.
    if not launched and (int(os.environ.get("LOCAL_RANK", rank)) == 0 or not expected):
        sys.stderr.write(f"trimtab: {message if expected else f'rank {rank}: {message}'}\n")
    sys.stderr.flush()
    os._exit(1)  # the process group's threads may wait for other ranks; do not wait with them


def _die_with(parent: int) -> None:
    """End this process when its launcher is gone, even if it was killed, and before this rank came up at that."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    run_rank(TrainConfig.from_json(sys.argv[1]), int(sys.argv[2]))
