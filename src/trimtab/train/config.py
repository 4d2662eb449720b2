"""The options of a training run, in one table, and how its ranks are laid out.

Nothing here imports torch. An option that is None has a default that depends on the model or on the number of ranks,
filled in by `TrainConfig.resolved` and `Mesh.of`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from trimtab.errors import ConfigError
from trimtab.train.presets import PRESETS

MOST_SEED = 2**32 - 1  # of numpy
ENCODED = ("nf4", "int8", "packed")
"""Formats that experts are quantized to while they are loaded."""
MUON = "muon"
"""The `optim` that is ours."""
WITH_LORA = ("lora_alpha", "lora_targets", "quantize", "merge")


def option(
    group: str, help: str, *, default: Any = None, shown: str = "", least: float | None = None,
    choices: tuple[str, ...] = (), fixed: bool = False, per_run: bool = False,
) -> Any:  # fmt: skip
    """A field of `TrainConfig`, from which the command line, the YAML file and the docs have it.

    group: the heading that it stands under in the help; `shown` stands for its value there. fixed: the numbers of a run
    follow from it, so that a run that goes on cannot change it. per_run: it is about one start of the command.
    """
    about = {"group": group, "help": help, "shown": shown or "|".join(choices) or "N", "least": least}
    return dataclasses.field(
        default=default, metadata={**about, "choices": choices, "fixed": fixed, "per_run": per_run}
    )


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The options of `trimtab train`."""

    model: str = option(
        "model", "preset (qwen3_moe, mixtral, olmoe, gpt_oss, deepseek_v3), checkpoint, or a name in the hub's cache",
        default="qwen3_moe",
        shown="NAME|PATH", fixed=True,
    )  # fmt: skip
    dtype: str = option(
        "model", "dtype that the model computes in; master weights are float32 (default float32)", default="float32",
        choices=("float32", "bfloat16"), fixed=True,
    )  # fmt: skip
    attn: str | None = option("model", "attention, as transformers names it: eager, sdpa …", shown="NAME", fixed=True)
    kernels: str = option(
        "model", "what multiplies the experts, as in trimtab doctor (default auto)", default="auto", shown="NAME",
        choices=("auto", "cpu", "torch", "grouped_mm", "grouped_mm+triton", "triton"),
    )  # fmt: skip
    gradient_checkpointing: bool = option("model", "compute activations again in backward", default=False)
    data: tuple[str, ...] = option(
        "data", "files, folders: .jsonl, .json, .parquet, .arrow, .csv of text, messages, conversations or prompts and "
        "completions; or text in UTF-8; also .gz and .zst; or a name in the hub's cache", default=(),
        shown="PATH[:SPLIT][=WEIGHT]",
    )  # fmt: skip
    too_long: str = option(
        "data", "a conversation longer than --seq-len is cut or left out (default truncate)", default="truncate",
        choices=("truncate", "drop"), fixed=True,
    )  # fmt: skip
    data_report: bool = option(
        "data", "tell what the data holds and what of it is learned, and end", default=False, per_run=True
    )
    accept_new_data: bool = option(
        "data", "with --resume: go on though the data has changed", default=False, per_run=True
    )
    seq_len: int | None = option(
        "data", "tokens per sequence (default 128 for presets, 512 for checkpoints)", least=2, fixed=True
    )
    batch_size: int = option("data", "sequences per data-parallel rank (default 8)", default=8, least=1, fixed=True)
    max_steps: int | None = option("steps", "optimizer steps (default 100)", least=1, fixed=True)
    epochs: float | None = option("steps", "passes over the data, in the place of --max-steps", shown="X", fixed=True)
    grad_accum: int = option(
        "steps", "batches per optimizer step, each balanced by itself (default 1)", default=1, least=1, fixed=True
    )
    lr: float | None = option(
        "steps", "peak learning rate (default 4e-3 for presets; 2e-5 for checkpoints, with --lora 2e-4)", shown="X",
        fixed=True,
    )  # fmt: skip
    warmup: int | None = option(
        "steps", "warm-up steps (default: a tenth of the steps, at most 100)", least=0, fixed=True
    )
    scheduler: str = option(
        "steps", "after that: cosine, linear, polynomial, inverse_sqrt or constant_with_warmup (default cosine)",
        default="cosine", shown="NAME", fixed=True,
        choices=("cosine", "linear", "polynomial", "inverse_sqrt", "constant_with_warmup"),
    )  # fmt: skip
    optim: str | None = option(
        "steps", "muon, or an optimizer of transformers' Trainer (default AdamW)", shown="NAME", fixed=True
    )
    weight_decay: float = option("steps", "of matrices (default 0.1)", default=0.1, shown="X", least=0, fixed=True)
    seed: int = option(
        "steps", "of a preset's weights and the order of the data (default 0)", default=0, least=0, fixed=True
    )
    eval_data: tuple[str, ...] = option(
        "evaluation", "files and folders that are not learned, whose loss is measured", default=(), shown="FILE|DIR"
    )
    eval_split: float | None = option(
        "evaluation", "a share of --data that is held out for that, as in 0.05", shown="X", fixed=True
    )
    eval_every: int | None = option("evaluation", "steps between (default: a tenth of the steps)", least=1)
    lora: int | None = option(
        "adapters", "train adapters of this rank, of the model nothing else", shown="R", least=1, fixed=True
    )
    lora_alpha: float | None = option("adapters", "they count alpha / R times (default 2 R)", shown="X", fixed=True)
    lora_targets: str | None = option(
        "adapters", "of what, by kind: experts, attention, router, shared; or by ends of names (default "
        "experts,attention)", shown="A,B,…", fixed=True,
    )  # fmt: skip
    quantize: str | None = option(
        "adapters", "hold routed experts as nf4, as int8, packed for C++ (default on CPUs that run it), or keep the "
        "codes that the checkpoint has (FP8, MXFP4)",
        choices=(*ENCODED, "keep"), fixed=True,
    )  # fmt: skip
    merge: bool = option("adapters", "also write the model with its adapters merged, to DIR/merged", default=False)
    ep: int | None = option("ranks", "ranks that share the experts (default: as many as fit)", least=1)
    fsdp: int | None = option("ranks", "ranks that share the other weights (default: what is left)", least=1)
    tp: int | None = option("ranks", "tensor-parallel ranks (default 1)", least=1)
    replicate: int | None = option("ranks", "copies of the sharded model (default 1)", least=1)
    replicate_experts: str = option(
        "ranks", "copy hot experts, for one call, to ranks with room: auto, where that pays, or how far above the mean "
        "the busiest rank may be, as in 0.1 (default off)", default="off", shown="off|auto|X",
    )  # fmt: skip
    copy_cost: int | None = option(
        "ranks", "slots that a replica must take off the busiest rank to be worth its way (default 1000)", least=0
    )
    out: str = option(
        "results", "where everything is written, shared by all hosts (default runs/train)", default="runs/train",
        shown="DIR", per_run=True,
    )  # fmt: skip
    save_dtype: str | None = option(
        "results", "of the trained weights in DIR/final (default: what each is in the checkpoint)",
        choices=("float32", "bfloat16", "float16"),
    )  # fmt: skip
    drop: tuple[str, ...] = option(
        "results", "tensors and files of the checkpoint that DIR/final is to leave out", default=(), shown="GLOB"
    )
    report_to: tuple[str, ...] = option(
        "results", "where else numbers go: tensorboard, wandb, trackio, mlflow …", default=(), shown="NAME"
    )
    save_every: int | None = option(
        "results", "write a checkpoint to DIR/checkpoints every N steps, and at a signal; 0: never (default: every 30 "
        "minutes, and at a signal; the last of them is kept until the model is written)", least=0,
    )  # fmt: skip
    keep: int | None = option("results", "keep the latest N checkpoints (default: all of --save-every N)", least=1)
    stop_after: int | None = option("results", "write a checkpoint after step N and end", least=1, per_run=True)
    resume: str | None = option(
        "results", "go on from a run's latest checkpoint, or from the one given; --model says where its model lies now",
        shown="DIR", per_run=True,
    )  # fmt: skip
    overwrite: bool = option(
        "results", "remove what is in the way in DIR: a model and checkpoints, with --resume those after the one given",
        default=False, per_run=True,
    )  # fmt: skip
    dry_run: bool = option(
        "results", "say what would be trained, on what, with what memory, and end", default=False, per_run=True
    )
    debug: bool = dataclasses.field(default=False, metadata={"per_run": True})

    def __post_init__(self) -> None:
        given = [(field, value) for field in OPTIONS if (value := getattr(self, field.name)) is not None]
        for field, value in given:
            about, flag = field.metadata, flag_of(field.name)
            if about["least"] is not None and not about["least"] <= value < math.inf:
                raise ConfigError(f"{flag} {value}: must be at least {about['least']}")
            if about["choices"] and value not in about["choices"]:
                raise ConfigError(f"{flag} {value}: must be one of {', '.join(about['choices'])}")
            if field.name in ("lr", "epochs", "lora_alpha") and not 0 < value < math.inf:
                raise ConfigError(f"{flag} {value}: must be a positive number")
        if self.lora is None and (odd := [name for name in WITH_LORA if getattr(self, name)]):
            raise ConfigError(f"{flag_of(odd[0])} {getattr(self, odd[0])}: goes with --lora")
        if self.seed > MOST_SEED:
            raise ConfigError(f"--seed {self.seed}: must be at most {MOST_SEED}")
        if self.eval_split is not None and (self.eval_data or not 0 < self.eval_split < 1):
            raise ConfigError(f"--eval-split {self.eval_split}: must be between 0 and 1, and stand without --eval-data")
        _ = self.tolerance
        if self.copy_cost is not None and self.replicate_experts == "off":
            raise ConfigError(f"--copy-cost {self.copy_cost}: goes with --replicate-experts")

    @property
    def tolerance(self) -> Literal["off", "auto"] | float:
        """`replicate_experts` as a word or a number. Raises ConfigError where it is neither."""
        if self.replicate_experts in ("off", "auto"):
            return cast(Literal["off", "auto"], self.replicate_experts)
        try:
            above = float(self.replicate_experts)
        except ValueError:
            above = math.nan
        if not 0 <= above < math.inf:
            given = self.replicate_experts
            raise ConfigError(f"--replicate-experts {given}: must be off, auto or a number from 0 on, 0.1 for 10 %")
        return above

    @property
    def asks(self) -> bool:
        """True where a report is all that is wanted: nothing is trained, and no output folder is looked at."""
        return self.data_report or self.dry_run

    @property
    def frozen(self) -> bool:
        """True where the model's own weights stay as they are, and what is trained lies beside them."""
        return self.lora is not None

    def resolved(self) -> TrainConfig:
        """Fill in the defaults that depend on whether the model is a preset or somebody's checkpoint."""
        steps, preset = self.max_steps or 100, self.model in PRESETS
        return dataclasses.replace(
            self, max_steps=steps, seq_len=self.seq_len or (128 if preset else 512),
            lr=self.lr or (4e-3 if preset else 2e-4 if self.lora else 2e-5),
            lora_alpha=self.lora_alpha or (self.lora and 2.0 * self.lora),
            lora_targets=self.lora_targets or ("experts,attention" if self.lora else None),
            eval_every=self.eval_every or max(1, steps // 10),
            warmup=min(steps // 10, 100) if self.warmup is None else self.warmup,
        )  # fmt: skip

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> TrainConfig:
        """The configuration of options by name, as JSON and argparse have them: with lists for tuples."""
        options: Any = {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
        return cls(**options)

    def made_of(self) -> dict[str, Any]:
        """The options that are not about one start of the command: what `--config` of a run like this one holds."""
        fields = {field.name: getattr(self, field.name) for field in OPTIONS if not field.metadata["per_run"]}
        return fields if self.epochs is None else fields | {"max_steps": None}


OPTIONS = [field for field in dataclasses.fields(TrainConfig) if "help" in field.metadata]
FIXED = tuple(field.name for field in OPTIONS if field.metadata["fixed"])


def flag_of(name: str) -> str:
    """The name of an option on the command line."""
    return f"--{name.replace('_', '-')}"


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """The layout of `world` ranks, innermost last: replicate x fsdp x tp for dense weights, and
    replicate x (fsdp * tp / ep) x ep for experts. The tp ranks of one group read the same data."""

    world: int
    ep: int
    fsdp: int
    tp: int
    replicate: int

    @property
    def data_size(self) -> int:
        return self.world // self.tp

    def data_rank(self, rank: int) -> int:
        return rank // self.tp

    @classmethod
    def of(cls, config: TrainConfig, *, world: int, num_experts: int | None = None) -> Mesh:
        """Lay out `world` ranks as `config` asks. fsdp defaults to what tp and replicate leave over; ep to the largest
        size that divides the experts, if they are given, and fsdp * tp, and is a multiple of tp, or 1. Raises
        ConfigError, with the arithmetic, for what does not fit."""
        tp, replicate = config.tp or 1, config.replicate or 1
        fsdp = config.fsdp or max(1, world // (tp * replicate))
        if replicate * fsdp * tp != world:
            raise ConfigError(
                f"replicate {replicate} x fsdp {fsdp} x tp {tp} = {replicate * fsdp * tp} ranks, but there are "
                f"{world}; change --replicate, --fsdp, --tp or the number of ranks (--nproc)"
            )
        shared = fsdp * tp
        fitting = [n for n in range(tp, shared + 1, tp) if shared % n == 0 and (num_experts or 0) % n == 0]
        ep = config.ep or max(fitting, default=1)
        if ep > 1:
            if ep % tp:
                raise ConfigError(f"--ep {ep} is not a multiple of --tp {tp}: {ep} = {ep // tp} x {tp} + {ep % tp}")
            if shared % ep:
                more = f"; start {ep} ranks or a multiple with --nproc" if shared < ep else ""
                raise ConfigError(f"--ep {ep} does not divide fsdp {fsdp} x tp {tp} = {shared} ranks{more}")
            if num_experts and num_experts % ep:
                raise ConfigError(
                    f"--ep {ep} does not divide the model's {num_experts} experts: "
                    f"{num_experts} = {num_experts // ep} x {ep} + {num_experts % ep}"
                )
        return cls(world=world, ep=ep, fsdp=fsdp, tp=tp, replicate=replicate)
