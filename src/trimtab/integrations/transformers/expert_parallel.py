"""transformers' expert parallelism, carried by trimtab: what `ep_implementation="trimtab"` builds.

    tokens of this rank -> share of its TP group -> dispatch -> experts -> combine -> all tokens of the TP group

Works in front of any experts implementation: received rows, their local ids (with the sentinel `num_experts` for
slots of other ranks) and their weights go in, weighted sums per row come out. With `experts_implementation=
"trimtab"` behind it the rows are sorted once, and the host's count of them is passed on.

Legend: T tokens of this rank, K experts per token, D model dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from weakref import WeakSet

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers.distributed.expert_parallel import EPImplementation

from trimtab.autograd import forward_of, narrowed
from trimtab.dispatch.checks import shape_problems
from trimtab.dispatch.dispatcher import Dispatcher
from trimtab.dispatch.facts import Facts
from trimtab.dispatch.options import ExchangeOptions
from trimtab.dispatch.route import Dispatched, ZeroGradients
from trimtab.dispatch.sequence_shard import shard, unshard
from trimtab.dispatch.transport import Transport
from trimtab.dispatch.transports import TRANSPORTS
from trimtab.errors import ConfigError
from trimtab.experts.weight import LoraFactors
from trimtab.integrations.transformers.experts import attached_lora, experts_forward
from trimtab.integrations.transformers.lora import OwnExperts
from trimtab.kernels.choose import KernelChoice


class TrimtabEP(EPImplementation):  # type: ignore[misc]
    """One experts module under expert parallelism.

    Args:
        experts: the experts module, its parameters already sharded over `ep_mesh`.
        ep_mesh: the expert group. tp_mesh: the ranks that hold the same tokens (size 1 without TP).
    """

    # Filled in by `trimtab.integrations.transformers.register` in a class of its own for each name.
    experts_name: str
    options: ExchangeOptions
    kernels: KernelChoice
    built: Iterator[int]
    """Numbers the experts modules in the order in which they are built, the same on every rank."""
    living: WeakSet[TrimtabEP]
    """Those built under this name that are in use. All that were given one mesh, which is one model's, share a
    transport, which is gone with them: the mesh outlives them in torch's caches, and another model's may equal it."""
    transport: Transport

    def __init__(self, experts: nn.Module, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        self.experts: Any = experts
        self.ep_group = ep_mesh.get_group()
        self.tp_group = tp_mesh.get_group()
        shared = (other.transport for other in self.living if other.ep_mesh is ep_mesh)
        self.transport = next(shared, None) or TRANSPORTS[self.options.transport](self.ep_group)
        self.living.add(self)
        self.dispatcher = Dispatcher(
            self.num_local_experts * ep_mesh.size(), self.transport,
            combine=self.options.combine, layer=f"{type(experts).__name__} {next(self.built)}",
            replication=self.options.replication if ep_mesh.size() > 1 else None,
        )  # fmt: skip

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Weighted expert outputs [T, D] for this rank's tokens. Every rank of the expert group must call."""
        sent = narrowed(hidden_states, self.experts) if self._ours() else hidden_states
        tensors = (sent, top_k_index, top_k_weights)
        tp_size = self.tp_mesh.size()
        if tp_size > 1:
            tensors = tuple(shard(t, self.tp_group) for t in tensors)  # type: ignore[assignment]
        rows = self.dispatcher._dispatch(
            *tensors, facts=Facts(self._weights_fact()), problems=shape_problems(*tensors, None)
        )
        y = self.dispatcher.combine(self._run_experts(rows), rows)
        return (unshard(y, hidden_states.shape[0], self.tp_group) if tp_size > 1 else y).to(hidden_states.dtype)

    def _part(self, lora: LoraFactors) -> LoraFactors:
        """Adapters of this rank's experts, from those of all experts, which every rank holds."""
        batches = self.ep_mesh.size() // self.tp_mesh.size()
        a, b = (forward_of(OwnExperts, t, self.num_local_experts, self.ep_group, batches) for t in (lora.a, lora.b))
        return replace(lora, a=a, b=b)

    def _ours(self) -> bool:
        return bool(self.experts.config._experts_implementation == self.experts_name)

    def _weights_fact(self) -> str:
        """With replicated experts every rank runs them alike, and has the same weights."""
        attached = attached_lora(self.experts).items()
        factors = ((f"{name}.{part}", getattr(lora, part)) for name, lora in attached for part in ("a", "b"))
        return self.dispatcher.weights_fact(self.experts, self.experts.config._experts_implementation, factors)

    def _run_experts(self, rows: Dispatched) -> Tensor:
        if self._ours():
            return experts_forward(
                self.experts, rows.x_MD, rows.ids_MK, rows.weights_MK, kernels=self.kernels, part=self._part,
                **rows.known,
            )  # fmt: skip
        implementation = self.experts.config._experts_implementation
        if rows.replicas is not None:  # behind dispatch, in which all ranks have seen that they are of one mind
            raise ConfigError(
                f"experts_implementation={implementation!r} runs no replicas: with replicate_experts= choose "
                f"experts_implementation={self.experts_name!r}, or register {self.experts_name!r} without it",
                layer=self.dispatcher.layer,
            )
        # Not every eager forward knows the sentinel: there an absent slot is expert 0 with weight 0 and no gradient.
        absent = rows.ids_MK < 0
        ids = rows.ids_MK.masked_fill(absent, 0 if implementation == "eager" else self.num_local_experts).long()
        if self.experts.has_post_expert_norm:  # transformers hooks its parameters when it is called, on every rank
            self.experts.post_expert_norm(rows.x_MD[:0])
        y = self.experts_forward(rows.x_MD, ids, rows.weights_MK.masked_fill(absent, 0))
        trained: Tensor = ZeroGradients.apply(y, *self.experts.parameters())  # type: ignore[no-untyped-call]
        return trained
