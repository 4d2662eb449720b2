"""How tokens fall on experts: ids drawn by name, the same on every machine for a seed, and what they move over ranks.

    even               every expert as likely as any other, in expectation: nothing is drawn
    worst              bounds: all tokens of all ranks come here, and this rank's go to as many ranks as they can
    balanced           every expert the same, in random company
    random             every expert as likely as any other
    zipf               the i-th most popular expert 1/i as often as the first
    hot                one expert in every token's choice, the others alike
    hot_rank           the first rank's experts in every token's choice, as many as it takes
    spread             one expert of every rank in every token's choice, as many as it takes
    rotating           the experts of the next rank in every token's choice: all ranks alike, all tokens leave
    burst              hot_rank for half of the tokens, random for the others
    zero_expert_rank   the last rank's experts get nothing (of one rank: the last quarter of its experts)

Legend: T local tokens, K experts per token, E experts, P ranks, e = E / P, N records of layers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from trimtab.dispatch.options import PARTS, ReplicationConfig
from trimtab.dispatch.planned import Call, Moved
from trimtab.dispatch.replica_plan import physical_ids, replica_plan, slot_shares
from trimtab.errors import ConfigError, first_line
from trimtab.layout import experts_per_rank
from trimtab.routing.loads import read_metrics
from trimtab.routing.scores import count_ids

SKEWS = (
    "even", "worst", "balanced", "random", "zipf", "hot", "hot_rank", "spread", "rotating", "burst", "zero_expert_rank",
)  # fmt: skip
"""Names of `Traffic`; all but the first two are drawn."""


def draw(skew: str, tokens: int, top_k: int, num_experts: int, *, rank: int = 0, ranks: int = 1) -> Tensor:
    """[T, K] int64 expert ids of one rank, K different ones per token. Raises ConfigError for sizes that do not fit."""
    g, e = torch.Generator().manual_seed(1000 + rank), experts_per_rank(num_experts, ranks)
    if skew == "balanced":
        return _balanced(tokens, top_k, num_experts, g)
    odds_E, following = torch.ones(num_experts), (rank + 1) % ranks * e
    wanted = {
        "hot": slice(1), "hot_rank": slice(e), "burst": slice(e), "spread": slice(None, None, e),
        "rotating": slice(following, following + e),
    }  # fmt: skip
    if skew in wanted:
        odds_E[wanted[skew]] = 1e30  # chosen before others
    elif skew == "zipf":
        popular_E = torch.randperm(num_experts, generator=torch.Generator().manual_seed(7))
        odds_E[popular_E] = 1.0 / torch.arange(1, num_experts + 1)
    elif skew == "zero_expert_rank":
        odds_E[num_experts - (e if ranks > 1 else num_experts // 4) :] = 0.0
    if int((odds_E > 0).sum()) < top_k:
        raise ConfigError(f"{skew!r} leaves fewer than {top_k} of {num_experts} experts")
    return _drawn(odds_E, tokens, top_k, g, every=2 if skew == "burst" else 1)


def _drawn(odds_E: Tensor, tokens: int, top_k: int, g: torch.Generator, every: int = 1) -> Tensor:
    """The K first arrivals of E exponential clocks: a draw without replacement, with these odds for the first of
    `every` tokens, and with none for the others."""
    arrival_TE = torch.empty(tokens, odds_E.shape[0]).exponential_(generator=g).clamp_min_(1e-30)
    arrival_TE[::every] /= odds_E
    return arrival_TE.topk(top_k, largest=False).indices


def _balanced(tokens: int, top_k: int, num_experts: int, g: torch.Generator) -> Tensor:
    """Shuffled decks of all experts, dealt K at a time."""
    hands = num_experts // top_k
    if hands < 1:
        raise ConfigError(f"{top_k} of {num_experts} experts per token cannot be chosen")
    decks = torch.rand(-(-tokens // hands), num_experts, generator=g).argsort(1)
    return decks[:, : hands * top_k].reshape(-1, top_k)[:tokens].contiguous()


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What a rank sends and receives in each call, for `trimtab.dispatch.planned`: that of the busiest rank.

    skew: one of `SKEWS`, or the path of a run's `metrics.jsonl` or `loads.jsonl`: every layer is then as the layer and
        the step of it in which the busiest rank had most.
    replication: the rule by which experts are replicated, None where none are.
    rank: whose numbers are given; None takes, for each call, the rank that receives most slots, or most replicas.

    Raises:
        ConfigError: the skew is neither a name nor a file with loads.
    """

    skew: str = "even"
    replication: ReplicationConfig | None = None
    rank: int | None = None
    _shares: dict[int, Tensor] = field(default_factory=dict, repr=False)
    _made: dict[Call, tuple[Moved, Moved]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.skew not in SKEWS:
            self._shares.update(_read(Path(self.skew)))

    def __call__(self, call: Call) -> tuple[Moved, Moved]:
        if call not in self._made:
            self._made[call] = {"even": _even, "worst": self._worst}.get(self.skew, self._from_ids)(call)
        return self._made[call]

    def _worst(self, call: Call) -> tuple[Moved, Moved]:
        """Each number at its most by itself. With a tolerance no rank computes more slots than that; one holds at most
        e replicas, and those of its experts are cut where an expert or a receiver begins."""
        e, ranks, rule = call.experts // call.ranks, call.ranks, self.replication
        slots, places = call.tokens * call.top_k, e * (1 if rule is None else 2)
        most = ranks * call.tokens * min(call.top_k, places)
        if rule is not None and rule.parts is not None:
            most = min(most, slots + slots * rule.parts // PARTS)
        away, here = (0, 0) if rule is None else (min(e * (ranks - 1), e + ranks - 2), e)
        sent = call.tokens * min(call.top_k, ranks), slots, away, 0
        received = min(ranks * call.tokens, most), most, here, 0
        return Moved(*(_split(n, ranks) for n in sent)), Moved(*(_split(n, ranks) for n in received))

    def _from_ids(self, call: Call) -> tuple[Moved, Moved]:
        ranks, experts = call.ranks, call.experts
        ids = [self._ids(call, rank) for rank in range(ranks)]
        places, plan = experts // ranks, None
        if self.replication is not None:
            counts_PE = torch.stack([count_ids(ids_TK, experts) for ids_TK in ids])
            plan, places = replica_plan(counts_PE[None], self.replication), 2 * places
            cells = [slot_shares(plan, counts_PE[None], 0, rank) for rank in range(ranks)]
            ids = [physical_ids(ids_TK, cells_EP, plan) for ids_TK, cells_EP in zip(ids, cells, strict=True)]
        owners = [ids_TK.div(places, rounding_mode="floor") for ids_TK in ids]
        slots_PP = torch.stack([count_ids(owner_TK, ranks) for owner_TK in owners])
        rows_PP = torch.stack([(owner_TK[..., None] == torch.arange(ranks)).any(1).sum(0) for owner_TK in owners])
        numbers = [rows_PP, slots_PP]
        if plan is not None:
            copies = [(cells_EP * (plan.place_EP >= experts // ranks)).sum(0) for cells_EP in cells]
            numbers += [plan.replicas_PP, torch.stack(copies)]
        # Where experts are replicated ranks have much the same slots, and who has most replicas holds most.
        of_P = slots_PP.sum(0) + sum(n_PP.sum(0) for n_PP in numbers[2:3]) * (slots_PP.sum() + 1)
        mine = int(of_P.argmax()) if self.rank is None else self.rank
        return Moved(*(n_PP[mine].tolist() for n_PP in numbers)), Moved(*(n_PP[:, mine].tolist() for n_PP in numbers))

    def _ids(self, call: Call, rank: int) -> Tensor:
        if not self._shares:
            return draw(self.skew, call.tokens, call.top_k, call.experts, rank=rank, ranks=call.ranks)
        if call.experts not in self._shares:
            raise ConfigError(f"{self.skew}: no layer there has {call.experts} experts; give loads of this model")
        shares_NE = self._shares[call.experts]
        busiest_N = shares_NE.view(len(shares_NE), call.ranks, -1).sum(2).amax(1)
        # An expert is in 1 - exp(-odds) of the choices, and they add up to K.
        chosen_E = (shares_NE[busiest_N.argmax()] * call.top_k).clamp(1e-9, 1 - 1e-6)
        return _drawn(-torch.log1p(-chosen_E), call.tokens, call.top_k, torch.Generator().manual_seed(1000 + rank))


def _even(call: Call) -> tuple[Moved, Moved]:
    """In expectation, rounded up: a token's K experts are any K of E, and a rank has e of them."""
    others, experts = call.experts - call.experts // call.ranks, call.experts
    missed = math.comb(others, call.top_k) / math.comb(experts, call.top_k)
    rows, slots = math.ceil(call.tokens * (1 - missed)), math.ceil(call.tokens * call.top_k / call.ranks)
    both = Moved([rows] * call.ranks, [slots] * call.ranks)
    return both, both


def _split(number: int, ranks: int) -> list[int]:
    return [number // ranks + (rank < number % ranks) for rank in range(ranks)]


def _read(path: Path) -> dict[int, Tensor]:
    """By the number of experts: the share of slots of each one, [N, E] for all N layers and steps in a file."""
    found: dict[int, list[Tensor]] = {}
    try:
        for record in read_metrics(path):
            for layer in record["layers"].values():
                load_E = torch.tensor(layer["tokens_per_expert"], dtype=torch.float64)
                found.setdefault(len(load_E), []).append(load_E / load_E.sum().clamp_min(1))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"--skew {path}: neither {', '.join(SKEWS)} nor a metrics.jsonl or loads.jsonl of a run "
            f"({first_line(error)})"
        ) from None
    if not found:
        raise ConfigError(f"--skew {path}: no loads in that file")
    return {experts: torch.stack(shares) for experts, shares in found.items()}
