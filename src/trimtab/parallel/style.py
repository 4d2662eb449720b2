"""`ExpertParallel`: the style that spreads a `MoE` over ranks, for `parallelize_module` and for `parallelize`."""

from __future__ import annotations

from typing import Literal, get_args

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from trimtab.dispatch.dispatcher import CombineMode, Dispatcher, check_combine
from trimtab.dispatch.transports import TRANSPORTS
from trimtab.errors import ConfigError
from trimtab.experts.module import ExpertMLP
from trimtab.moe import AllTokens, MoE
from trimtab.parallel.expert_tensor import ExpertTensorGroup
from trimtab.parallel.experts import ExpertMesh, ParallelExperts, check_split
from trimtab.parallel.moe import ParallelMoE
from trimtab.parallel.token_meshes import TokenMeshes, check_meshes
from trimtab.parallel.tokens import ReplicatedTokens
from trimtab.parallel.wiring import Wiring

TokenMode = Literal["own", "replicated", "sharded"]


class ExpertParallel(ParallelStyle):
    """Experts over an expert mesh; tokens as the ranks hold them.

    The mesh handed to `parallelize_module` or `parallelize` is the expert mesh: one dim (ep), or two with `etp`
    naming the one that splits each expert's F. All ranks of the mesh must apply the style to the same modules in the
    same order. It communicates only where `src_data_rank` (of `parallelize_module`: 0) asks for values of one rank.

    Args:
        transport: "alltoall"; "shared_memory" for ranks of one host without a GPU, faster there; "auto" for that one
            where the ranks can use it, and "alltoall" where they can't; or "allgather" for small groups. Layers that
            one style is applied to share one transport for each group; a group of one rank needs none.
        tokens: "own", each rank has tokens of its own; "replicated", the ranks of `tp_mesh` hold the same [.., L, D]
            and each takes its share of the L positions; "sharded", each holds its positions of every sequence, any
            number. With the latter two the layer's other parameters (router, shared experts, projections) have their
            gradients summed over `tp_mesh`, in autograd.
        tp_mesh: the ranks that share a batch, one dim; given exactly where tokens are not "own".
        cp_mesh: context parallel, one dim: the ranks that hold positions of the same sequences, any number each and in
            any order (in turns, zig-zag), as `tokens` says. For gradients they are data-parallel ranks like others:
            they must be among those of `dp_mesh` later, and nothing is summed over them here. Only the losses per
            sequence are taken over them and `tp_mesh`, whose ranks must have as many sequences for those. What ranks of
            a `tp_mesh` or `cp_mesh` must have as many of is compared where they are of one expert group.
        etp: name of the mesh dim that splits F. Ranks of an etp group may have different tokens: received rows are
            gathered over the group before the experts, and their outputs summed and given back after them. Save and
            load by `trimtab.checkpoint`: torch.distributed.checkpoint takes a rank's share of `up`, a part of gate
            and a part of up, for one stretch and puts it in another place of a model that is laid out otherwise.
        combine: as in `Dispatcher`; the layer's own if not given.

    Gradients: an expert's is the sum over all ranks' losses, see `trimtab.parallel.fsdp` and `.ddp` for the mean.

    Balance losses are those of one process over the tokens of `tp_mesh` and `cp_mesh`, and over the global batch once
    `fully_shard_moe`, `ddp` or `join_data_parallel` has been given the data-parallel ranks. A `router.groups` that was
    set by hand, before or after, stays.

    Raises:
        ConfigError: names, meshes or sizes that do not fit; the module is no `MoE`, or is parallel already.
    """

    def __init__(
        self,
        *,
        transport: Literal["alltoall", "allgather", "shared_memory", "auto"] = "alltoall",
        tokens: TokenMode = "own",
        tp_mesh: DeviceMesh | None = None,
        cp_mesh: DeviceMesh | None = None,
        etp: str | None = None,
        combine: CombineMode | None = None,
    ) -> None:
        super().__init__()
        if transport not in TRANSPORTS:
            raise ConfigError(f"transport={transport!r} is not one of {tuple(TRANSPORTS)}")
        if tokens not in get_args(TokenMode):
            raise ConfigError(f"tokens={tokens!r} is not one of {get_args(TokenMode)}")
        check_meshes(**{name: mesh for name, mesh in (("tp_mesh", tp_mesh), ("cp_mesh", cp_mesh)) if mesh is not None})
        if (tokens == "own") != (tp_mesh is None) or (tp_mesh is not None and tp_mesh.ndim != 1):
            raise ConfigError(f"tokens={tokens!r} with tp_mesh={tp_mesh}: a tp_mesh of one dim, or tokens='own'")
        if combine is not None:
            check_combine(combine)
        if cp_mesh is not None and cp_mesh.ndim != 1:
            raise ConfigError(f"cp_mesh={cp_mesh}: hand in a mesh of one dim")
        self.transport, self.tokens, self.etp, self.combine = transport, tokens, etp, combine
        self.meshes = TokenMeshes(tp=tp_mesh, cp=cp_mesh)
        self._wiring = Wiring()

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return self.apply_to(module, device_mesh, wiring=self._wiring, src_data_rank=self.src_data_rank)

    def apply_to(
        self,
        module: nn.Module,
        mesh: DeviceMesh,
        *,
        wiring: Wiring,
        layer: str = "",
        src_data_rank: int | None = None,
    ) -> MoE:
        """Make `module` parallel, in place; one that does not fit stays as it was. layer: its name, if not its own."""
        moe = self.check(module, mesh, layer)
        place, old, name = ExpertMesh(mesh=mesh, etp=self.etp), moe.dispatcher, layer or moe.dispatcher.layer
        split, fingerprint = place.etp_group, f"{moe.fingerprint}, tokens {self.tokens}"
        etp = None if split is None else ExpertTensorGroup(split, wiring.guard(split), name or "experts")
        transport = wiring.transport(self.transport, place.ep_group)
        combine = self.combine or old.combine_mode
        dispatcher = Dispatcher(old.num_experts, transport, combine=combine, layer=name, fingerprint=fingerprint)
        moe.experts.__class__ = ParallelExperts
        assert isinstance(moe.experts, ParallelExperts)
        moe.experts.shard(place, etp, src_data_rank)
        moe.dispatcher = dispatcher
        moe.__class__ = ParallelMoE
        assert isinstance(moe, ParallelMoE)
        moe.spread(self.meshes, name)
        group = moe.tp_group
        moe.tokens = ReplicatedTokens(group) if group is not None and self.tokens == "replicated" else AllTokens()
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
        experts = module.experts
        if type(experts) is not ExpertMLP:
            raise ConfigError(f"experts are a {type(experts).__name__}, expected an ExpertMLP", layer=layer)
        check_split(experts, ExpertMesh(mesh=mesh, etp=self.etp))
        return module
