"""Expert parameters as DTensors of global shape [E, …]; each rank computes with what is its own.

    mesh dim    up [E, I, D]       down [E, D, F]    biases [E, …]
    ep          Shard(0)           Shard(0)          Shard(0)          rank r owns experts r * e .. r * e + e - 1
    etp         rows, gate and     Shard(2)          Replicate()       each rank a share of F
                up cut alike

Gate rows first and up rows after them are one dim of `up`: `_StridedShard(1, split_factor=2)` is torch's name for
cutting both halves alike, so `full_tensor()` gives the rows back in their own order.

Legend: M rows, K slots per row, E experts, e local experts, D model dim, F hidden dim, I = 2F with a gate, else F.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import Function, once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from trimtab.errors import ConfigError
from trimtab.experts.module import ExpertMLP
from trimtab.layout import experts_per_rank
from trimtab.parallel.expert_tensor import FirstRankBias, GatherRows, Lines, ReduceRows, SplitBias
from trimtab.parallel.stand_in import standing_in

NAMES = ("up", "down", "up_bias", "down_bias")
MAIN_GRAD_NAMES = ("main_grad", "overwrite_main_grad", "zero_out_wgrad")


@dataclass(frozen=True, kw_only=True)
class ExpertMesh:
    """Where experts are: a mesh slice of one dim (ep), or of two with `etp` naming the one that splits F."""

    mesh: DeviceMesh
    etp: str | None = None

    def __post_init__(self) -> None:
        names = self.mesh.mesh_dim_names or ()
        if self.mesh.ndim != (1 if self.etp is None else 2) or (self.etp is not None and self.etp not in names):
            raise ConfigError(
                f"expert mesh {names or self.mesh.ndim} with etp={self.etp!r}: hand in one dim (ep), or two "
                "with etp naming the one that splits F, such as mesh['etp', 'ep'] and etp='etp'"
            )

    @property
    def _etp_dim(self) -> int | None:
        return None if self.etp is None else (self.mesh.mesh_dim_names or ()).index(self.etp)

    @property
    def ep_dim(self) -> int:
        return 0 if self._etp_dim is None else 1 - self._etp_dim

    @property
    def ep_group(self) -> dist.ProcessGroup:
        return self.mesh.get_group(self.ep_dim)

    @property
    def etp_group(self) -> dist.ProcessGroup | None:
        """None where F is whole."""
        dim = self._etp_dim
        return None if dim is None or self.mesh.size(dim) == 1 else self.mesh.get_group(dim)

    def placements(self, etp: Placement) -> list[Placement]:
        """Shard(0) over ep, `etp` over the other dim if there is one."""
        return [Shard(0) if dim == self.ep_dim else etp for dim in range(self.mesh.ndim)]


class ParallelExperts(ExpertMLP):
    """What `ExpertParallel` makes of an `ExpertMLP`: the same module, of this class.

    `place`: where its experts are. `gradient_scale`: factor on its gradients, see `trimtab.parallel.ddp`.
    """

    place: ExpertMesh
    gradient_scale: float

    def forward(self, x_MD: Tensor, ids_MK: Tensor, w_MK: Tensor, *, num_slots: int | None = None) -> Tensor:
        """As `ExpertMLP.forward`, with local ids. Collective over the etp group, with a host sync."""
        names = [name for name in NAMES if getattr(self, name) is not None]
        with standing_in([(self, name) for name in names], [self._local(name) for name in names]):
            group = self.place.etp_group
            if group is None:
                return super().forward(x_MD, ids_MK, w_MK, num_slots=num_slots)
            lines = Lines.exchange(group, x_MD, num_slots)
            x, w, ids = GatherRows.apply(lines, x_MD, w_MK, ids_MK)  # type: ignore[no-untyped-call]
            y = super().forward(x, ids, w, num_slots=lines.num_slots)
            out: Tensor = ReduceRows.apply(lines, y)  # type: ignore[no-untyped-call]
            return out

    @property
    def gate_parts(self) -> int:
        """2 where the rows of `up` are a gate and then an up half, else 1."""
        gated: bool = getattr(self.math.activation, "gated", False)
        return 2 if gated and self.activation != "clamped_swiglu" else 1  # clamped_swiglu: interleaved

    def shard(self, place: ExpertMesh, src_data_rank: int | None) -> None:
        """Cut the whole parameters over `place`. No communication with `src_data_rank=None`; else from that rank."""
        group = place.etp_group
        ranks = 1 if group is None else dist.get_world_size(group)
        if self.hidden % ranks:
            raise ConfigError(f"F = {self.hidden} does not divide over {ranks} expert-tensor-parallel ranks")
        if self.recipe is not None or self.delay_wgrad:
            raise ConfigError("ExpertParallel takes experts without a recipe and without delay_wgrad")
        self.num_experts = experts_per_rank(self.num_experts, place.mesh.size(place.ep_dim))
        self.place, self.gradient_scale = place, 1.0
        rows: Placement = Shard(1) if self.gate_parts == 1 else _StridedShard(1, split_factor=2)
        split = {"up": rows, "down": Shard(2)}
        for name in NAMES:
            param = self._parameters.get(name)
            if param is not None:
                cut = place.placements(split.get(name, Replicate()))
                whole = distribute_tensor(param.detach(), place.mesh, cut, src_data_rank=src_data_rank)
                setattr(self, name, torch.nn.Parameter(whole, requires_grad=param.requires_grad))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw every expert on every rank and keep what is this rank's, so that ranks with the same seed hold the same
        experts however they are cut. One whole parameter at a time is in memory."""
        kept: dict[str, Any] = {name: self._parameters.get(name) for name in NAMES}
        for fan_in, names in ((self.dim, ("up", "up_bias")), (self.hidden, ("down", "down_bias"))):
            for name in names:
                param = kept[name]
                if isinstance(param, DTensor):
                    whole = torch.empty(param.shape, dtype=param.dtype, device=param.to_local().device)
                    whole.uniform_(-(fan_in**-0.5), fan_in**-0.5)
                    mine = distribute_tensor(whole, param.device_mesh, param.placements, src_data_rank=None)
                    param.to_local().copy_(mine.to_local())

    def _local(self, name: str) -> Tensor:
        """This rank's part of a parameter, differentiable; where its gradients go (`main_grad`) comes along."""
        param = getattr(self, name)
        local: Tensor = param.to_local() if isinstance(param, DTensor) else param
        if self.gradient_scale != 1.0:
            local = _Scaled.apply(local, self.gradient_scale)  # type: ignore[no-untyped-call]
        group = self.place.etp_group
        if name == "up_bias" and group is not None:
            local = SplitBias.apply(local, self.gate_parts, group)  # type: ignore[no-untyped-call]
        if name == "down_bias" and group is not None:
            local = FirstRankBias.apply(local, group)  # type: ignore[no-untyped-call]
        for attribute in MAIN_GRAD_NAMES:
            if hasattr(param, attribute):
                value = getattr(param, attribute)
                setattr(local, attribute, value.to_local() if isinstance(value, DTensor) else value)
        return local


class _Scaled(Function):
    """Identity; the gradient is multiplied."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, None]:
        return d * ctx.factor, None
