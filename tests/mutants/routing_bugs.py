"""Bugs of the routing decision: scores, weights, order, loads.

Legend: T tokens, K experts per token, E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mutants.patching import Mutant, Patches
from trimtab.experts import passes
from trimtab.moe import MoEOutput
from trimtab.parallel.moe import ParallelMoE
from trimtab.routing import router, scores, select
from trimtab.routing.port import Routing
from trimtab.routing.router import Router


def _scores_bf16(p: Patches) -> None:
    def narrow(of: Callable[[Tensor], Tensor], logits_TE: Tensor) -> Tensor:
        return of(logits_TE.bfloat16()).to(logits_TE.dtype)

    rows = {name: replace(row, of=partial(narrow, row.of)) for name, row in scores.SCORES.items()}
    p.put(router, "SCORES", rows)


def _detached(p: Patches) -> None:
    p.wrap(router, "pick_weights", lambda pick: lambda *args, **how: pick(*args, **how).detach())


def _k_order(p: Patches) -> None:
    p.wrap(router, "pick_weights", lambda pick: lambda *args, **how: pick(*args, **how).flip(1))


def _high_ties(p: Patches) -> None:
    @p.around(select, "top")
    def top(first: Any, scores_TE: Tensor, k: int) -> Tensor:
        return scores_TE.shape[1] - 1 - first(scores_TE.flip(1), k)


def _weights_twice(p: Patches) -> None:
    p.wrap(passes, "slot_weights", lambda taken: lambda w_MK, plan: taken(w_MK, plan) ** 2)


def _weights_nowhere(p: Patches) -> None:
    p.wrap(passes, "slot_weights", lambda taken: lambda w_MK, plan: torch.ones_like(taken(w_MK, plan)))


def _loads_twice(p: Patches) -> None:
    @p.around(Router, "forward")
    def forward(route: Any, self: Router, *args: Any, **kwargs: Any) -> Routing:
        again = route(self, *args, **kwargs)  # as recompute does
        made: Routing = route(self, *args, **kwargs)
        return made._replace(loads_E=made.loads_E + again.loads_E)


def _loads_of_replicas(p: Patches) -> None:
    @p.around(ParallelMoE, "forward")
    def forward(run: Any, self: ParallelMoE, x: Tensor, **kwargs: Any) -> MoEOutput:
        out: MoEOutput = run(self, x, **kwargs)
        if self.tp_group is not None and self.shares:
            torch.distributed.all_reduce(out.loads_E, group=self.tp_group)
        return out


def _loads_of_padding(p: Patches) -> None:
    @p.around(Router, "forward")
    def forward(route: Any, self: Router, x_TD: Tensor, *, ids_TK: Tensor | None = None, **kwargs: Any) -> Routing:
        made: Routing = route(self, x_TD, ids_TK=ids_TK, **kwargs)
        ids = select.top(made.logits_TE.detach(), self.config.top_k) if ids_TK is None else ids_TK
        return made._replace(loads_E=scores.count_ids(ids.long(), self.config.num_experts))


MUTANTS = (
    Mutant(name="scores_in_bf16", patch=_scores_bf16,
           says="router scores are rounded to bfloat16 (torchtitan, by backend)"),
    Mutant(name="detached_weights", patch=_detached,
           says="combine weights are detached: the router has no gradient (the detached combine)"),
    Mutant(name="weights_in_wrong_k_order", patch=_k_order,
           says="the weights of a token's experts come in another order than its experts"),
    Mutant(name="ties_to_higher_id", patch=_high_ties, look="1r-local/ties/*",
           says="a tie goes to the higher expert id, as top-k leaves open (NeMo Automodel#3325: near-ties flip)"),
    Mutant(name="weights_applied_twice", patch=_weights_twice,
           says="the routing weight is applied in the experts and again in the combine"),
    Mutant(name="weights_applied_nowhere", patch=_weights_nowhere,
           says="experts leave the weight to the combine and the combine leaves it to the experts"),
    Mutant(name="loads_counted_twice", patch=_loads_twice,
           says="load counters are doubled by recompute (torchtitan, comment on its counters)"),
    Mutant(name="loads_of_replicas", patch=_loads_of_replicas, look="3r-ep3-tp3-replicated-fsdp/*",
           says="every tensor-parallel rank counts the tokens of all of them: loads x TP"),
    Mutant(name="loads_of_padding", patch=_loads_of_padding, look="1r-local/*masked/*",
           says="padding is kept from dispatch but joins the load counters"),
)  # fmt: skip
