"""`ExpertParallel`, the style that spreads a `MoE` over ranks, and `parallelize`, which applies styles by name."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Literal, get_args

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from trimtab.dispatch.dispatcher import Dispatcher
from trimtab.dispatch.options import COPY_COST, CombineMode, ExchangeOptions, Replication
from trimtab.dispatch.transport import Transport
from trimtab.dispatch.transports import TRANSPORTS
from trimtab.errors import ConfigError
from trimtab.experts.module import ExpertMLP
from trimtab.experts.replicated import check_replicable
from trimtab.moe import MoE
from trimtab.parallel.expert_tensor import ExpertTensorGroup
from trimtab.parallel.experts import ParallelExperts, check_split
from trimtab.parallel.meshes import ExpertMesh, TokenMeshes, check_meshes
from trimtab.parallel.moe import ParallelMoE

TokenMode = Literal["own", "replicated", "sharded"]
Transports = dict[tuple[str, dist.ProcessGroup], Transport]
"""Transports that layers share, by kind and group. All ranks ask in the same order."""


class ExpertParallel(ParallelStyle):
    """Experts over an expert mesh; tokens as the ranks hold them.

    The mesh handed to `parallelize_module` or `parallelize` is the expert mesh: one dim (ep), or two with `etp`
    naming the one that splits each expert's F. All ranks of the mesh must apply the style to the same modules in the
    same order. It communicates only where `src_data_rank` (of `parallelize_module`: 0) asks for values of one rank.

    Args:
        transport: a name in `trimtab.dispatch.transports.TRANSPORTS`: "alltoall"; "shared_memory" for ranks of one host
            without a GPU, faster there; "auto" for that one where the ranks can use it; "allgather" for small groups.
            Layers of one style share a transport for each group; a group of one rank needs none.
        tokens: "own", each rank has tokens of its own; "replicated", the ranks of `tp_mesh` hold the same [.., L, D]
            and each takes its share of the L positions; "sharded", each holds its positions of every sequence, any
            number. With the latter two the layer's other parameters (router, shared experts, projections) have their
            gradients summed over `tp_mesh`, in autograd.
        tp_mesh: the ranks that share a batch, one dim; given exactly where tokens are not "own".
        cp_mesh: context parallel, one dim: the ranks that hold positions of the same sequences, any number each and in
            any order. For gradients they are data-parallel ranks, among those of `dp_mesh` later; the losses per
            sequence are taken over them and `tp_mesh`, whose ranks must have as many sequences for those.
        etp: name of the mesh dim that splits F. Ranks of an etp group may have different tokens: received rows go to
            all of the group before the experts, and the parts of their outputs come back to be summed.
        combine: as in `Dispatcher`; the layer's own if not given.
        replicate_experts: copy hot experts, for one call, to ranks that have room, so that no rank computes much more
            than the mean: "off"; "auto", where that is worth `copy_cost`; or how far above the mean the busiest
            rank may be, 0.1 for 10 %. Replicas' gradients come home: parameters and all that sees them are as without.
        copy_cost: how many slots a replica must take off the busiest rank to be worth its way there and back.

    Gradients: an expert's is the sum over all ranks' losses, see `trimtab.parallel.fsdp` and `.ddp` for the mean.

    Balance losses are those of one process over the tokens of `tp_mesh` and `cp_mesh`, and over the global batch once
    `fully_shard_moe`, `ddp` or `join_data_parallel` has been given the data-parallel ranks. A `router.groups` that was
    set by hand, before or after, stays.

    Raises:
        ConfigError: names, meshes or sizes that do not fit; the module is no `MoE`, or is parallel already.
    """

    def __init__(
        self, *, transport: str = "alltoall", tokens: TokenMode = "own", tp_mesh: DeviceMesh | None = None,
        cp_mesh: DeviceMesh | None = None, etp: str | None = None, combine: CombineMode | None = None,
        replicate_experts: Replication = "off", copy_cost: int = COPY_COST,
    ) -> None:  # fmt: skip
        super().__init__()
        if tokens not in get_args(TokenMode):
            raise ConfigError(f"tokens={tokens!r} is not one of {get_args(TokenMode)}")
        given = {"tp_mesh": tp_mesh, "cp_mesh": cp_mesh}
        check_meshes(1, **{name: mesh for name, mesh in given.items() if mesh is not None})
        if (tokens == "own") != (tp_mesh is None):
            raise ConfigError(f"tokens={tokens!r} with tp_mesh={tp_mesh}: a tp_mesh, or tokens='own'")
        self.options = ExchangeOptions(
            transport=transport, combine="sum" if combine is None else combine, replicate_experts=replicate_experts,
            copy_cost=copy_cost,
        )  # fmt: skip
        self.tokens, self.etp, self.combine = tokens, etp, combine
        self.meshes = TokenMeshes(tp=tp_mesh, cp=cp_mesh)
        self._transports: Transports = {}

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return self.apply_to(module, device_mesh, self._transports, src_data_rank=self.src_data_rank)

    def apply_to(
        self, module: nn.Module, mesh: DeviceMesh, transports: Transports, *, layer: str = "",
        src_data_rank: int | None = None,
    ) -> MoE:  # fmt: skip
        """Make `module` parallel, in place; one that does not fit stays as it was. layer: its name, if not its own."""
        moe = self.check(module, mesh, layer)
        place, old, name = ExpertMesh(mesh=mesh, etp=self.etp), moe.dispatcher, layer or moe.dispatcher.layer

        def over(dim: int) -> Transport | None:
            key = self.options.transport, mesh.get_group(dim)
            if mesh.size(dim) > 1 and key not in transports:
                transports[key] = TRANSPORTS[key[0]](key[1])
            return transports.get(key)

        split = None if self.etp is None else over(1 - place.ep_dim)
        moe.dispatcher = Dispatcher(
            old.num_experts, over(place.ep_dim), combine=self.combine or old.combine_mode, layer=name,
            fingerprint=f"{moe.fingerprint}, tokens {self.tokens}", replication=self.options.replication, etp=split,
        )  # fmt: skip
        moe.experts.__class__ = ParallelExperts
        assert isinstance(moe.experts, ParallelExperts)
        moe.experts.shard(place, None if split is None else ExpertTensorGroup(split, name), src_data_rank)
        moe.__class__ = ParallelMoE
        assert isinstance(moe, ParallelMoE)
        moe.spread(self.meshes)
        moe.shares = self.tokens == "replicated" and moe.tp_group is not None
        return moe

    def check(self, module: nn.Module, mesh: DeviceMesh, layer: str = "") -> MoE:
        """The module, if the style fits it. Nothing is changed, nothing is sent.

        Raises:
            ConfigError: see the class.
            BackendError: a recipe cannot work on a rank's share.
        """
        if isinstance(module, ParallelMoE):
            raise ConfigError("ExpertParallel was applied before", layer=layer or module.dispatcher.layer)
        if type(module) is not MoE:  # the forward of a class derived from it would be lost
            raise ConfigError(
                f"ExpertParallel is for trimtab.MoE itself, not {type(module).__name__}: apply it to a MoE inside",
                layer=layer,
            )
        if type(module.experts) is not ExpertMLP:
            raise ConfigError(f"experts are a {type(module.experts).__name__}, expected an ExpertMLP", layer=layer)
        if self.options.replication is not None:
            check_replicable(module.experts, layer)
        check_split(module.experts, ExpertMesh(mesh=mesh, etp=self.etp))
        return module


Plan = Mapping[str, ParallelStyle | tuple[ParallelStyle, DeviceMesh]]


def matches(name: str, pattern: str) -> bool:
    """Match a dotted name with a glob, part by part: "*" stays within its part, and is no name for the whole."""
    parts, globs = name.split("."), pattern.split(".")
    return bool(name) == bool(pattern) and len(parts) == len(globs) and all(map(fnmatchcase, parts, globs))


def check_unshared(model: nn.Module, moe: MoE, layer: str) -> None:
    """Raises ConfigError where another module has parameters of the layer's experts too."""
    own = {id(param) for param in moe.experts.parameters()}
    places = [name for name, module in model.named_modules(remove_duplicate=False) if module is moe]
    homes = tuple(f"{place}.experts.".lstrip(".") for place in places)
    for name, param in model.named_parameters(remove_duplicate=False):
        if id(param) in own and not name.startswith(homes):
            raise ConfigError(
                f"{name} is a parameter of these experts too: layers may not share those that are spread over ranks. "
                "Put one MoE in both places, or give each its own",
                layer=layer,
            )


