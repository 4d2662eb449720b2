"""A run, checked against its model and its data before a rank starts, and the folder it writes to."""

from __future__ import annotations

import errno
import fcntl
import json
import shutil
import sys
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from trimtab.checkpoint.folder import clear, unfinished_checkpoints, whole_checkpoints
from trimtab.errors import ConfigError
from trimtab.train.checks import check_kept
from trimtab.train.config import Mesh, TrainConfig
from trimtab.train.models import Facts, check_plans, inspect, is_preset, load_tokenizer
from trimtab.train.packing import TokenStream
from trimtab.train.presets import is_written, write_preset
from trimtab.train.report import FINAL, HEATMAP, LOGS, METRICS, RUN
from trimtab.train.resume import CHECKPOINTS
from trimtab.train.sources import Found, check_lines, find_files

INIT = "init"
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""What a file system says that cannot keep two runs out of one folder."""


@dataclass(frozen=True)
class Plan:
    """A checked run: every rank makes the same one from the same options."""

    config: TrainConfig
    facts: Facts
    mesh: Mesh
    checkpoint: str
    tokenizer: Any
    found: Found
    stream: TokenStream

    @property
    def out(self) -> Path:
        """The output folder."""
        return Path(self.config.out)


def plan_run(config: TrainConfig, world: int) -> Plan:
    """Check the options against model, data and `world` ranks. Touches no file. Raises ConfigError or InputError."""
    preset = is_preset(config.model)
    config = config.resolved(preset=preset)
    _check_names(config)
    facts = inspect(config.model, config.attn)
    mesh = Mesh.of(config, world=world, num_experts=facts.num_experts)
    check_plans(facts, mesh, config.grad_accum)
    checkpoint = str(Path(config.out) / INIT) if preset else config.model
    tokenizer = load_tokenizer(config.model, checkpoint)
    if len(tokenizer) > facts.vocab_size:
        raise ConfigError(
            f"--model {config.model}: its tokenizer has {len(tokenizer)} tokens, its embedding {facts.vocab_size} rows"
        )
    if facts.positions is not None and (config.seq_len or 0) > facts.positions:
        more = "" if preset else ", or extend it in its config.json"
        raise ConfigError(
            f"--seq-len {config.seq_len}: {config.model} has {facts.positions} positions (max_position_embeddings); "
            f"use at most as many{more}"
        )
    found = find_files(config.data)
    return Plan(config, facts, mesh, checkpoint, tokenizer, found, TokenStream(found.files, tokenizer, config.seed))


def _check_names(config: TrainConfig) -> None:
    from transformers.integrations import get_available_reporting_integrations
    from transformers.training_args import OptimizerNames

    known = [name.value for name in OptimizerNames]
    if config.optim is not None and config.optim not in known:
        raise ConfigError(f"--optim {config.optim}: the Trainer has no such optimizer, but {', '.join(known)}")
    for name in config.report_to:
        if name not in (found := get_available_reporting_integrations()):
            raise ConfigError(f"--report-to {name}: not installed here; there is {', '.join(found) or 'none'}")


def check_data(plan: Plan) -> None:
    """Read all lines of JSON and tokenise the beginning of the data, so that what is wrong with it shows before ranks
    start; say which files are left out for their encoding. A run that goes on has read and said it."""
    if plan.config.resume is None:
        if plan.found.left_out:
            print(f"trimtab: --data: {len(plan.found.files)} file(s){plan.found}", file=sys.stderr)
        check_lines(plan.stream.files, plan.tokenizer)
    next(iter(plan.stream))


def make_room(plan: Plan) -> TextIO:
    """Make the output folder, drop what an earlier run left there, and write a preset's first weights.

    A run that goes on keeps all of it; what lies behind its checkpoint goes once that is loaded. Returns the file that
    marks the folder as this run's: no other run begins there before it is closed.

    Raises ConfigError where another run is writing there, or has left what nobody asked to remove.
    """
    out, config = plan.out, plan.config
    with ExitStack() as failed:
        try:
            mark = failed.enter_context(claim(plan))
            if config.resume is None:
                for name in (METRICS, HEATMAP):
                    (out / name).unlink(missing_ok=True)
                for name in (FINAL, f"{FINAL}.unfinished", INIT, LOGS):
                    clear(out / name)
                for folder in (*whole_checkpoints(out / CHECKPOINTS), *unfinished_checkpoints(out / CHECKPOINTS)):
                    clear(folder)  # and not what else lies there
                with suppress(OSError):
                    (out / CHECKPOINTS).rmdir()
            (out / LOGS).mkdir(exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--out {out}: cannot be written ({error.strerror})") from error
        write_init(plan)
        failed.pop_all()
    return mark


def claim(plan: Plan) -> TextIO:
    """Make the output folder and mark it as this run's, for as long as the file that is returned is open."""
    plan.out.mkdir(parents=True, exist_ok=True)
    with ExitStack() as failed:
        mark = failed.enter_context((plan.out / RUN).open("a", encoding="utf-8"))
        try:
            fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"--out {plan.out}: another run is writing there; give a new folder") from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
        check_kept(plan.config)  # what another run has left since
        mark.truncate(0)
        mark.write(json.dumps({**plan.config.made_of(), "out": plan.config.out}, indent=1) + "\n")
        mark.flush()
        failed.pop_all()
    return mark


def write_init(plan: Plan) -> None:
    """Write a preset's first weights where `checkpoint` expects them, in the place of others or of half of them."""
    model, seed, folder = plan.config.model, plan.config.seed, Path(plan.checkpoint)
    if is_preset(model) and not is_written(model, seed, folder):
        shutil.rmtree(folder, ignore_errors=True)
        write_preset(model, seed, folder)
