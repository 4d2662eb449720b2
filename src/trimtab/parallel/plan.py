"""`parallelize`: patterns of module names to styles, where nothing is skipped in silence."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from fnmatch import fnmatchcase

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from trimtab.errors import ConfigError
from trimtab.moe import MoE
from trimtab.parallel.style import ExpertParallel
from trimtab.parallel.wiring import Wiring

Plan = Mapping[str, ParallelStyle | tuple[ParallelStyle, DeviceMesh]]


def matches(name: str, pattern: str) -> bool:
    """Whether a dotted name fits a glob, part by part: "*" stays within its part, and is no name for the whole."""
    parts, globs = name.split("."), pattern.split(".")
    return (
        bool(name) == bool(pattern)
        and len(parts) == len(globs)
        and all(fnmatchcase(p, g) for p, g in zip(parts, globs, strict=True))
    )


def check_unshared(model: nn.Module, name: str, moe: MoE) -> None:
    """Whether the experts of the layer called `name` are those of no other module.

    Raises:
        ConfigError: they are, or one of their parameters is.
    """
    own = {id(param): f"experts.{key}" for key, param in moe.experts.named_parameters()}
    inside = set(moe.experts.modules())
    for other_name, other in model.named_modules():
        if other is not moe and any(child is moe.experts for child in other.children()):
            raise ConfigError(f"the experts are those of {other_name} too: {_UNSHARED}", layer=name)
        for key, param in other._parameters.items():
            if id(param) in own and other not in inside:
                where = f"{other_name}.{key}".lstrip(".")
                raise ConfigError(f"{own[id(param)]} is {where} too: {_UNSHARED}", layer=name)


_UNSHARED = (
    "layers may not share experts or parameters of experts that are spread over ranks. Put one MoE in both places, or "
    "give each its own"
)


def parallelize(model: nn.Module, mesh: DeviceMesh, plan: Plan, *, src_data_rank: int | None = None) -> nn.Module:
    """Apply styles to the modules whose names match, in place, in the order of the plan and of the modules.

    Every rank of the meshes must call with the same model and plan. Afterwards, `fully_shard_moe` or `ddp`, and then
    the optimiser: experts have new parameters, which one that was built before does not know.

    Args:
        mesh: what a style is applied on, unless its entry is (style, mesh).
        plan: pattern -> style, or (style, mesh). "" is the model itself; "layers.*.moe" as for file names, part by
            part. Styles: `ExpertParallel` and any of torch's.
        src_data_rank: None, each rank keeps its own part of its own values: build the model from one seed, load it,
            or build it on the meta device; else the rank of the mesh whose values all take.

    All `ExpertParallel` layers of one call share one transport for each expert group and kind.

    Experts' parameters become DTensors: torch's optimisers with fused=True or foreach=True want them in groups of their
    own, unless `fully_shard_moe` makes all of them such; and `torch.autograd.detect_anomaly` needs check_nan=False, for
    torch cannot look for NaN in a DTensor's gradient.

    Raises:
        ConfigError: a pattern that matches nothing (with near misses), a module that two patterns match, or what the
            styles raise. Nothing has been changed where patterns are at fault, or a module that `ExpertParallel` does
            not fit, or whose experts another layer shares.
    """
    names = [name for name, _ in model.named_modules()]
    chosen: dict[str, str] = {}
    for pattern in plan:
        found = [name for name in names if matches(name, pattern)]
        if not found:
            near = difflib.get_close_matches(pattern, [name for name in names if name], n=3, cutoff=0.4)
            hint = f"; near it are {', '.join(near)}" if near else ""
            raise ConfigError(f"pattern {pattern!r} matches no module of {type(model).__name__}{hint}")
        for name in found:
            if name in chosen:
                raise ConfigError(f"module {name!r} is matched twice, by {chosen[name]!r} and by {pattern!r}")
            chosen[name] = pattern
    wiring, steps = Wiring(), []
    for name, pattern in chosen.items():
        entry = plan[pattern]
        style, on = entry if isinstance(entry, tuple) else (entry, mesh)
        steps.append((name, model.get_submodule(name), style, on))
        if isinstance(style, ExpertParallel):
            check_unshared(model, name, style.check(model.get_submodule(name), on, name))
    for name, module, style, on in steps:
        if isinstance(style, ExpertParallel):
            style.apply_to(module, on, wiring=wiring, layer=name, src_data_rank=src_data_rank)
        else:
            parallelize_module(module, on, style, src_data_rank=src_data_rank)
    return model