def parallelize(model: nn.Module, mesh: DeviceMesh, plan: Plan, *, src_data_rank: int | None = None) -> nn.Module:
    """Apply styles to the modules whose names match, in place, in the order of the plan and of the modules.

    Every rank of the meshes must call with the same model and plan. `fully_shard_moe` or `ddp` come next, and then the
    optimizer: experts have new parameters.

    Args:
        mesh: what a style is applied on, unless its entry is (style, mesh).
        plan: pattern -> style, or (style, mesh). "" is the model itself; "layers.*.moe" as for file names, part by
            part. Styles: `ExpertParallel` and any of torch's.
        src_data_rank: None, each rank keeps its own part of its own values: build the model from one seed, load it,
            or build it on the meta device; else the rank of the mesh whose values all take.

    All `ExpertParallel` layers of one call share one transport for each expert group and kind.

    Experts' parameters become DTensors: torch's optimizers with fused=True or foreach=True want them in groups of their
    own, unless `fully_shard_moe` makes all of them such; and `torch.autograd.detect_anomaly` needs check_nan=False.

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
    transports: Transports = {}
    steps = []
    for name, pattern in chosen.items():
        entry = plan[pattern]
        style, on = entry if isinstance(entry, tuple) else (entry, mesh)
        steps.append((name, model.get_submodule(name), style, on))
        if isinstance(style, ExpertParallel):
            check_unshared(model, style.check(model.get_submodule(name), on, name), name)
    for name, module, style, on in steps:
        if isinstance(style, ExpertParallel):
            style.apply_to(module, on, transports, layer=name, src_data_rank=src_data_rank)
        else:
            parallelize_module(module, on, style, src_data_rank=src_data_rank)
    return model
