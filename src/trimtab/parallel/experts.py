"""Expert parameters as DTensors of global shape [E, …]; each rank computes with its local part.

    mesh dim    gate_up [E, 2, F, D] and its bias    up [E, F, D] and its bias    down [E, D, F]    down_bias [E, D]
    ep          Shard(0)                             Shard(0)                     Shard(0)          Shard(0)
    etp         Shard(2), a share of F               Shard(1)                     Shard(2)          Replicate()

Codes and their scales lie as the weights that they stand for; an int8's scale of a whole row of down is Replicate().
Of an adapter b of gate and up and a of down are cut over F as their weights are, the rest lies alike on all of etp, and
a pair that all experts share on all ranks. Each delivers what its weight delivers, a share of F or a part of a sum.
What ranks of a dim hold alike meets the rows of each, so its gradient is summed over them, in autograd: as every
expert's, it is then the sum over all ranks' losses.

Rank r of ep owns experts r * e .. r * e + e - 1. Ranks of an etp group each see the rows of all, see `expert_tensor`.

Legend: M rows, K slots per row, E experts, e local experts, D model dim, F hidden dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import Function
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from trimtab.autograd import once_differentiable
from trimtab.errors import ConfigError
from trimtab.experts.lora import factors_of, in_use
from trimtab.experts.module import ExpertMLP
from trimtab.experts.quantized import FORMATS
from trimtab.experts.replicated import Replicas, run_with_replicas
from trimtab.experts.weight import LoraFactors, Weights
from trimtab.experts.weight_grad import MAIN_GRAD_NAMES
from trimtab.layout import experts_per_rank
from trimtab.parallel.expert_tensor import ExpertTensorGroup
from trimtab.parallel.meshes import ExpertMesh, SumGradients, local_part

SPLIT = {"gate_up": Shard(2), "gate_up_bias": Shard(2), "up": Shard(1), "up_bias": Shard(1), "down": Shard(2)}
SPLIT |= {f"{name}_scales": SPLIT[name] for name in ("gate_up", "up", "down")}
SPLIT |= {"gate_up_b": Shard(2), "up_b": Shard(1), "down_a": Shard(2)}
"""By name, how a parameter lies over etp; Replicate() where it has no entry."""
OF_EXPERTS = "_He"
"""How the names of buffers end that have a column for each expert."""


def check_split(experts: ExpertMLP, place: ExpertMesh) -> None:
    """Whether `ParallelExperts.shard` can cut them over `place`. Nothing is changed, nothing is sent.

    Raises:
        ConfigError: F or the experts do not divide; a share of F would begin within a block of codes, or cut panels.
        BackendError: their recipe cannot work on a rank's share.
    """
    if experts.hidden % place.etp_size:
        raise ConfigError(f"F = {experts.hidden} does not divide over {place.etp_size} expert-tensor-parallel ranks")
    share, held = experts.hidden // place.etp_size, FORMATS.get(experts.codes[0] if experts.codes else "")
    if held is not None and held.decode and place.etp_size > 1:
        raise ConfigError("packed weights are not cut over F: parallelize without etp, or leave them plain")
    if held is not None and place.etp_size > 1 and (share % held.outs or share % (held.ins or 1)):
        raise ConfigError(
            f"F = {experts.hidden} over {place.etp_size} expert-tensor-parallel ranks cuts blocks of codes in two: "
            f"a share must be a multiple of {max(held.outs, held.ins)}"
        )
    experts_per_rank(experts.num_experts, place.mesh.size(place.ep_dim))
    experts.engine_for(experts._widths(place.etp_size))


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

    def forward(
        self, x_MD: Tensor, ids_MK: Tensor, w_MK: Tensor, *, num_slots: int | None = None,
        replicas: Replicas | None = None,
    ) -> Tensor:  # fmt: skip
        """As `ExpertMLP.forward`, with local ids. Collective over the etp group, with a host sync.

        Replicas go between equal ranks of two etp groups: each has its share of F, for the rows of all that meet."""
        if self.etp is None:
            return super().forward(x_MD, ids_MK, w_MK, num_slots=num_slots, replicas=replicas)
        rows = self.etp.dispatch(x_MD, ids_MK, w_MK, num_slots)
        met = rows.x_MD, rows.ids_MK, rows.weights_MK
        if replicas is None:
            y = super().forward(*met, num_slots=rows.num_slots)
        else:
            y = run_with_replicas(self, self.expert_weights(), *met, replicas, rows.num_slots)
        return self.etp.combine(y, rows)

    def expert_weights(self) -> Weights:
        """This rank's part of up and of down as they are now, differentiable."""
        return self._weights(self._local)

    def _lora(self) -> Mapping[str, LoraFactors | None]:
        adapters = in_use(self)
        parts = [{name: self._scaled(local_part(p)) for name, p in a.named_parameters()} for a in adapters]
        for dim in range(self.place.mesh.ndim):  # one all-reduce for each that has tensors which its ranks hold alike
            alike = [
                (params, name)
                for adapter, params in zip(adapters, parts, strict=True)
                for name in params if (adapter.shared if dim == self.place.ep_dim else name not in SPLIT)
            ]  # fmt: skip
            if alike and self.place.mesh.size(dim) > 1:
                tensors = [params[name] for params, name in alike]
                made = SumGradients.apply(self.place.mesh.get_group(dim), *tensors)  # type: ignore[no-untyped-call]
                for (params, name), tensor in zip(alike, made, strict=True):
                    params[name] = tensor
        return factors_of(self, adapters, parts)

    def own_part(self, name: str) -> Tensor:
        """What this rank has of a parameter."""
        return local_part(self.get_parameter(name))

    def put_adapter(self, name: str, weights: Sequence[str], options: Mapping[str, Any]) -> None:
        """As `ExpertMLP.put_adapter`; each rank draws it for all experts and keeps its part."""
        super().put_adapter(name, weights, options)
        self._cut_adapter(self.adapters[name], None)

    def backward_dw(self) -> None:
        """As `ExpertMLP.backward_dw`. Every rank that holds parts or replicas of these experts must call, in the same
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

        A recipe's state begins anew, and state dicts hold that of all experts.
        """
        self.num_experts = experts_per_rank(self.num_experts, place.mesh.size(place.ep_dim))
        self.place, self.etp, self.gradient_scale, self.reduce_delayed = place, etp, 1.0, None
        whole_rows = self.codes is not None and not FORMATS[self.codes[0]].ins
        for name, _ in list(self.named_parameters(recurse=False)):
            split = Replicate() if name == "down_scales" and whole_rows else SPLIT.get(name, Replicate())
            self._cut(self, name, Shard(0), split, src_data_rank)
        for adapter in getattr(self, "adapters", {}).values():
            self._cut_adapter(adapter, src_data_rank)
        self.up_state, self.down_state = self._new_state(self.num_experts), self._new_state(self.num_experts)
        self.register_state_dict_post_hook(_show_all_experts)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_take_own_experts)  # type: ignore[no-untyped-call]

    def _cut_adapter(self, adapter: Any, source: int | None) -> None:
        for name, _ in list(adapter.named_parameters()):
            experts = Replicate() if adapter.shared else Shard(0)
            self._cut(adapter, name, experts, SPLIT.get(name, Replicate()), source)

    def _cut(self, owner: nn.Module, name: str, ep: Placement, etp: Placement, source: int | None) -> None:
        """Make a whole parameter of `owner` a DTensor that lies so over the dims of `place`."""
        param, cut = owner.get_parameter(name), self.place.placements(ep, etp)
        whole = distribute_tensor(param.detach(), self.place.mesh, cut, src_data_rank=source)
        setattr(owner, name, nn.Parameter(whole, requires_grad=param.requires_grad))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw every expert on every rank and keep what is this rank's, so that ranks with the same seed hold the same
        experts however they are cut. One whole parameter at a time is in memory. Raises ConfigError: they are codes."""
        if self.codes is not None:
            raise ConfigError("codes are not drawn: load them, or quantize_ the experts before they are sharded")
        for fan_in, first in ((self.dim, self.parameter_names[0]), (self.hidden, "down")):
            for name in (first, f"{first}_bias"):
                param: Any = getattr(self, name, None)
                if isinstance(param, DTensor):
                    whole = torch.empty(param.shape, dtype=param.dtype, device=param.to_local().device)
                    whole.uniform_(-(fan_in**-0.5), fan_in**-0.5)
                    mine = distribute_tensor(whole, param.device_mesh, param.placements, src_data_rank=None)
                    param.to_local().copy_(mine.to_local())

    def _widths(self, ranks: int = 1) -> Sequence[tuple[int, int]]:
        return super()._widths(1 if self.etp is None else self.etp.size)

    def _local(self, name: str) -> Tensor:
        """This rank's part of a parameter, differentiable; where its gradients go (`main_grad`) comes along."""
        param = getattr(self, name)
        local = local_part(param)
        if name in self.fused:
            local = _Delivered.apply(local, 1.0, [param])  # type: ignore[no-untyped-call]
            for attribute in MAIN_GRAD_NAMES:
                if hasattr(param, attribute):
                    setattr(local, attribute, local_part(getattr(param, attribute)))
        elif param.requires_grad:
            local = self._scaled(local)
        if name == "down_bias" and self.etp is not None:
            # The sum has it once; every rank sees the gradients of all rows, so each computes its whole gradient.
            local = local if self.etp.rank == 0 else local - local.detach()
        return local

    def _scaled(self, local: Tensor) -> Tensor:
        if self.gradient_scale == 1.0:
            return local
        return _Delivered.apply(local, self.gradient_scale, ())  # type: ignore[no-untyped-call, no-any-return]


