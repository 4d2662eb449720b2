"""Megatron's token dispatcher protocol over our exchange: six stages, one exchange out and one back.

Experts that take rows get each token once, with its local expert ids and weights; Megatron's own get a row for each
slot, grouped by expert, and its probability. With expert tensor parallelism the rows of all ranks of that group come
together between the stages, for either kind. A call's state lies on the dispatcher from the first stage to the last.

Legend: T local tokens, K experts per token, E experts, e local experts, M rows, R expert rows, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import Function

from trimtab.autograd import once_differentiable
from trimtab.dispatch.dispatcher import Dispatcher
from trimtab.dispatch.options import ExchangeOptions
from trimtab.dispatch.route import Dispatched
from trimtab.dispatch.transport import Transport
from trimtab.dispatch.transports import transport_over
from trimtab.errors import ConfigError
from trimtab.experts.plan import ExpertPlan, plan_experts, slot_grads, slot_weights
from trimtab.experts.segments import ToExperts
from trimtab.integrations.megatron.protocol import MegatronTokenDispatcher
from trimtab.parallel.expert_tensor import ExpertTensorGroup
from trimtab.routing.scores import count_ids

PAD = "every expert padded to its capacity: tokens go where they are routed, however many"


def _over(group: dist.ProcessGroup, name: str) -> Transport | None:
    """None for a rank alone."""
    return transport_over(group, name) if group.size() > 1 else None


@dataclass(kw_only=True)
class Call:
    """State of one layer call between its stages. rows: those of this rank. group: those of its expert tensor
    parallel group, where there is one. plan: how slots lie among Megatron's experts."""

    shape: torch.Size
    ids_TK: Tensor
    rows: Dispatched | None = None
    group: Dispatched | None = None
    plan: ExpertPlan | None = None


