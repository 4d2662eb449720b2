"""Expert parameters as DTensors of global shape [E, …]; each rank computes with its local part.

    mesh dim    gate_up [E, 2, F, D] and its bias    up [E, F, D] and its bias    down [E, D, F]    down_bias [E, D]
    ep          Shard(0)                             Shard(0)                     Shard(0)          Shard(0)
    etp         Shard(2), a share of F               Shard(1)                     Shard(2)          Replicate()

Rank r of ep owns experts r * e .. r * e + e - 1.

Legend: M rows, K slots per row, E experts, e local experts, D model dim, F hidden dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import Function
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement
from torch.nn.utils.parametrize import is_parametrized

from trimtab.backward import once_differentiable
from trimtab.dispatch.route import Combine, Dispatch, wants_gradient, with_others
from trimtab.errors import ConfigError
from trimtab.experts.module import ExpertMLP
from trimtab.experts.products import lower
from trimtab.experts.stand_in import standing_in
from trimtab.guard.guard import SharedByCopies
from trimtab.layout import experts_per_rank
from trimtab.parallel.expert_tensor import ExpertTensorGroup, FirstRankBias
from trimtab.parallel.meshes import check_ascending, check_meshes, local_part

SPLIT = {"gate_up": Shard(2), "gate_up_bias": Shard(2), "up": Shard(1), "up_bias": Shard(1), "down": Shard(2)}
MAIN_GRAD_NAMES = ("main_grad", "overwrite_main_grad", "zero_out_wgrad")


@dataclass(frozen=True, kw_only=True)
class ExpertMesh(SharedByCopies):
    """Where experts are: a mesh slice of one dim (ep), or of two with `etp` naming the one that splits F."""

    mesh: DeviceMesh
    etp: str | None = None

    def __post_init__(self) -> None:
        check_meshes(mesh=self.mesh)
        names = self.mesh.mesh_dim_names or ()
        if self.mesh.ndim != (1 if self.etp is None else 2) or (self.etp is not None and self.etp not in names):
            raise ConfigError(
                f"expert mesh {names or self.mesh.ndim} with etp={self.etp!r}: hand in one dim (ep), or two "
                "with etp naming the one that splits F, such as mesh['etp', 'ep'] and etp='etp'"
            )
        check_ascending(self.mesh, "expert mesh")

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


def check_split(experts: ExpertMLP, place: ExpertMesh) -> None:
    """Whether `ParallelExperts.shard` can cut them over `place`. Nothing is changed, nothing is sent.

    Raises:
        ConfigError: F or the experts do not divide.
        BackendError: their recipe cannot work on a rank's share.
    """
    ranks = 1 if place.etp_group is None else dist.get_world_size(place.etp_group)
    if experts.hidden % ranks:
        raise ConfigError(f"F = {experts.hidden} does not divide over {ranks} expert-tensor-parallel ranks")
    experts_per_rank(experts.num_experts, place.mesh.size(place.ep_dim))
    if experts.recipe is not None:
        lower(experts.recipe, experts.down.device, _widths(experts, ranks))


def _widths(experts: ExpertMLP, ranks: int) -> Sequence[tuple[int, int]]:
    """(in, out) features of each product of one of so many ranks that share F."""
    hidden = experts.hidden // ranks
    return [(experts.dim, 2 * hidden if experts.gated else hidden), (hidden, experts.dim)]


class ParallelExperts(ExpertMLP):
    """What `ExpertParallel` makes of an `ExpertMLP`: the same module, of this class.

    A recipe quantizes what a rank computes with: with etp the scales are those of its share of F, and each rank has
    a recipe's state for its own experts only. `main_grad` is looked up on the parameter when the forward begins, a
    DTensor like the parameter or its local part; the flag `grad_added_to_main_grad` is set on the parameter.

    `place`: where its experts are. `gradient_scale`: factor on its gradients, see `trimtab.parallel.ddp` and `.fsdp`.
    `etp`: the ranks that share F, None where it is whole. `reduce_delayed`: called behind delayed gradients.
    """

    place: ExpertMesh
    gradient_scale: float
    etp: ExpertTensorGroup | None
    reduce_delayed: Callable[[], None] | None

    def forward(self, x_MD: Tensor, ids_MK: Tensor, w_MK: Tensor, *, num_slots: int | None = None) -> Tensor:
        """As `ExpertMLP.forward`, with local ids. Collective over the etp group, with a host sync."""
        names = self.parameter_names
        if other := [name for name in names if is_parametrized(self, name)]:
            raise ConfigError(f"experts.{other[0]} is parametrized: parameters that are spread over ranks cannot be")
        with standing_in([(self, name) for name in names], [self._local(name) for name in names]):
            if self.etp is None:
                return super().forward(x_MD, ids_MK, w_MK, num_slots=num_slots)
            wanted = wants_gradient(x_MD, w_MK)
            every = self.etp.meet(x_MD, num_slots, grad=wanted)
            w_MK = with_others(w_MK, every.grad, wanted)
            x, w, ids, sent = Dispatch.apply(every, x_MD, w_MK, ids_MK)  # type: ignore[no-untyped-call]
            y = super().forward(x, ids, w, num_slots=every.num_slots)
            out: Tensor = Combine.apply(every, y, sent)  # type: ignore[no-untyped-call]
            return out

    def backward_dw(self) -> None:
        """As `ExpertMLP.backward_dw`. Every rank that holds parts or copies of these experts must call, in the same
        order: their data-parallel reduction happens here."""
        super().backward_dw()
        if self.delay_wgrad and self.reduce_delayed is not None:
            self.reduce_delayed()

    @property
    def fused(self) -> tuple[str, ...]:
        """Parameters whose gradients go into `main_grad`."""
        return () if self.main_grad == "off" else self.parameter_names[:2]

    def shard(self, place: ExpertMesh, etp: ExpertTensorGroup | None, src_data_rank: int | None) -> None:
        """Cut the whole parameters over `place`, which `check_split` has passed. No communication with
        `src_data_rank=None`; else from that rank.

        A recipe's state begins anew; see `share_state_dicts`.
        """
        self.num_experts = experts_per_rank(self.num_experts, place.mesh.size(place.ep_dim))
        self.place, self.etp, self.gradient_scale, self.reduce_delayed = place, etp, 1.0, None
        for name in self.parameter_names:
            param = self.get_parameter(name)
            cut = place.placements(SPLIT.get(name, Replicate()))
            whole = distribute_tensor(param.detach(), place.mesh, cut, src_data_rank=src_data_rank)
            setattr(self, name, nn.Parameter(whole, requires_grad=param.requires_grad))
        self.up_state, self.down_state = self._new_state(self.num_experts), self._new_state(self.num_experts)
        share_state_dicts(self, place.mesh, place.ep_dim)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw every expert on every rank and keep what is this rank's, so that ranks with the same seed hold the same
        experts however they are cut. One whole parameter at a time is in memory."""
        for fan_in, first in ((self.dim, self.parameter_names[0]), (self.hidden, "down")):
            for name in (first, f"{first}_bias"):
                param: Any = getattr(self, name, None)
                if isinstance(param, DTensor):
                    whole = torch.empty(param.shape, dtype=param.dtype, device=param.to_local().device)
                    whole.uniform_(-(fan_in**-0.5), fan_in**-0.5)
                    mine = distribute_tensor(whole, param.device_mesh, param.placements, src_data_rank=None)
                    param.to_local().copy_(mine.to_local())

    def _widths(self) -> Sequence[tuple[int, int]]:
        """Of this rank's share."""
        return _widths(self, 1 if self.etp is None else self.etp.size)

    def _local(self, name: str) -> Tensor:
        """This rank's part of a parameter, differentiable; where its gradients go (`main_grad`) comes along."""
        param = getattr(self, name)
        local = local_part(param)
        if name in self.fused:
            local = _Fused.apply(local, [param])  # type: ignore[no-untyped-call]
            for attribute in MAIN_GRAD_NAMES:
                if hasattr(param, attribute):
                    setattr(local, attribute, local_part(getattr(param, attribute)))
        elif self.gradient_scale != 1.0:
            local = _Scaled.apply(local, self.gradient_scale)  # type: ignore[no-untyped-call]
        if name == "down_bias" and self.etp is not None:
            local = FirstRankBias.apply(local, self.etp)  # type: ignore[no-untyped-call]
        return local


