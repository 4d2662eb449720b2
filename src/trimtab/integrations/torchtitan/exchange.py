"""torchtitan's token dispatcher protocol over our exchange, in plain tensors; `torchtitan_base` alone imports it.

    rows_RD, counts_e, sent = exchange.dispatch(x_TD, scores_TK, ids_TK, counts_E)      collective, one host sync
    out_RD = experts(rows_RD, counts_e)                 torchtitan's own: rows grouped by expert, not weighted
    y_TD = exchange.combine(out_RD, sent, x_TD)                                         collective, none

A token travels once to each rank that owns one of its experts, and is spread over these there; the outputs are
weighted and summed there, and one row comes back. Any number of tokens on any rank, none included. Sequence and
context parallelism stay outside: the tokens given are those returned, in their order, whatever shard they are.

Legend: T local tokens, K experts per token, E experts, e local experts, M rows of this rank, R expert rows (with
padding), D model dim.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from torch import Tensor

from trimtab.dispatch.checks import shape_problems
from trimtab.dispatch.dispatcher import Dispatcher
from trimtab.dispatch.facts import Facts
from trimtab.dispatch.options import ExchangeOptions
from trimtab.dispatch.route import Dispatched as RowsOfRank
from trimtab.dispatch.transport import Transport
from trimtab.errors import ConfigError, InputError
from trimtab.experts.plan import ExpertPlan, plan_experts
from trimtab.experts.segments import FromExperts, ToExperts
from trimtab.layout import ALIGNMENTS

HOME = "torchtitan.models.common.token_dispatcher"
BASE = "LocalTokenDispatcher"
PROTOCOL = {
    "dispatch": ("x_TD", "topk_scores_TK", "topk_expert_ids_TK", "num_local_tokens_per_expert_E"),
    "combine": ("routed_output_RD", "metadata", "x_TD"),
    "wire_meshes": ("ep_mesh",),
}
"""Arguments by method, self aside: those of torchtitan 0.3.0 and of its sources of August 2026."""
DEFAULTS = ExchangeOptions()


@dataclass(frozen=True, kw_only=True)
class Dispatched:
    """The way home, of one call: this rank's rows, how they lie among its experts, and the number of tokens."""

    rows: RowsOfRank
    plan: ExpertPlan
    tokens: int


