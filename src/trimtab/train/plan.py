"""A run, checked against its options, its output folder, its model and its data before a rank starts.

Whatever the options alone can tell is refused within a blink: importing this imports no torch.
"""

from __future__ import annotations

import dataclasses
import math
import os
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.checkpoint import folder as on_disk
from trimtab.errors import ConfigError
from trimtab.extras import install, required
from trimtab.train.config import MUON, Mesh, TrainConfig
from trimtab.train.presets import PRESETS
from trimtab.train.report import CHECKPOINTS, FINAL, RUN, unnamed_model
from trimtab.train.resume import check_resume
from trimtab.train.sources import Group, find_groups

if TYPE_CHECKING:
    from trimtab.train.packing import Blocks, Packer
    from trimtab.train.weights import Source

ADAPTER = "adapter_config.json"
INIT, DATA, EVAL_DATA = "init", "data", "eval-data"


@dataclass(frozen=True)
class Plan:
    """A checked run: every rank makes the same one from the same options.

    asked: the options as they were given; `config` has all defaults. skeleton: the model, on the meta device.
    checkpoint: the folder that it is loaded from. source: the model's own folder, held against it; None for a preset.
    """

    asked: TrainConfig
    config: TrainConfig
    mesh: Mesh
    skeleton: Any
    tokenizer: Any
    checkpoint: Path
    source: Source | None
    groups: list[Group]
    eval_groups: list[Group]

    @property
    def out(self) -> Path:
        """The output folder."""
        return Path(self.config.out)

    @property
    def packer(self) -> Packer:
        from trimtab.train.models import keeps_documents_apart
        from trimtab.train.packing import Packer

        config, packed = self.config, keeps_documents_apart(self.skeleton)
        return Packer(self.tokenizer, config.seq_len or 0, config.seed, packed, config.too_long)

    @property
    def draws(self) -> int | None:
        """Blocks that are needed for all steps, on all ranks together; None where steps are counted in epochs."""
        taken = (self.config.max_steps or 0) * self._batch
        return None if self.config.epochs else math.ceil(taken / (1 - (self.config.eval_split or 0.0)))

    @property
    def _batch(self) -> int:
        return self.config.grad_accum * self.config.batch_size * self.mesh.data_size

    def blocks(self, evaluated: bool = False) -> Blocks:
        """The blocks to learn from, or to evaluate on, once they are ready."""
        from trimtab.train.packing import Blocks

        if evaluated and self.eval_groups:
            return Blocks(self.out / EVAL_DATA)
        share, seed = self.config.eval_split or 0.0, self.config.seed
        return Blocks(self.out / DATA, held_out=share, seed=seed, evaluated=evaluated)

    def eval_blocks(self) -> Blocks | None:
        """The blocks to evaluate on, if that is asked for."""
        return self.blocks(evaluated=True) if self.eval_groups or self.config.eval_split else None

    def with_steps(self) -> Plan:
        """The plan of a run of so many epochs, once its data is ready, with the steps that they are."""
        if self.config.epochs is None:
            return self
        steps = max(1, round(self.config.epochs * len(self.blocks()) / self._batch))
        asked = dataclasses.replace(
            self.config, max_steps=steps, warmup=self.asked.warmup, eval_every=self.asked.eval_every
        )
        return dataclasses.replace(self, config=asked.resolved())

    def described(self) -> Iterator[str]:
        """Lines that say what a run would train, on what and in which steps."""
        from trimtab.convert.layouts import experts_modules
        from trimtab.integrations.transformers.summary import summary
        from trimtab.train.models import trained_skeleton

        config, mesh, skeleton = self.config, self.mesh, self.skeleton
        layers = [dict(module.named_parameters()) for module in experts_modules(skeleton).values()]
        found, whole = summary(trained_skeleton(skeleton, config)), sum(p.numel() for p in skeleton.parameters())
        of_experts = sum(p.numel() for layer in layers for p in layer.values())
        shapes = ", ".join(f"{name} {list(p.shape)}" for name, p in layers[0].items())
        yield f"model   {type(skeleton).__name__}: {whole:,} parameters; what trains:"
        yield from str(found).splitlines()
        yield f"experts {of_experts:,} parameters in {len(layers)} layers: {shapes}"
        if self.source and self.source.summary:
            yield f"files   {self.source.summary}"
        rule = config.replicate_experts
        replicated = "" if rule == "off" else f", hot ones copied (--replicate-experts {rule})"
        yield (
            f"ranks   {mesh.world} = replicate {mesh.replicate} x fsdp {mesh.fsdp} x tp {mesh.tp}; experts over "
            f"{mesh.ep}{replicated}"
        )
        yield (
            f"steps   {config.max_steps} of {self._batch * (config.seq_len or 0):,} tokens: {config.batch_size} x "
            f"{config.seq_len} on each of {mesh.data_size} rank(s), {config.grad_accum} time(s)"
        )


