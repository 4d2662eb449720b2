"""From one command to the right number of ranks: here, through PyTorch's elastic launcher, or under torchrun.

`python -m trimtab.train.launch CONFIG_JSON LAUNCHER STOP` is a rank that the launcher of that process id starts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import os
import select
import signal
import sys
import tempfile
import threading
import time
import traceback
import uuid
from pathlib import Path
from typing import Any, NoReturn

from trimtab.errors import ConfigError, PeerLost, PhaseTimeout, TrimtabError, first_line
from trimtab.extras import lacking
from trimtab.processes import Interrupted, cores, group_size, module_arguments, signals_raise, signals_told
from trimtab.train.autosave import TWICE, first_signal_noted
from trimtab.train.config import TrainConfig
from trimtab.train.plan import DATA, Plan, plan_run
from trimtab.train.report import LOGS
from trimtab.train.resume import advice

FOLLOWED = 3
"""The place of a failure that followed from another's."""


def launch(config: TrainConfig, nproc: int | None) -> None:
    """Run the training that `config` describes, on `nproc` local ranks or in the group that torchrun started.

    Raises TrimtabError for what a user can put right and for a rank that failed, Interrupted for a signal; all
    ranks are gone by then. With `data_report` or `dry_run` no rank is started, and nothing is written.
    """
    if nproc is not None and nproc < 1:
        raise ConfigError(f"--nproc {nproc}: must be at least 1")
    size = group_size(nproc)
    if size is not None and not config.asks:
        _run_rank(config)
        return
    with signals_raise():
        plan = plan_run(config, size or nproc or 1)
        if config.asks:
            if int(os.environ.get("RANK", 0)) == 0:
                _report(plan)
        else:
            import torch

            from trimtab.train.out_folder import make_room

            if torch.cuda.is_available() and (nproc or 1) > torch.cuda.device_count():
                raise ConfigError(f"--nproc {nproc}: this machine has {torch.cuda.device_count()} GPU(s)")
            with contextlib.closing(make_room(plan)):
                if nproc is None or nproc == 1:
                    from trimtab.train.session import run_session

                    run_session(plan, prepared=True)
                else:
                    _launch_ranks(plan, nproc)


def _report(plan: Plan) -> None:
    from trimtab.train.packing import prepare_data

    with tempfile.TemporaryDirectory(prefix="trimtab-") as scratch:
        plan = dataclasses.replace(plan, config=dataclasses.replace(plan.config, out=scratch))
        reports = prepare_data(plan.groups, plan.packer, plan.out / DATA, plan.draws)
        if plan.config.dry_run:
            print("\n".join(plan.with_steps().described()))
        for report in reports:
            print("\n".join([report.summary(), *report.details(plan.tokenizer)]))


