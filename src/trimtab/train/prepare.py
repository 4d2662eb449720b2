"""A run, checked against its model and its data before a rank starts, and the folder it writes to."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import hashlib
import json
import shutil
import sys
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from trimtab import __version__
from trimtab.checkpoint.folder import clear, unfinished_checkpoints, whole_checkpoints
from trimtab.errors import ConfigError
from trimtab.train.blocks import Blocks
from trimtab.train.checks import check_kept
from trimtab.train.config import Mesh, TrainConfig
from trimtab.train.models import Facts, check_plans, inspect, is_preset, load_tokenizer
from trimtab.train.packing import Packer, prepare_data
from trimtab.train.presets import is_written, write_preset
from trimtab.train.report import FINAL, HEATMAP, LOGS, METRICS, RUN
from trimtab.train.resume import CHECKPOINTS, describe_data
from trimtab.train.sources import Group, find_groups

INIT, DATA = "init", "data"
FINGERPRINT = "made-of"
"""Lies beside the blocks: the files and options that they are made of."""
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
    groups: list[Group]

    @property
    def out(self) -> Path:
        """The output folder."""
        return Path(self.config.out)

    @property
    def packer(self) -> Packer:
        """How records become blocks."""
        config = self.config
        return Packer(self.tokenizer, config.seq_len or 0, config.seed, self.facts.packs, config.too_long)

    @property
    def draws(self) -> int:
        """Blocks that the run takes, on all ranks together."""
        config = self.config
        return (config.max_steps or 0) * config.grad_accum * config.batch_size * self.mesh.data_size


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
    return Plan(config, facts, mesh, checkpoint, tokenizer, find_groups(config.data))


def _check_names(config: TrainConfig) -> None:
    from transformers.integrations import get_available_reporting_integrations
    from transformers.training_args import OptimizerNames

    known = [name.value for name in OptimizerNames]
    if config.optim is not None and config.optim not in known:
        raise ConfigError(f"--optim {config.optim}: the Trainer has no such optimizer, but {', '.join(known)}")
    for name in config.report_to:
        if name not in (found := get_available_reporting_integrations()):
            raise ConfigError(f"--report-to {name}: not installed here; there is {', '.join(found) or 'none'}")


def ready_data(plan: Plan) -> None:
    """Read all of the data, so that what is wrong with it shows before ranks start, into blocks in the output folder,
    and say what was read and what was not. What lies there of the same files and options is taken as it is."""
    folder, made_of = plan.out / DATA, _made_of(plan)
    known = folder / FINGERPRINT
    if not (known.is_file() and known.read_text(encoding="utf-8") == made_of):
        half = folder.with_name(f"{DATA}.unfinished")
        clear(half)
        prepare_data(plan.groups, plan.packer, half, plan.draws)
        (half / FINGERPRINT).write_text(made_of, encoding="utf-8")
        clear(folder)
        half.rename(folder)
    if plan.config.resume is None:
        for said in Blocks(folder).said:
            print(f"trimtab: data: {said}", file=sys.stderr)


def _made_of(plan: Plan) -> str:
    times = [path.stat().st_mtime_ns for group in plan.groups for path in group.files]
    packer, tokenizer = plan.packer, plan.tokenizer
    words = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else json.dumps(tokenizer.get_vocab())
    values = [__version__, times, describe_data(plan.groups), dataclasses.replace(packer, tokenizer=None), plan.draws]
    return hashlib.sha256(repr([*values, tokenizer.chat_template, words]).encode()).hexdigest()


def make_room(plan: Plan) -> TextIO:
    """Make the output folder and the data in it, drop what an earlier run left there, and write a preset's weights.

    A run that goes on keeps all of it; what lies behind its checkpoint goes once that is loaded. Returns the file that
    marks the folder as this run's: no other run begins there before it is closed.

    Raises ConfigError where another run is writing there, or has left what nobody asked to remove, and InputError for
    data that cannot be trained on: then nothing has been removed, and no folder is left that was not there.
    """
    out, config = plan.out, plan.config
    made = [folder for folder in (out, *out.parents) if not folder.exists()]
    with ExitStack() as failed:
        failed.callback(_unmake, made, out)
        try:
            mark = failed.enter_context(claim(plan))
            ready_data(plan)
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
            mark.truncate(0)
            mark.write(json.dumps({**config.made_of(), "out": config.out}, indent=1) + "\n")
            mark.flush()
        except OSError as error:
            raise ConfigError(f"--out {out}: cannot be written ({error.strerror})") from error
        write_init(plan)
        failed.pop_all()
    return mark


def _unmake(made: list[Path], out: Path) -> None:
    clear(out / f"{DATA}.unfinished")
    if out in made:
        (out / RUN).unlink(missing_ok=True)
    for folder in made:
        with suppress(OSError):
            folder.rmdir()


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
        failed.pop_all()
    return mark


def write_init(plan: Plan) -> None:
    """Write a preset's first weights where `checkpoint` expects them, in the place of others or of half of them."""
    model, seed, folder = plan.config.model, plan.config.seed, Path(plan.checkpoint)
    if is_preset(model) and not is_written(model, seed, folder):
        shutil.rmtree(folder, ignore_errors=True)
        write_preset(model, seed, folder)