class TokenDispatcher(MegatronTokenDispatcher):  # type: ignore[misc]
    """In the place of Megatron's dispatchers; the token counts of ranks may differ, and be 0.

    Args:
        config, pg_collection: Megatron's, of which the groups `ep` and `expt_tp` are used.
        takes_rows: whether the experts take rows, ids and weights, or Megatron's expert rows, counts and probabilities.
        options: the transport, and how to combine.
        layer: the layer's name, for errors.
    """

    def __init__(
        self, config: Any, pg_collection: Any, *, takes_rows: bool, options: ExchangeOptions, layer: str = ""
    ) -> None:
        super().__init__(config=config, pg_collection=pg_collection)
        self.takes_rows = takes_rows
        kind = "rows" if takes_rows else "slots"
        self.exchange = Dispatcher(
            config.num_moe_experts, _over(self.ep_group, options.transport), combine=options.combine,
            layer=layer, fingerprint=f"Megatron, {kind}, ffn {config.moe_ffn_hidden_size}, etp {self.tp_size}",
            sizes=not takes_rows and self.tp_size == 1,
        )  # fmt: skip
        over = _over(self.tp_group, options.transport)
        self.group = None if over is None else ExpertTensorGroup(over, self.exchange.layer)
        self._call: Call | None = None

    @property
    def drop_and_pad(self) -> bool:
        """Megatron's switch for inference with a fixed number of tokens for each expert: off."""
        return False

    @drop_and_pad.setter
    def drop_and_pad(self, on: bool) -> None:
        if on:
            raise ConfigError(f"drop_and_pad=True asks for {PAD}", layer=self.exchange.layer)

    @property
    def call(self) -> Call:
        assert self._call is not None, "dispatch_preprocess begins a call"
        return self._call

    @property
    def rows(self) -> Dispatched:
        """The rows that the experts run on."""
        rows = self.call.group or self.call.rows
        assert rows is not None, "token_dispatch comes first"
        return rows

    def dispatch_preprocess(self, tokens: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens [..., H] to [T, H]; map and probs [T, E], unless they are int64 ids and weights [T, K], to these."""
        ids_TK, top_k = routing_map, self.config.moe_router_topk
        if routing_map.dtype != torch.int64 or routing_map.shape[1] != top_k:
            ids_TK, probs = slots_of(routing_map.bool(), probs, top_k)
        self._call = Call(shape=tokens.shape, ids_TK=ids_TK)
        return tokens.flatten(0, -2), probs

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens to the ranks of their experts, as `Dispatcher.dispatch`: rows [M, H] and weights [M, K]. Every rank
        of the expert and of the expert tensor parallel group must call."""
        self.call.rows = self.exchange.dispatch(hidden_states, self.call.ids_TK, probs)
        if self.group is not None:
            own = self.call.rows
            self.call.group = self.group.dispatch(own.x_MD, own.ids_MK, own.weights_MK, own.num_slots)
        return self.rows.x_MD, self.rows.weights_MK

    def dispatch_postprocess(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rows, ids and weights; or, for Megatron's experts, expert rows [R, H], counts [e] on the host and [R]."""
        ids_MK = self.rows.ids_MK
        if self.takes_rows:
            return hidden_states, ids_MK, probs
        experts, sizes_e = self.exchange.experts_per_rank, self.rows.sizes_e
        if sizes_e is None:
            sizes_e = count_ids(ids_MK.long(), experts).tolist()
        # no row may lie behind the last expert's: Megatron's experts split by the counts
        self.call.plan = plan = plan_experts(ids_MK, experts, num_slots=sum(sizes_e))
        rows_RH: Tensor = ToExperts.apply(hidden_states, plan, False)  # type: ignore[no-untyped-call]
        probs_R: Tensor = _SlotWeights.apply(probs, plan)  # type: ignore[no-untyped-call]
        return rows_RH, torch.tensor(sizes_e), probs_R

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """Outputs of the experts, weighted already -> sums of each row [M, H]."""
        if self.call.plan is None:
            return hidden_states
        sums_MH: Tensor = ToExperts.apply(hidden_states, self.call.plan, True)  # type: ignore[no-untyped-call]
        return sums_MH

    def token_combine(self, hidden_states: Tensor) -> Tensor:
        """Rows back home, as `Dispatcher.combine`: sums [T, H]. Every rank that dispatched must call."""
        assert self.call.rows is not None, "token_dispatch comes first"
        if self.group is not None:
            hidden_states = self.group.combine(hidden_states, self.rows)
        return self.exchange.combine(hidden_states, self.call.rows)

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        """[T, H] -> the shape of the call's tokens. Ends the call."""
        shape, self._call = self.call.shape, None
        return hidden_states.view(shape)


def slots_of(map_TE: Tensor, probs_TE: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """A dense routing map (bool) and its probabilities -> expert ids [T, K], ascending, and their weights [T, K].

    By the map, whatever the probability: an expert chosen with 0 has a gradient. A token with fewer has -1 behind; one
    with more names an expert that is none, so that dispatch raises on every rank.
    """
    num_experts = map_TE.shape[1]
    numbers_E = torch.arange(num_experts, dtype=torch.int32, device=map_TE.device)
    ids_TK = torch.where(map_TE, numbers_E, num_experts).topk(top_k, largest=False, sorted=True).values.long()
    chosen_TK = ids_TK < num_experts
    weights_TK = probs_TE.gather(1, ids_TK.where(chosen_TK, 0)).masked_fill(~chosen_TK, 0)
    too_many_T1 = map_TE.sum(-1, keepdim=True) > top_k
    return ids_TK.where(chosen_TK, -1).masked_fill(too_many_T1, num_experts), weights_TK


class _SlotWeights(Function):
    """Weights [M, K] -> the weight of each expert row [R]."""

    @staticmethod
    def forward(ctx: Any, w_MK: Tensor, plan: ExpertPlan) -> Tensor:
        ctx.plan, ctx.shape = plan, w_MK.shape
        return slot_weights(w_MK, plan)[:, 0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_R: Tensor) -> tuple[Tensor, None]:
        return slot_grads(d_R, ctx.plan, d_R.new_empty(ctx.shape)), None
