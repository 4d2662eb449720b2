"""From one command to the right number of ranks: here, through PyTorch's elastic launcher, or under torchrun."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import signal
import sys
import tempfile
import uuid
from pathlib import Path
from typing import Any

from trimtab.errors import ConfigError, TrimtabError
from trimtab.integrations.transformers import import_transformers
from trimtab.processes import Interrupted, cores, group_size, module_arguments, signals_raise
from trimtab.train.checks import check_options
from trimtab.train.config import TrainConfig
from trimtab.train.rank import log_file, run_rank
from trimtab.train.resume import advice


def launch(config: TrainConfig, nproc: int | None) -> None:
    """Run the training that `config` describes, on `nproc` local ranks or in the group that torchrun started.

    Raises TrimtabError for what a user can put right and for a rank that failed, Interrupted for a signal; all
    ranks are gone by then. With `data_report` or `dry_run` no rank is started, and nothing is written.
    """
    size = group_size()
    if size is not None and nproc is not None:
        raise ConfigError("--nproc starts ranks itself; leave it out under torchrun, which has started them")
    if nproc is not None and nproc < 1:
        raise ConfigError(f"--nproc {nproc}: must be at least 1")
    asked = config.data_report or config.dry_run
    if size is not None and not asked:
        run_rank(config)
        return
    with signals_raise():
        check_options(config, size or nproc or 1)
        import_transformers("trimtab train")
        if asked:
            if int(os.environ.get("RANK", 0)) == 0:
                _report(config, size or nproc or 1)
        elif nproc is None or nproc == 1:
            from trimtab.train.session import run_session

            run_session(config, prepared=False)
        else:
            _launch_ranks(config, nproc)


def _report(config: TrainConfig, ranks: int) -> None:
    from trimtab.train.packing import prepare_data
    from trimtab.train.prepare import DATA, described, plan_run, with_steps

    with tempfile.TemporaryDirectory(prefix="trimtab-") as scratch:
        plan = plan_run(dataclasses.replace(config, out=scratch), ranks)
        reports = prepare_data(plan.groups, plan.packer, plan.out / DATA, plan.draws)
        if config.dry_run:
            print("\n".join(described(with_steps(plan))))
        for report in reports:
            print("\n".join([report.summary(), *report.details(plan.tokenizer)]))


def _launch_ranks(config: TrainConfig, nproc: int) -> None:
    import torch
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch
    from transformers.utils import logging as transformers_logging

    from trimtab.train.prepare import make_room, plan_run

    if torch.cuda.is_available() and nproc > torch.cuda.device_count():
        raise ConfigError(f"--nproc {nproc}: this machine has {torch.cuda.device_count()} GPU(s)")
    if not config.debug:
        transformers_logging.disable_progress_bar()
        transformers_logging.set_verbosity_error()
        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    plan = plan_run(config, nproc)
    inherited = {"OMP_NUM_THREADS": str(max(1, cores() // nproc))} | (
        {} if config.debug else {"TORCH_CPP_LOG_LEVEL": "ERROR"}
    )
    os.environ.update({name: value for name, value in inherited.items() if name not in os.environ})
    with contextlib.closing(make_room(plan)), tempfile.TemporaryDirectory(prefix="trimtab-") as scratch:
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
            program = *module_arguments("trimtab.train.rank"), plan.asked.to_json(), str(os.getpid())
            elastic_launch(elastic, sys.executable)(*program)
        except ChildFailedError as error:
            hint = advice(plan.out, nproc)
            cause = _root_cause(error.failures, plan.out)
            raise TrimtabError(f"{cause}; {hint}" if hint else cause) from error
        except SignalException as error:
            raise Interrupted(int(error.sigval)) from error


def _log_places(out: Path, scratch: Path) -> Any:
    """Rank 0 speaks on the terminal, the others into files; what went wrong is noted in `scratch`."""
    from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs

    class LogPlaces(LogsSpecs):
        def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
            logs = {rank: str(log_file(out, rank)) if rank else "" for rank in envs}
            errors = {rank: str(scratch / f"error-{rank}.json") for rank in envs}
            for rank, env in envs.items():
                env["TORCHELASTIC_ERROR_FILE"] = errors[rank]
            return LogsDest(stdouts=logs, stderrs=logs, error_files=errors)

        @property
        def root_log_dir(self) -> str:
            return str(out)

    return LogPlaces()


def _root_cause(failures: dict[int, Any], out: Path) -> str:
    """One message for the failure that the others followed from: what a rank said on purpose; else a rank that was
    killed, for its peers only report that it is gone; else whatever came first. SIGTERM is the launcher's own."""

    def order(rank: int) -> tuple[int, float]:
        failure = failures[rank]
        said = failure.error_file_data.get("expected") and not failure.error_file_data.get("follows")
        killed = failure.exitcode < 0
        return 0 if said else 2 if not killed else 1 if failure.exitcode != -signal.SIGTERM else 3, failure.timestamp

    rank = min(failures, key=order)
    failure = failures[rank]
    if failure.error_file_data.get("expected"):
        return str(failure.message)
    if failure.exitcode < 0:
        hint = "; SIGKILL often means that memory ran out" if failure.exitcode == -signal.SIGKILL else ""
        return f"rank {rank} was ended by {failure.signal_name()}{hint}; the other ranks have been stopped"
    said = failure.error_file_data.get("message", f"exit code {failure.exitcode}")
    log = log_file(out, rank)
    return f"rank {rank} failed: {said}; {f'details in {log}' if log.exists() else 'what it said is above'}"