class TokenExchange:
    """Dispatch and combine of one layer.

    Args:
        num_experts: E, over all ranks; rank r owns experts r * e .. r * e + e - 1.
        top_k: K, the experts that a token goes to.
        pad_multiple: each expert's rows begin at a multiple of it; what fills up is zeros, and is counted. One of 1,
            8, 16, 32, 128: what low-precision grouped GEMMs ask for.
        options: how to combine, and whether experts are replicated: rows of replicas follow those of the rank's own
            experts then, and `sent.rows.replicas` is where their weights come from.

    weights: of replicated experts, as `Dispatcher.weights_fact` makes it, for the next dispatch.

    Raises:
        ConfigError: sizes that do not fit; replicated experts with padding, which replicas would not have.
    """

    def __init__(
        self, num_experts: int, top_k: int, *, pad_multiple: int = 1, options: ExchangeOptions = DEFAULTS
    ) -> None:
        if pad_multiple not in ALIGNMENTS:
            raise ConfigError(f"pad_multiple={pad_multiple} is not one of {ALIGNMENTS}")
        if options.replication is not None and pad_multiple > 1:
            raise ConfigError(f"pad_multiple={pad_multiple}: replicated experts take no padding, so no low precision")
        self.num_experts, self.top_k, self.pad_multiple, self.options = num_experts, top_k, pad_multiple, options
        self.weights = ""
        self.wire(None)

    def wire(self, transport: Transport | None, layer: str = "") -> None:
        """From now on over `transport`; None where this rank owns all experts. Every rank of its group must call.

        Raises:
            ConfigError: the experts do not divide over the ranks.
        """
        self.dispatcher = Dispatcher(
            self.num_experts, transport, combine=self.options.combine, layer=layer, replication=self.options.replication
        )

    def dispatch(
        self, x_TD: Tensor, scores_TK: Tensor, ids_TK: Tensor, counts_E: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Dispatched]:
        """Send tokens to the experts. Every rank of the group must call.

        Args:
            x_TD: floating tokens.
            scores_TK: floating routing scores; weighted with in float32 at least.
            ids_TK: int expert ids; -1 drops a slot.
            counts_E: part of the protocol, not used: counts are taken from the ids.

        Returns:
            rows_RD, counts_e, and what `combine` needs. Rows are grouped by expert, within one by source rank, and
            within that in token order; counts are int64 and include padding, which is zeros. On a device, rows
            behind the last group are padding too.

        Raises:
            InputError, DesyncError, PeerLost, PhaseTimeout: as `Dispatcher.dispatch`.
        """
        self.dispatcher.begin()
        rows = self.dispatcher._dispatch(
            x_TD, ids_TK, scores_TK, facts=Facts(self.weights), problems=shape_problems(x_TD, ids_TK, scores_TK, None)
        )
        experts = self.dispatcher.experts_per_rank + (0 if rows.replicas is None else rows.replicas.number)
        plan = plan_experts(rows.ids_MK, experts, alignment=self.pad_multiple, num_slots=rows.num_slots)
        routed_RD: Tensor = ToExperts.apply(rows.x_MD, plan, False)  # type: ignore[no-untyped-call]
        return routed_RD, plan.offsets_e.diff(), Dispatched(rows=rows, plan=plan, tokens=x_TD.shape[0])

    def combine(self, out_RD: Tensor, sent: Dispatched, x_TD: Tensor) -> Tensor:
        """Weighted sums of the experts' outputs, back home: [T, D] in x's dtype. Every rank of the group must call.

        Args:
            out_RD: floating; what `dispatch` gave out, through the experts.
            sent: the third value of that `dispatch`; consumed once, as its graph is.
            x_TD: the tokens of that `dispatch`, for their shape and dtype alone.

        Raises:
            InputError: another number of rows or of tokens; on every rank of the group where a guard waits.
        """
        if out_RD.shape[0] != sent.plan.row_R.shape[0] or x_TD.shape[0] != sent.tokens:
            error = InputError(
                f"combine got outputs {tuple(out_RD.shape)} and tokens {tuple(x_TD.shape)} for the "
                f"{sent.plan.row_R.shape[0]} expert rows and {sent.tokens} tokens of its dispatch",
                rank=None if self.dispatcher.transport is None else self.dispatcher.transport.rank,
                layer=self.dispatcher.layer, phase="combine",
            )  # fmt: skip
            sent.rows.route.refuse(error, out_RD)
        y_MD: Tensor = FromExperts.apply(out_RD.to(x_TD.dtype), sent.rows.weights_MK, sent.plan)  # type: ignore[no-untyped-call]
        return self.dispatcher.combine(y_MD.to(x_TD.dtype), sent.rows)


def torchtitan_base() -> Any:
    """The class that torchtitan's dispatchers come from.

    Raises:
        ConfigError: torchtitan does not import, or its dispatchers have another protocol.
    """
    advice = "trimtab.integrations.torchtitan follows the protocol of torchtitan 0.3.0"
    try:
        base = getattr(import_module(HOME), BASE)
        found = {name: tuple(inspect.signature(getattr(base, name)).parameters)[1:] for name in PROTOCOL}
        fields = base.Config.__dataclass_fields__
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{HOME}.{BASE} cannot be used: {error}. {advice} (pip install torchtitan)") from error
    problems = [f"{name}{found[name]}, expected {PROTOCOL[name]}" for name in PROTOCOL if found[name] != PROTOCOL[name]]
    problems += [f"no field {name!r} in its Config" for name in ("num_experts", "top_k") if name not in fields]
    if problems:
        raise ConfigError(f"{HOME}.{BASE} has another protocol: {'; '.join(problems)}. {advice}")
    return base
