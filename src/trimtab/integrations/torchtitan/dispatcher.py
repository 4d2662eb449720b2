"""torchtitan's view of `TokenExchange`: a dispatcher with a Config. Importing this file imports torchtitan.

Legend: T local tokens, K experts per token, E experts, e local experts, R expert rows, D model dim.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from trimtab.dispatch.options import ExchangeOptions, Replication
from trimtab.dispatch.transports import transport_over
from trimtab.integrations.torchtitan.exchange import Dispatched, TokenExchange, torchtitan_base

if TYPE_CHECKING:
    Base = Any
else:
    Base = torchtitan_base()
_spmd: Any = import_module("spmd_types")
_titan: Any = import_module("torchtitan.distributed.spmd_types")
_eager: Any = torch.compiler.disable(  # type: ignore[no-untyped-call]
    reason="trimtab's token dispatcher reads the counts of its exchange on the host and is not traced: compile the "
    "loss alone (--compile.components loss), or compile without fullgraph"
)


class TokenDispatcher(Base):  # type: ignore[misc]
    """torchtitan's dispatcher protocol, carried by trimtab: `RoutedExperts` takes it as it takes its own.

    Config: `num_experts` and `top_k` as for torchtitan's own; `pad_multiple` and `combine` as in `TokenExchange`.
    `RoutedExperts.parallelize` wires the expert mesh. Without one all experts are here, and nothing is sent.

    Differences that a user may see: scores stay float32 and a token's sum is rounded once, where torchtitan rounds each
    product; a rank that died, froze or strayed is named in the error; compiling breaks the graph at the exchange.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Base.Config):  # type: ignore[misc, name-defined]
        """pad_multiple: 1, 8, 16, 32 or 128. combine: "sum" or "ordered"."""

        pad_multiple: int = 1
        combine: str = "sum"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.exchange = TokenExchange(
            config.num_experts, config.top_k, pad_multiple=config.pad_multiple,
            options=ExchangeOptions(combine=config.combine),
        )  # fmt: skip
        self.ep_mesh: DeviceMesh | None = None

    def replicate_experts(self, replicate_experts: Replication, copy_cost: int) -> None:
        """From the next `wire_meshes` on. Raises ConfigError: no such way to, or there is padding."""
        old = self.exchange
        options = replace(old.options, replicate_experts=replicate_experts, copy_cost=copy_cost)
        self.exchange = TokenExchange(old.num_experts, old.top_k, pad_multiple=old.pad_multiple, options=options)

    def wire_meshes(self, *, ep_mesh: DeviceMesh | None) -> None:
        """Over `ep_mesh` [P] from now on; None: all experts are here. Every rank of the mesh must call."""
        transport = None if ep_mesh is None else transport_over(ep_mesh, self.exchange.options.transport)
        self.ep_mesh = ep_mesh
        guard = getattr(transport, "guard", None)
        self.exchange.wire(transport, "MoE" if guard is None else f"MoE {guard.layers}")

    @_eager  # type: ignore[untyped-decorator]
    def dispatch(
        self, x_TD: Tensor, topk_scores_TK: Tensor, topk_expert_ids_TK: Tensor, num_local_tokens_per_expert_E: Tensor
    ) -> tuple[Tensor, Tensor, Dispatched]:
        """As `TokenExchange.dispatch`."""
        with _spmd.no_typecheck():
            rows_RD, counts_e, sent = self.exchange.dispatch(x_TD, topk_scores_TK, topk_expert_ids_TK)
        if self.ep_mesh is None:
            _type_like(rows_RD, x_TD)
            _type_like(counts_e, num_local_tokens_per_expert_E)
        else:
            _type_varying(rows_RD, counts_e, experts=True)
        return rows_RD, counts_e, sent

    @_eager  # type: ignore[untyped-decorator]
    def combine(self, routed_output_RD: Tensor, metadata: Dispatched, x_TD: Tensor) -> Tensor:
        """As `TokenExchange.combine`."""
        with _spmd.no_typecheck():
            y_TD = self.exchange.combine(routed_output_RD, metadata, x_TD)
        if self.ep_mesh is None:
            _type_like(y_TD, routed_output_RD)
        else:
            _type_varying(y_TD, experts=False)
        return y_TD


def _type_varying(*tensors: Tensor, experts: bool) -> None:
    """For `debug.spmd_typechecking`: these differ on every axis of the experts' mesh, or of the tokens'."""
    if not _spmd.is_type_checking():
        return
    if experts:
        with _titan.maybe_set_sparse_mesh():
            _type_varying(*tensors, experts=False)
        return
    for tensor in tensors:
        _spmd.assert_type(tensor, dict.fromkeys(_titan.current_spmd_mesh().mesh_dim_names, _spmd.V))


def _type_like(tensor: Tensor, source: Tensor) -> None:
    """For `debug.spmd_typechecking`: `tensor` has the type of `source`."""
    if _spmd.is_type_checking():
        _spmd.assert_type_like(tensor, source)
