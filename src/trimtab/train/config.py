"""What a training run is made of: its options, and how its ranks are laid out.

Pure values and integer arithmetic; nothing here imports torch. An option that is None has a default that depends
on the model or on the number of ranks, filled in by `TrainConfig.resolved` and `Mesh.of`.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass

from trimtab.errors import ConfigError

DTYPES = ("float32", "bfloat16")
MOST_SEED = 2**32 - 1  # of numpy


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The options of `trimtab train`.

    Attributes:
        model: the name of a preset, or a folder with a Hugging Face checkpoint.
        data: files and directories; empty means the source of the standard library.
        out: the folder that everything is written to.
        ep, fsdp, tp, replicate: sizes of the expert, FSDP, tensor and replica groups, in ranks.
        max_steps: optimizer steps.
        batch_size: sequences per data-parallel rank and forward pass.
        seq_len: tokens per sequence.
        grad_accum: forward passes per optimizer step.
        lr: peak learning rate, reached after `warmup` steps and then lowered along a cosine.
        seed: decides initial weights of a preset and the order of the data.
        dtype: what the model computes in; master weights and optimizer are float32 in either case.
        save_every: optimizer steps between checkpoints; none are written if not given.
        stop_after: the step after which the run writes a checkpoint and ends, its schedule unfinished.
        keep: how many checkpoints are kept, the latest ones; all if not given.
        resume: the checkpoint to go on from; see `trimtab.train.resume`.
        overwrite: what lies in the way in `out` is removed: an earlier run's model and checkpoints, or what came after
            the checkpoint that the run goes on from.
    """

    model: str = "qwen3_moe"
    data: tuple[str, ...] = ()
    out: str = "runs/train"
    ep: int | None = None
    fsdp: int | None = None
    tp: int | None = None
    replicate: int | None = None
    max_steps: int | None = None
    batch_size: int = 8
    seq_len: int | None = None
    grad_accum: int = 1
    lr: float | None = None
    warmup: int | None = None
    seed: int = 0
    dtype: str = "float32"
    save_every: int | None = None
    stop_after: int | None = None
    keep: int | None = None
    resume: str | None = None
    overwrite: bool = False
    debug: bool = False

    def __post_init__(self) -> None:
        sizes = ("ep", "fsdp", "tp", "replicate", "batch_size", "grad_accum")
        steps = ("max_steps", "save_every", "stop_after", "keep")
        for name, least in [*((n, 1) for n in (*sizes, *steps)), ("seq_len", 2), ("warmup", 0), ("seed", 0)]:
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"--{name.replace('_', '-')} {value}: must be at least {least}")
        if self.seed > MOST_SEED:
            raise ConfigError(f"--seed {self.seed}: must be at most {MOST_SEED}")
        if self.lr is not None and not (0 < self.lr < math.inf):
            raise ConfigError(f"--lr {self.lr}: must be a positive number")
        if self.dtype not in DTYPES:
            raise ConfigError(f"--dtype {self.dtype}: must be one of {', '.join(DTYPES)}")

    def resolved(self, *, preset: bool) -> TrainConfig:
        """Fill in the defaults that depend on whether the model is a preset or somebody's checkpoint."""
        steps = self.max_steps or 100
        return dataclasses.replace(
            self,
            max_steps=steps,
            seq_len=self.seq_len or (128 if preset else 512),
            lr=self.lr or (4e-3 if preset else 2e-5),
            warmup=min(steps // 10, 100) if self.warmup is None else self.warmup,
        )

    def to_json(self) -> str:
        """One line that `from_json` reads back."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> TrainConfig:
        """Read what `to_json` wrote."""
        fields = json.loads(text)
        return cls(**{**fields, "data": tuple(fields["data"])})


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """How `world` ranks are laid out, innermost last: replicate x fsdp x tp for dense weights, and
    replicate x (fsdp * tp / ep) x ep for experts. The tp ranks of one group read the same data."""

    world: int
    ep: int
    fsdp: int
    tp: int
    replicate: int

    @property
    def data_size(self) -> int:
        """Ranks that read different data."""
        return self.world // self.tp

    def data_rank(self, rank: int) -> int:
        """Which of the `data_size` shares of the data `rank` reads."""
        return rank // self.tp

    @classmethod
    def of(cls, config: TrainConfig, *, world: int, num_experts: int | None = None) -> Mesh:
        """Lay out `world` ranks as `config` asks.

        fsdp defaults to what tp and replicate leave over; ep to the largest size that divides the experts and
        fsdp * tp and is a multiple of tp, or 1. Without `num_experts` the experts are not looked at. Raises
        ConfigError, with the arithmetic, for what does not fit.
        """
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
