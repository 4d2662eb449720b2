"""A run, checked against its model and its data before a rank starts, and the folder it writes to."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import hashlib
import json
import math
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from trimtab import __version__
from trimtab.checkpoint.folder import clear, unfinished_checkpoints, whole_checkpoints
from trimtab.errors import ConfigError
from trimtab.integrations.transformers.summary import summary
from trimtab.train.adapters import adapted_skeleton, check_adapters
from trimtab.train.blocks import Blocks
from trimtab.train.checks import check_kept
from trimtab.train.config import Mesh, TrainConfig
from trimtab.train.models import Facts, check_plans, inspect, is_preset, load_tokenizer
from trimtab.train.packing import Packer, prepare_data
from trimtab.train.presets import IDENTITY, identity, is_written, write_preset
from trimtab.train.report import FINAL, HEATMAP, LOGS, MERGED, METRICS, RUN
from trimtab.train.resume import CHECKPOINTS, describe_data
from trimtab.train.sources import Group, find_groups
from trimtab.train.weights import Source, open_source, quantization, write_plain

INIT, DATA, EVAL_DATA = "init", "data", "eval-data"
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
    source: Source | None
    groups: list[Group]
    eval_groups: list[Group]
    asked: TrainConfig

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
    def draws(self) -> int | None:
        """Blocks that are needed for all steps, on all ranks together; None where steps are counted in epochs."""
        config = self.config
        taken = (config.max_steps or 0) * config.grad_accum * config.batch_size * self.mesh.data_size
        return None if config.epochs else math.ceil(taken / (1 - (config.eval_split or 0.0)))

    def blocks(self) -> Blocks:
        """What is learnt, once it is ready."""
        return Blocks(self.out / DATA, held_out=self.config.eval_split or 0.0, seed=self.config.seed)

    def eval_blocks(self) -> Blocks | None:
        """What the model is evaluated on, if that is asked for."""
        if self.eval_groups:
            return Blocks(self.out / EVAL_DATA)
        share, seed = self.config.eval_split, self.config.seed
        return Blocks(self.out / DATA, held_out=share, seed=seed, evaluated=True) if share else None


def plan_run(config: TrainConfig, world: int) -> Plan:
    """Check the options against model, data and `world` ranks. Touches no file. Raises ConfigError or InputError."""
    preset = is_preset(config.model)
    asked, config = config, config.resolved(preset=preset)
    _check_names(config)
    facts = inspect(config.model, config.attn)
    mesh = Mesh.of(config, world=world, num_experts=facts.num_experts)
    check_plans(facts, mesh, config.grad_accum)
    if config.replicate_experts != "off" and mesh.ep == 1:
        raise ConfigError(
            f"--replicate-experts {config.replicate_experts}: every rank has all experts (ep 1); raise --ep, or leave "
            "that off"
        )
    if config.lora:
        check_adapters(config, facts, mesh)
    checkpoint = config.model
    if preset or (config.quantize != "keep" and quantization(Path(config.model))):
        checkpoint = str(Path(config.out) / INIT)
    source = None if preset else open_source(Path(config.model), facts.skeleton, config.drop)
    tokenizer = load_tokenizer(config.model)
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
    held_out = find_groups(config.eval_data) if config.eval_data else []
    return Plan(config, facts, mesh, checkpoint, tokenizer, source, find_groups(config.data), held_out, asked)


def with_steps(plan: Plan) -> Plan:
    """The plan of a run of so many epochs, once its data is ready, with the steps that they are."""
    config = plan.config
    if config.epochs is None:
        return plan
    batch = config.grad_accum * config.batch_size * plan.mesh.data_size
    steps = max(1, round(config.epochs * len(plan.blocks()) / batch))
    asked = dataclasses.replace(config, max_steps=steps, warmup=plan.asked.warmup, eval_every=plan.asked.eval_every)
    return dataclasses.replace(plan, config=asked.resolved(preset=is_preset(config.model)))


def described(plan: Plan) -> Iterator[str]:
    """What a run would train, on what, in which steps and with what memory, in lines."""
    config, mesh, facts = plan.config, plan.mesh, plan.facts
    layers = [dict(facts.skeleton.get_submodule(name).named_parameters()) for name in facts.experts]
    model = adapted_skeleton(facts, config) if config.lora else facts.skeleton
    found, whole = summary(model), sum(p.numel() for p in facts.skeleton.parameters())
    trained = found.of(state="trained").count
    of_experts = sum(p.numel() for layer in layers for p in layer.values())
    shapes = ", ".join(f"{name} {list(p.shape)}" for name, p in layers[0].items())
    yield f"model   {facts.class_name}: {whole:,} parameters; what trains:"
    yield from str(found).splitlines()
    yield f"experts {of_experts:,} parameters in {len(layers)} layers: {shapes}"
    if plan.source and (words := str(plan.source)):
        yield f"files   {words}"
    balanced = (
        ""
        if config.replicate_experts == "off"
        else f", hot ones copied (--replicate-experts {config.replicate_experts})"
    )
    yield (
        f"ranks   {mesh.world} = replicate {mesh.replicate} x fsdp {mesh.fsdp} x tp {mesh.tp}; experts over {mesh.ep}"
        f"{balanced}"
    )
    tokens = config.batch_size * (config.seq_len or 0)
    yield (
        f"steps   {config.max_steps} of {tokens * config.grad_accum * mesh.data_size:,} tokens: {config.batch_size} x "
        f"{config.seq_len} on each of {mesh.data_size} rank(s), {config.grad_accum} time(s)"
    )
    shards, logits = mesh.fsdp * mesh.tp, 4 * tokens * facts.vocab_size
    plain = found.of(state="frozen").count * (2 if config.dtype == "bfloat16" else 4)
    frozen = plain + found.of(state="quantized").bytes
    held = 16 * trained / (1 if config.lora else shards) + frozen / shards
    yield (
        f"memory  of a rank: {held / 1e9:.3g} GB for weights, gradients and AdamW's moments, {2 * logits / 1e9:.3g} GB "
        "for logits and their gradient; activations, and weights gathered for a layer, come to it"
    )


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
    for name, groups, draws in ((DATA, plan.groups, plan.draws), (EVAL_DATA, plan.eval_groups, None)):
        if not groups:
            continue
        folder, made_of = plan.out / name, _made_of(plan, groups, draws)
        known = folder / FINGERPRINT
        if not (known.is_file() and known.read_text(encoding="utf-8") == made_of):
            half = folder.with_name(f"{name}.unfinished")
            clear(half)
            prepare_data(groups, plan.packer, half, draws)
            (half / FINGERPRINT).write_text(made_of, encoding="utf-8")
            clear(folder)
            half.rename(folder)
        for said in Blocks(folder).said if plan.config.resume is None else ():
            print(f"trimtab: {name}: {said}", file=sys.stderr)
    plan.eval_blocks()
    if plan.config.resume is None and plan.source is not None and (words := str(plan.source)):
        print(f"trimtab: model: {words}", file=sys.stderr)


def _made_of(plan: Plan, groups: list[Group], draws: int | None) -> str:
    times = [path.stat().st_mtime_ns for group in groups for path in group.files]
    packer, tokenizer = plan.packer, plan.tokenizer
    words = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else json.dumps(tokenizer.get_vocab())
    values = [__version__, times, describe_data(groups), dataclasses.replace(packer, tokenizer=None), draws]
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
                for name in (FINAL, f"{FINAL}.unfinished", MERGED, f"{MERGED}.unfinished", INIT, LOGS):
                    clear(out / name)
                for folder in (*whole_checkpoints(out / CHECKPOINTS), *unfinished_checkpoints(out / CHECKPOINTS)):
                    clear(folder)  # and not what else lies there
                with suppress(OSError):
                    (out / CHECKPOINTS).rmdir()
            (out / LOGS).mkdir(exist_ok=True)
            mark.truncate(0)
            mark.write(json.dumps({**with_steps(plan).config.made_of(), "out": config.out}, indent=1) + "\n")
            mark.flush()
        except OSError as error:
            raise ConfigError(f"--out {out}: cannot be written ({error.strerror})") from error
        write_init(plan)
        failed.pop_all()
    return mark


def _unmake(made: list[Path], out: Path) -> None:
    for name in (DATA, EVAL_DATA):
        clear(out / f"{name}.unfinished")
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
    """Write a preset's first weights, or quantized ones in bfloat16, where `checkpoint` expects them, in the place of
    others or of half of them."""
    model, seed, folder = plan.config.model, plan.config.seed, Path(plan.checkpoint)
    whose = identity(model, seed)
    if plan.checkpoint == model or is_written(whose, folder):
        return
    shutil.rmtree(folder, ignore_errors=True)
    if is_preset(model):
        write_preset(model, seed, folder)
    else:
        write_plain(Path(model), folder)
    (folder / IDENTITY).write_text(whose, encoding="utf-8")  # last: without it, not whole