class _Delivered(Function):
    """Identity; the gradient is multiplied by `factor`. With an owner, a parameter, the gradient is a dummy, for the
    real one is in `main_grad`: `grad_added_to_main_grad` is set on the parameter before its hooks fire."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float, owner: Sequence[Any]) -> Tensor:
        ctx.factor, ctx.owner = factor, owner
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, None, None]:
        for param in ctx.owner:
            param.grad_added_to_main_grad = True
        return d if ctx.owner else d * ctx.factor, None, None


def _show_all_experts(module: ParallelExperts, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Buffers of this rank's experts, as a state dict has them: of all experts."""
    cut = module.place.placements(Shard(1), Replicate())
    for key in _of_experts(module, state, prefix):
        state[key] = DTensor.from_local(state[key], module.place.mesh, cut, run_check=False)


def _take_own_experts(module: ParallelExperts, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """The way back."""
    mesh, dim = module.place.mesh, module.place.ep_dim
    for key in _of_experts(module, state, prefix):
        whole: Tensor = state[key]
        if isinstance(whole, DTensor):
            state[key] = whole.redistribute(mesh, module.place.placements(Shard(1), Replicate())).to_local()
        else:
            state[key] = whole.chunk(mesh.size(dim), 1)[mesh.get_local_rank(dim)]


def _of_experts(module: nn.Module, state: dict[str, Any], prefix: str) -> list[str]:
    own = [prefix + name for name, _ in module.named_buffers() if name.endswith(OF_EXPERTS)]
    return [key for key in own if key in state]