class _Fused(Function):
    """Identity. What comes back is a dummy: the gradient is in `main_grad`, and its owner is told so on the parameter,
    before the parameter's hooks fire."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, owner: list[Any]) -> Tensor:
        ctx.owner = owner
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, None]:
        ctx.owner[0].grad_added_to_main_grad = True
        return d, None


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


OF_EXPERTS = "_He"
"""How the names of such buffers end."""


def share_state_dicts(module: nn.Module, mesh: DeviceMesh, ep_dim: int) -> None:
    """Have the state dicts of `module` hold its buffers of all experts. No communication."""
    cut: list[Placement] = [Shard(1) if dim == ep_dim else Replicate() for dim in range(mesh.ndim)]

    def ours(of: nn.Module, state: dict[str, Any], prefix: str) -> list[str]:
        own = [prefix + name for name, _ in of.named_buffers() if name.endswith(OF_EXPERTS)]
        return [key for key in own if key in state]

    def show(of: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for key in ours(of, state, prefix):
            state[key] = DTensor.from_local(state[key], mesh, cut, run_check=False)

    def take(of: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        for key in ours(of, state, prefix):
            whole: Tensor = state[key]
            state[key] = (
                whole.redistribute(mesh, cut).to_local()
                if isinstance(whole, DTensor)
                else whole.chunk(mesh.size(ep_dim), 1)[mesh.get_local_rank(ep_dim)]
            )

    module.register_state_dict_post_hook(show)  # type: ignore[no-untyped-call]
    module.register_load_state_dict_pre_hook(take)  # type: ignore[no-untyped-call]
