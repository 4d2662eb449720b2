"""A run, checked against its model and its data before a rank starts, and the folder it writes to."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trimtab.errors import ConfigError
from trimtab.train.checks import RUN
from trimtab.train.config import Mesh, TrainConfig
from trimtab.train.models import Facts, check_plans, inspect, is_preset, load_tokenizer
from trimtab.train.packing import TokenStream
from trimtab.train.presets import is_written, write_preset
from trimtab.train.report import FINAL, HEATMAP, METRICS
from trimtab.train.resume import CHECKPOINTS
from trimtab.train.sources import find_files

INIT, LOGS = "init", "logs"


@dataclass(frozen=True)
class Plan:
    """A checked run: every rank makes the same one from the same options."""

    config: TrainConfig
    facts: Facts
    mesh: Mesh
    checkpoint: str
    tokenizer: Any
    stream: TokenStream

    @property
    def out(self) -> Path:
        """The output folder."""
        return Path(self.config.out)


def plan_run(config: TrainConfig, world: int) -> Plan:
    """Check the options against model, data and `world` ranks. Touches no file. Raises ConfigError or InputError."""
    preset = is_preset(config.model)
    config = config.resolved(preset=preset)
    facts = inspect(config.model)
    mesh = Mesh.of(config, world=world, num_experts=facts.num_experts)
    check_plans(facts, mesh)
    checkpoint = str(Path(config.out) / INIT) if preset else config.model
    tokenizer = load_tokenizer(config.model, checkpoint)
    if len(tokenizer) > facts.vocab_size:
        raise ConfigError(
            f"--model {config.model}: its tokenizer has {len(tokenizer)} tokens, its embedding {facts.vocab_size} rows"
        )
    stream = TokenStream(find_files(config.data), tokenizer, config.seed)
    return Plan(config, facts, mesh, checkpoint, tokenizer, stream)


def check_data(plan: Plan) -> None:
    """Tokenise the beginning of the data, so that what is wrong with it shows before ranks start."""
    next(iter(plan.stream))


def make_room(plan: Plan) -> None:
    """Make the output folder, drop what an earlier run left there, and write a preset's first weights.

    A run that goes on keeps all of it; what lies behind its checkpoint goes once that is loaded.
    """
    out, config = plan.out, plan.config
    try:
        claim(plan)
        if config.resume is None:
            for name in (METRICS, HEATMAP):
                (out / name).unlink(missing_ok=True)
            for name in (FINAL, f"{FINAL}.unfinished", INIT, LOGS):
                shutil.rmtree(out / name, ignore_errors=True)
            if config.overwrite:
                shutil.rmtree(out / CHECKPOINTS, ignore_errors=True)
        (out / LOGS).mkdir(exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {out}: cannot be written ({error.strerror})") from error
    write_init(plan)


def claim(plan: Plan) -> None:
    """Make the output folder and mark it as this run's."""
    plan.out.mkdir(parents=True, exist_ok=True)
    (plan.out / RUN).write_text(plan.config.to_json() + "\n", encoding="utf-8")


def write_init(plan: Plan) -> None:
    """Write a preset's first weights where `checkpoint` expects them, in the place of others or of half of them."""
    model, seed, folder = plan.config.model, plan.config.seed, Path(plan.checkpoint)
    if is_preset(model) and not is_written(model, seed, folder):
        shutil.rmtree(folder, ignore_errors=True)
        write_preset(model, seed, folder)
