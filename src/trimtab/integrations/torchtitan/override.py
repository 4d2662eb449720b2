"""Overrides of torchtitan's config: `--override.imports trimtab.integrations.torchtitan.override.token_dispatcher`, or
`….replicated_experts`, which is that and replicas of hot experts for one call, on ranks that have room.

torchtitan imports this file when a user names it, and keeps its own list of overrides. The experts stay torchtitan's,
or an override's: their own forward runs once with the weights at home and once with the replicas in their place, inside
the module that FSDP2 wraps.

Legend: B batch, L sequence, T = B * L local tokens, K experts per token, e experts at home, R expert rows, D model dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trimtab.dispatch.options import COPY_COST, Replication
from trimtab.errors import ConfigError
from trimtab.experts.replicated import Replicas, tied
from trimtab.integrations.torchtitan.dispatcher import TokenDispatcher
from trimtab.integrations.torchtitan.exchange import HOME
from trimtab.parallel.meshes import local_part
from trimtab.parallel.moe import standing_in

if TYPE_CHECKING:
    Base = Any
else:
    Base = import_module("torchtitan.models.common.moe").RoutedExperts
_config: Any = import_module("torchtitan.config.override")
_titan: Any = import_module("torchtitan.distributed.spmd_types")


class RoutedExperts(Base):  # type: ignore[misc]
    """torchtitan's, whose dispatcher is ours. The parameters' names, and what a checkpoint holds, are as without.

    Config: replicate_experts and copy_cost as in `trimtab.ExpertParallel`. Every rank must have the same: checked.

    Raises:
        ConfigError: another dispatcher than ours, one with padding, or a replicate_experts that is none.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Base.Config):  # type: ignore[misc, name-defined]
        replicate_experts: Replication = "auto"
        copy_cost: int = COPY_COST

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        if not isinstance(self.token_dispatcher, TokenDispatcher):
            raise ConfigError(
                f"replicate_experts goes with trimtab's TokenDispatcher, not {type(self.token_dispatcher).__name__}"
            )
        self.token_dispatcher.replicate_experts(config.replicate_experts, config.copy_cost)
        experts = type(self.inner_experts)
        self.inner_experts.__class__ = type(f"Replicated{experts.__name__}", (_WithReplicas, experts), {})

    def forward(
        self, x_BLD: Tensor, topk_scores_BLK: Tensor, topk_expert_ids_BLK: Tensor, num_local_tokens_per_expert_E: Tensor
    ) -> Tensor:
        """As torchtitan's. Every rank of the expert group must call."""
        (batch, _, dim), top_k = x_BLD.shape, topk_scores_BLK.shape[-1]
        x_TD = x_BLD.view(-1, dim)
        exchange = self.token_dispatcher.exchange
        exchange.weights = exchange.dispatcher.weights_fact(self.inner_experts)
        rows_RD, counts_e, sent = self.token_dispatcher.dispatch(
            x_TD, topk_scores_BLK.view(-1, top_k), topk_expert_ids_BLK.view(-1, top_k), num_local_tokens_per_expert_E
        )
        replicas = sent.rows.replicas
        with _titan.maybe_set_sparse_mesh():
            out_RD = self.inner_experts(rows_RD, counts_e, *(() if replicas is None else (replicas,)))
        return self.token_dispatcher.combine(out_RD, sent, x_TD).view(batch, -1, dim)  # type: ignore[no-any-return]


class _WithReplicas(nn.Module):
    """Put before the class of a rank's experts."""

    @torch.compiler.disable(reason="the movement of replicas is not traced")  # type: ignore[no-untyped-call, untyped-decorator]
    def _run(self, x_RD: Tensor, counts_e: Tensor, replicas: Replicas) -> Tensor:
        names = [name for name, _ in self.named_parameters(recurse=False)]
        own = [local_part(getattr(self, name)) for name in names]
        home, copied, x_RD = tied(own, x_RD, replicas)
        e, places = own[0].shape[0], [(self, name) for name in names]
        assert replicas.num_home_slots is not None
        with standing_in(places, home):
            out_RD = super().forward(x_RD[: replicas.num_home_slots], counts_e[:e])
        if not replicas.number:
            return out_RD  # type: ignore[no-any-return]
        with standing_in(places, copied):
            return torch.cat((out_RD, super().forward(x_RD[replicas.num_home_slots :], counts_e[e:])))

    def forward(self, x_RD: Tensor, counts_e: Tensor, replicas: Replicas | None = None) -> Tensor:
        if replicas is None:
            return super().forward(x_RD, counts_e)  # type: ignore[no-any-return]
        return self._run(x_RD, counts_e, replicas)  # type: ignore[no-any-return]


@_config.override(  # type: ignore[untyped-decorator]
    target=import_module(HOME).AllToAllTokenDispatcher.Config, description="Token dispatch over trimtab's exchange."
)
def token_dispatcher(cfg: Any, *, combine: str = "sum") -> Any:
    """Every all-to-all dispatcher of the config becomes ours, with its sizes and its padding."""
    return _config.derive(cfg, TokenDispatcher.Config, combine=combine)


@_config.override(  # type: ignore[untyped-decorator]
    target=Base.Config,
    description="Token dispatch over trimtab's exchange, with hot experts copied to ranks that have room.",
)
def replicated_experts(
    cfg: Any, *, combine: str = "sum", replicate_experts: Replication = "auto", copy_cost: int = COPY_COST
) -> Any:
    """Every layer's routed experts. Not beside `token_dispatcher`, which this one comes with."""
    sent = token_dispatcher(cfg.token_dispatcher, combine=combine)
    return _config.derive(
        cfg, RoutedExperts.Config, token_dispatcher=sent, replicate_experts=replicate_experts, copy_cost=copy_cost
    )