def plan_run(config: TrainConfig, world: int) -> Plan:
    """Check the options against output folder, data, model and `world` ranks. Touches no file. Raises ConfigError or
    InputError. transformers says no more than errors from here on, unless `debug` is set."""
    groups, eval_groups = _check_options(config, world)
    required("transformers", "trimtab train", "train")
    from transformers.utils import logging as transformers_logging

    from trimtab.train.models import check_model, check_sharded, inspect, load_tokenizer, num_experts
    from trimtab.train.weights import open_source, quantization

    transformers_logging.disable_progress_bar()
    if not config.debug:
        transformers_logging.set_verbosity_error()
    asked, config, folder = config, config.resolved(), Path(config.model)
    check_names(config)
    skeleton, preset = inspect(config.model, config.attn), config.model in PRESETS
    mesh = Mesh.of(config, world=world, num_experts=num_experts(skeleton))
    source = None if preset else open_source(folder, skeleton, config.drop)
    tokenizer = load_tokenizer(config.model)
    check_model(config, skeleton, mesh, tokenizer)
    check_sharded(source.mapping if source else (), skeleton, mesh)
    rewritten = preset or (config.quantize != "keep" and quantization(folder))
    checkpoint = Path(config.out) / INIT if rewritten else folder
    return Plan(asked, config, mesh, skeleton, tokenizer, checkpoint, source, groups, eval_groups)


def _check_options(config: TrainConfig, world: int) -> tuple[list[Group], list[Group]]:
    """Check ranks, model folder, output folder and that there is data, without torch. Returns what data there is."""
    mesh = Mesh.of(config, world=world)
    if config.epochs is not None and config.max_steps is not None:
        raise ConfigError("--epochs and --max-steps: give one of them")
    full = config.resolved()
    if config.resume is None and config.epochs is None and full.warmup and full.warmup >= (full.max_steps or 0):
        raise ConfigError(
            f"--warmup {full.warmup}: the learning rate would not reach its peak within {full.max_steps} step(s); "
            "lower --warmup, or raise --max-steps"
        )
    model = Path(config.model)
    if config.model not in PRESETS and (model / ADAPTER).is_file():
        base, adapter, move = "BASE", shlex.quote(config.model), ""
        if (model / "config.json").is_file():
            base, adapter, move = adapter, "ADAPTER", "move the files adapter_* to a folder ADAPTER, and "
        raise ConfigError(
            f"--model {config.model}: an adapter lies in that folder ({ADAPTER}), which would be loaded and lost; "
            f"{move}train the merged model: trimtab convert {base} MERGED --to safetensors --merge {adapter}"
        )
    if config.model not in PRESETS and not (Path(config.model) / "config.json").is_file():
        what = "no config.json in that folder" if Path(config.model).is_dir() else "no such folder"
        raise ConfigError(f"--model {config.model}: {what}; give a checkpoint folder or one of {', '.join(PRESETS)}")
    if not config.asks:
        _check_out(Path(config.out), config.model)
        check_kept(config)
    groups = find_groups(config.data)
    if config.resume is not None:
        check_resume(config, mesh.data_size, groups)
    return groups, find_groups(config.eval_data) if config.eval_data else []


def _check_out(out: Path, model: str) -> None:
    existing = next(p for p in (out.absolute(), *out.absolute().parents) if p.exists())
    if not existing.is_dir():
        raise ConfigError(f"--out {out}: {existing} is not a folder")
    if not os.access(existing, os.W_OK):
        raise ConfigError(f"--out {out}: no permission to write in {existing}")
    if out.is_dir() and any(out.iterdir()) and not (out / RUN).exists():
        raise ConfigError(f"--out {out}: the folder is in use and holds no trimtab run; give a new one")
    if model not in PRESETS and out.resolve() in Path(model).resolve().parents:
        raise ConfigError(f"--out {out}: the model {model} lies in it and would be overwritten; give a new one")


def check_kept(config: TrainConfig) -> None:
    """Raise ConfigError where a model or a checkpoint would be removed, or one of another run joined by ours, that
    nobody asked to remove."""
    if config.overwrite:
        return
    out, resume = Path(config.out), None if config.resume is None else Path(config.resume)
    held, finished = on_disk.latest(out / CHECKPOINTS), (out / FINAL).exists()
    begun = 0 if resume is None else on_disk.step_of(resume)
    ours = resume is not None and held is not None and resume.parent.resolve() == held.parent.resolve()
    partial = [p for p in on_disk.unfinished_checkpoints(out / CHECKPOINTS) if not p.name.endswith(on_disk.UNFINISHED)]
    if held is not None and not (ours and on_disk.step_of(held) <= begun):
        what = f"{'later ' if ours else ''}checkpoints of a {'finished ' if finished else ''}run, up to {held.name}"
        remedy = "" if finished else f"go on from there by --resume {out}, "
    elif late := [path.name for path in partial if on_disk.step_of(path) > begun]:
        what, remedy = f"{late[0]}, which is not whole, half of a copy perhaps", "copy it again, "
    elif finished:
        what, remedy = f"the model of a finished run, {out / FINAL}", ""
    elif resume is None and (left := unnamed_model(out, whole=True)):
        what, remedy = f"a model ({left})", ""
    else:
        return
    raise ConfigError(f"--out {out}: holds {what}; {remedy}give a new folder, or have --overwrite remove it")


def check_names(config: TrainConfig) -> None:
    """Raise ConfigError for an optimizer, or a place for numbers, that is not there."""
    from transformers.integrations import get_available_reporting_integrations
    from transformers.training_args import OptimizerNames

    known = [MUON, *(name.value for name in OptimizerNames)]
    if config.optim is not None and config.optim not in known:
        raise ConfigError(f"--optim {config.optim}: there is no such optimizer, but {', '.join(known)}")
    for name in config.report_to:
        if name not in (found := get_available_reporting_integrations()):
            there = f"there is {', '.join(found) or 'none'}"
            raise ConfigError(f"--report-to {name}: not installed here; {install(name) or there}")