def _launch_ranks(plan: Plan, nproc: int) -> None:
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    inherited = {"OMP_NUM_THREADS": str(max(1, cores() // nproc))}
    if not plan.config.debug:
        inherited["TORCH_CPP_LOG_LEVEL"] = "ERROR"
        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    os.environ.update({name: value for name, value in inherited.items() if name not in os.environ})
    came: list[int] = []
    with tempfile.TemporaryDirectory(prefix="trimtab-") as scratch:
        stop = Path(scratch) / "stop"
        elastic = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=nproc,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=0,
            signals_to_handle="SIGQUIT",  # ours raise, and ranks then get SIGTERM: silent even while they import
            logs_specs=_log_places(plan.out, Path(scratch)),
        )
        try:
            given = json.dumps(dataclasses.asdict(plan.asked)), str(os.getpid()), str(stop)
            with first_signal_noted(came, lambda _: stop.touch()):
                elastic_launch(elastic, sys.executable)(*module_arguments("trimtab.train.launch"), *given)
        except ChildFailedError as error:
            first = min(error.failures.values(), key=lambda failure: (_place(failure), failure.timestamp))
            if came and (_place(first) == FOLLOWED or first.exitcode == -signal.SIGINT):
                raise Interrupted(came[0]) from error
            hint, cause = advice(plan.out, nproc), _root_cause(first, plan.out)
            raise TrimtabError(f"{cause}; {hint}" if hint and hint not in cause else cause) from error
        except SignalException as error:
            raise Interrupted(int(error.sigval)) from error


def _log_places(out: Path, scratch: Path) -> Any:
    """Rank 0 speaks on the terminal, the others into files; what went wrong is noted in `scratch`."""
    from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs

    class LogPlaces(LogsSpecs):
        def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
            logs = {rank: str(out / LOGS / f"rank-{rank}.log") if rank else "" for rank in envs}
            errors = {rank: str(scratch / f"error-{rank}.json") for rank in envs}
            for rank, env in envs.items():
                env["TORCHELASTIC_ERROR_FILE"] = errors[rank]
            return LogsDest(stdouts=logs, stderrs=logs, error_files=errors)

        @property
        def root_log_dir(self) -> str:
            return str(out)

    return LogPlaces()


def _place(failure: Any) -> int:
    """Where it stands among those that the others may have followed from: what a rank said on purpose, then a rank that
    was killed, then any other end; last, an end that followed from another. SIGTERM is the launcher's own."""
    word, code = failure.error_file_data, failure.exitcode
    if word.get("follows") or code == -signal.SIGTERM:
        return FOLLOWED
    return 0 if word.get("expected") else 1 if code < 0 else 2


def _root_cause(failure: Any, out: Path) -> str:
    """One message for the failure of a rank."""
    rank = failure.local_rank
    if failure.error_file_data.get("expected"):
        return str(failure.message)
    if failure.exitcode < 0:
        hint = "; SIGKILL often means that memory ran out" if failure.exitcode == -signal.SIGKILL else ""
        return f"rank {rank} was ended by {failure.signal_name()}{hint}; the other ranks have been stopped"
    said = failure.error_file_data.get("message", f"exit code {failure.exitcode}")
    log = out / LOGS / f"rank-{rank}.log"
    return f"rank {rank} failed: {said}; {f'details in {log}' if log.exists() else 'what it said is above'}"


def _run_rank(config: TrainConfig, launcher: int | None = None, stop: Path | None = None) -> None:
    """Run this process's rank of a group that torchrun, or the launcher of that process id, started; never returns
    after a failure, of which it leaves word. stop: a file that the launcher makes when it gets a signal."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)  # whoever stops the group speaks for it
    try:
        if launcher is not None:
            threading.Thread(target=_follow, args=(launcher, stop, signals_told()), daemon=True).start()
        plan = plan_run(config, int(os.environ["WORLD_SIZE"]))
        from trimtab.train.session import run_session

        run_session(plan, prepared=launcher is not None)
    except Interrupted as ended:
        words = f"interrupted by {signal.Signals(ended.number).name}"
        _leave_word(words, expected=True, follows=True)
        if launcher is None and os.environ["RANK"] == "0":
            left = advice(Path(config.out), int(os.environ["WORLD_SIZE"])) or "no model was saved"
            print(f"trimtab: {words}; {left}", file=sys.stderr, flush=True)
        sys.exit(128 + ended.number)
    except Exception as error:
        _fail(error, config, launched=launcher is not None)


def _follow(parent: int, stop: Path | None, told: int) -> None:
    """End this process when its launcher is gone, even if it was killed, and before this rank came up at that. Hand
    the signal on that the launcher has got, once: while steps are taken it is noted, else it ends this process.

    By SIGTERM the launcher ends ranks behind one that failed; whoever sends it to all sends it to the launcher, too,
    which makes `stop` then. A terminal that is gone is written to no more.
    """
    heard = end = math.inf
    terminals = select.poll()
    terminals.register(told, select.POLLIN)
    for stream in filter(os.isatty, (1, 2)):
        terminals.register(stream, 0)
    while os.getppid() == parent and (now := time.monotonic()) < end:
        if heard == math.inf and stop is not None and stop.exists():
            heard, end = now, math.inf
            os.kill(os.getpid(), signal.SIGINT)
        for stream, _ in terminals.poll(200):
            if stream != told:
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
            elif signal.SIGTERM in os.read(told, 64):
                end = now if now > heard + TWICE else now + TWICE if heard == math.inf else end
    if end < math.inf:
        _leave_word(f"rank {os.environ['RANK']} was ended by SIGTERM", expected=True, follows=True)
    os._exit(1)


def _leave_word(message: str, *, expected: bool, follows: bool) -> None:
    """For the launcher, of how this rank ended."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        word = {"message": message, "timestamp": int(time.time()), "expected": expected, "follows": follows}
        Path(path).write_text(json.dumps(word), encoding="utf-8")


def _fail(error: Exception, config: TrainConfig, *, launched: bool) -> NoReturn:
    rank = int(os.environ.get("RANK", 0))
    expected = isinstance(error, TrimtabError)
    message = str(error) if expected else first_line(error, typed=True) + lacking(error)
    _leave_word(message, expected=expected, follows=isinstance(error, (PeerLost, PhaseTimeout)))
    log = Path(config.out) / LOGS / f"rank-{rank}.log"
    if not expected and log.parent.is_dir():
        with log.open("a", encoding="utf-8") as file:
            traceback.print_exc(file=file)
    if config.debug:
        traceback.print_exc()
    # What the user got wrong is wrong on every rank of a machine: once is enough.
    if not launched and (int(os.environ.get("LOCAL_RANK", rank)) == 0 or not expected):
        sys.stderr.write(f"trimtab: {message if expected else f'rank {rank}: {message}'}\n")
    sys.stderr.flush()
    os._exit(1)  # the process group's threads may wait for other ranks; do not wait with them


if __name__ == "__main__":
    _run_rank(TrainConfig.of(json.loads(sys.argv[1])), int(sys.argv[2]), *map(Path, sys.argv[3:]))
