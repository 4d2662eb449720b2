"""Layouts of a run over its ranks: each is planned without values, and fits, or is refused with what would help."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any

from trimtab.convert.steps import mapping_of
from trimtab.dispatch.options import COPY_COST, ExchangeOptions
from trimtab.dispatch.planned import NAME, planned
from trimtab.errors import ConfigError, TrimtabError, first_line
from trimtab.plan.device import Device
from trimtab.plan.stages import Stages, extrapolated, few_layers, kinds_of, measure
from trimtab.plan.traffic import Traffic
from trimtab.plan.trained import trained
from trimtab.plan.unrun import kernels_without_values
from trimtab.plan.without_values import World
from trimtab.train.config import Mesh, TrainConfig
from trimtab.train.loading import build_model
from trimtab.train.models import check_model, check_sharded, num_experts, packed
from trimtab.train.presets import PRESETS


@dataclass(frozen=True, kw_only=True)
class Layout:
    """experts: of a layer. kernels: what multiplies them. refused: why the run would not start, or ""."""

    config: TrainConfig
    mesh: Mesh
    device: Device
    skew: str
    experts: int
    kernels: str = ""
    stages: Stages | None = None
    refused: str = ""

    @cached_property
    def peak(self) -> tuple[str, int, dict[str, int]]:
        """The stage that holds the most, how many bytes, and of what."""
        assert self.stages is not None, self.refused
        stage, most = self.stages.peak
        return stage, most, self.stages.parts[stage]

    @property
    def left(self) -> float:
        """Bytes that are left at the peak; below 0 for a layout that does not fit."""
        return float("-inf") if self.stages is None else self.device.room - self.peak[1]

    @property
    def seconds(self) -> float:
        """No step takes less: all FLOPs at the machine's most, or all that leaves the rank over its link."""
        if self.stages is None:
            return float("inf")
        away = 0.0
        for name, count in self.stages.moved.items():
            ranks = int(name.rpartition(" ")[2])
            away += count * (ranks - 1) / ranks * (2 if "reduce_" in name and "scatter" not in name else 1)
        return max(self.stages.flops / self.device.flops, away / self.device.link)

    @property
    def words(self) -> str:
        """Whether it fits; where not, the category that holds too much, its stage, and the switch that would help."""
        if self.refused:
            return f"refused: {self.refused}"
        if self.left >= 0:
            return "yes" if self.device.bytes is None else f"yes, {self.left / 1e9:.3g} left"
        stage, _, parts = self.peak
        category, switch = self._remedy(parts)
        return f"no, {-self.left / 1e9:.3g} too much: {category} {parts[category] / 1e9:.3g} in the {stage}; {switch}"

    def _remedy(self, parts: dict[str, int]) -> tuple[str, str]:
        """The cheapest switch of a category that holds what is too much; else of the largest."""
        config, mesh = self.config, self.mesh
        smaller = f"--batch-size {config.batch_size // 2}" if config.batch_size > 1 else "a shorter --seq-len"
        shared = mesh.fsdp * mesh.tp
        fits = (n for n in range(mesh.ep + 1, shared + 1) if shared % n == self.experts % n == n % mesh.tp == 0)
        less = "--lora 16" if mesh.tp == 1 else "--lora 16 --lora-targets experts"
        less = "--quantize nf4" if config.lora and mesh.tp <= mesh.ep else "" if config.lora else less
        states = "more ranks" if config.quantize in ("nf4", "keep") or not less else f"more ranks, or {less}"
        switches = {
            "activations": smaller if config.gradient_checkpointing else "--gradient-checkpointing",
            "gathered": smaller if (more := next(fits, None)) is None else f"--ep {more}",
            "exchange": "--replicate-experts 0.1" if config.replicate_experts == "off" and mesh.ep > 1 else smaller,
            **dict.fromkeys(("other", "copies"), smaller),
            **dict.fromkeys(("weights", "moments", "gradients"), "--replicate 1" if mesh.replicate > 1 else states),
        }
        again = 0 if config.gradient_checkpointing else parts["exchange"] + parts["copies"]  # which go with them
        held = parts | {"activations": parts["activations"] + again}
        enough = [name for name in switches if held[name] >= -self.left]
        category = enough[0] if enough else max(switches, key=held.__getitem__)
        return category, switches[category]

    @property
    def options(self) -> dict[str, Any]:
        """The options of `trimtab train` that ask for this layout."""
        sizes = {name: size for name, size in asdict(self.mesh).items() if name != "world"}
        return sizes | {"gradient_checkpointing": self.config.gradient_checkpointing}

    def as_json(self) -> dict[str, Any]:
        told = self.options | {"skew": self.skew, "fits": self.left >= 0}
        if self.stages is None:
            return told | {"refused": self.refused}
        stage, most, _ = self.peak
        told |= {"kernels": self.kernels, "outside": dict(self.device.outside)}
        told |= {"peak": most, "at": stage, "stages": self.stages.parts}
        told |= {"at least seconds": self.seconds, "flops": self.stages.flops, "moved": dict(self.stages.moved)}
        return told | ({} if self.left >= 0 else {"refused": self.words})


def meshes(config: TrainConfig, ranks: int, num_experts: int) -> Iterator[tuple[TrainConfig, Mesh]]:
    """All layouts that divide, with what `config` fixes: experts over many ranks first, then tp, then replicas."""
    sizes = [n for n in range(1, ranks + 1) if ranks % n == 0]
    free = {"replicate": sizes, "tp": sizes, "ep": sizes[::-1], "gradient_checkpointing": (False, True)}
    for values in product(*([getattr(config, name)] if getattr(config, name) else all for name, all in free.items())):
        asked = replace(config, **dict(zip(free, values, strict=True)))
        try:
            yield asked, Mesh.of(asked, world=ranks, num_experts=num_experts)
        except ConfigError:
            continue


def plan_layout(config: TrainConfig, mesh: Mesh, device: Device, skew: str = "even", *, skeleton: Any) -> Layout:
    """Plan one layout of the run of `config`, which is resolved. skeleton: the model on the meta device, of `inspect`.

    Raises:
        ConfigError: there is a process group; `skew` is none.
    """
    cost = COPY_COST if config.copy_cost is None else config.copy_cost
    options = ExchangeOptions(replicate_experts=config.tolerance, copy_cost=cost)
    traffic = Traffic(skew=skew, replication=options.replication)

    def run(chosen: Sequence[int]) -> Stages:
        with World(mesh.world) as world, planned(traffic, rounds=device.kind == "cpu", bounds=skew == "worst"):
            model = build_model(few_layers(skeleton.config, chosen), config, mesh, transport=NAME)
            world.fill(model)
            return measure(model, trained(model, config, mesh), world, device=device)

    found: Any = {"config": config, "mesh": mesh, "device": device, "skew": skew, "experts": num_experts(skeleton)}
    try:
        found["kernels"] = kernels_without_values(config.kernels, device.kind).name
        config = packed(config, skeleton, mesh, device.kind)
        check_model(config, skeleton, mesh, ())
        check_sharded(() if config.model in PRESETS else mapping_of(skeleton), skeleton, mesh)
        return Layout(**found, stages=extrapolated(kinds_of(skeleton), run))
    except TrimtabError as error:
        return Layout(**found, refused=error.message)
    except (ValueError, RuntimeError, NotImplementedError) as error:  # of what transformers does not shard so
        return Layout(**found, refused=first_line(error, typed=True))
