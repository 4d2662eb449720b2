"""Bugs with what should not be computed on: padding, dropped slots, bad ids, NaN.

Legend: T tokens, K experts per token, P ranks.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from mutants.patching import Mutant, Patches
from trimtab.dispatch import checks
from trimtab.dispatch.dispatcher import Dispatcher
from trimtab.dispatch.route import Dispatched
from trimtab.experts import mlp
from trimtab.moe import MoE
from trimtab.routing import scores
from trimtab.routing.port import Routing
from trimtab.routing.router import Router


def _padding_dispatched(p: Patches) -> None:
    def raw(self: MoE, x: Tensor, mask: Tensor | None, ids: Tensor | None) -> Any:
        own = take(self, x, mask, ids)
        return own if mask is None else own._replace(x_TD=self.tokens.take(x).flatten(0, -2))

    def forward(self: Router, x_TD: Tensor, *, token_mask_T: Tensor | None = None, **kwargs: Any) -> Routing:
        made: Routing = route(self, x_TD, **kwargs)
        if token_mask_T is None:
            return made
        counted = made.ids_TK.masked_fill(~token_mask_T[:, None], -1)
        return made._replace(loads_E=scores.count_ids(counted, self.config.num_experts))

    take, route = MoE._take, Router.forward
    p.put(MoE, "_take", raw)
    p.put(Router, "forward", forward)


def _change_ids(p: Patches, change: Any) -> None:
    """Let the dispatcher see other ids."""

    @p.around(Dispatcher, "_dispatch")
    def dispatch(original: Any, self: Dispatcher, x_TD: Tensor, ids_TK: Tensor, *args: Any, **how: Any) -> Dispatched:
        rows: Dispatched = original(self, x_TD, change(ids_TK, self), *args, **how)
        return rows


def _wild_ids(p: Patches) -> None:
    _change_ids(p, lambda ids, self: ids.clamp(-1, self.num_experts - 1))


def _wraps(p: Patches) -> None:
    @p.around(Router, "forward")
    def forward(route: Any, self: Router, x_TD: Tensor, *, ids_TK: Tensor | None = None, **kwargs: Any) -> Routing:
        if ids_TK is not None:
            ids_TK = torch.where(ids_TK == -1, self.config.num_experts - 1, ids_TK)
        made: Routing = route(self, x_TD, ids_TK=ids_TK, **kwargs)
        return made


def _to_expert_0(p: Patches) -> None:
    @p.around(Router, "forward")
    def forward(route: Any, self: Router, *args: Any, **kwargs: Any) -> Routing:
        made: Routing = route(self, *args, **kwargs)
        dropped = made.ids_TK < 0
        first = made.logits_TE.softmax(-1)[:, :1].expand_as(made.weights_TK)
        return made._replace(ids_TK=made.ids_TK.clamp_min(0), weights_TK=torch.where(dropped, first, made.weights_TK))


def _nan_passes(p: Patches) -> None:
    def bad_ids(ids_TK: Tensor, w_TK: Tensor, num_experts: int) -> int:
        return int(((ids_TK < -1) | (ids_TK >= num_experts)).sum())

    p.everywhere(checks.count_bad, bad_ids)


def _raised_alone(p: Patches) -> None:
    @p.around(checks, "raise_if_bad")
    def alone(original: Any, bad_P: list[int], *args: Any, ranked: bool = False, **how: Any) -> None:
        own = [bad if not ranked or other == dist.get_rank() else 0 for other, bad in enumerate(bad_P)]
        original(own, *args, ranked=ranked, **how)


def _dropped_dx(p: Patches) -> None:
    @p.around(mlp._Experts, "backward")
    def backward(original: Any, ctx: Any, dy: Tensor) -> Any:
        call, d_x, *rest = cast(tuple[Any, ...], original(ctx, dy))
        sizes = ctx.call.plan.row_csr.indptr.diff()
        return call, torch.where((sizes == 0)[:, None], dy, d_x), *rest


MUTANTS = (
    Mutant(name="padding_dispatched", patch=_padding_dispatched, look="2r-ep2-cp2/all_masked/*",
           says="padding is masked from the losses and loads but still dispatched (Megatron-LM)"),
    Mutant(name="wild_ids_clamped", patch=_wild_ids, look="1r-local/bad_id/*",
           says="an id out of range is clamped to the last expert and nobody is told"),
    Mutant(name="minus_one_is_last_expert", patch=_wraps, look="1r-local/dropped/*",
           says="the id -1 of a dropped slot wraps around to the last expert"),
    Mutant(name="dropped_to_expert_0", patch=_to_expert_0, look="1r-local/dropped/*",
           says="dropped slots are dispatched to expert 0, with its weight"),
    Mutant(name="nan_weights_pass", patch=_nan_passes, look="1r-local/nan_logits/*",
           says="NaN logits route tokens somewhere and train on"),
    Mutant(name="bad_input_raised_alone", patch=_raised_alone, look="2r-ep2/bad_id/*", hangs=True,
           says="the rank with the bad input raises and its peers wait for it (a hang that names nobody)"),
    Mutant(name="dx_of_dropped_tokens", patch=_dropped_dx, look="1r-local/*dropped/*",
           says="a token whose slots are all dropped gets the output's gradient instead of zeros"),
)  # fmt: skip
