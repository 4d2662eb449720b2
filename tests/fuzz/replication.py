"""`python -m fuzz.replication 10000`: random and adversarial counts through the plan of replicated experts, against
loops over Python's integers and against what a plan promises. With tests/ on the path.

Legend: P ranks, E experts, e = E / P local ones, H ranks that split each expert's F.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from helpers.replica_bounds import replica_bounds
from helpers.replica_plan_loops import best, candidates, cells_of, places_of
from trimtab.cli import Progress
from trimtab.dispatch.options import ReplicationConfig
from trimtab.dispatch.replica_plan import ReplicaPlan, home_view, physical_ids, replica_plan, slot_shares

TOLERANCES = (0.0, None, 0.1, None, 1 / 64, None, 0.5, 0.0, 4.0, 0.001)
COSTS = (0.0, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
"""Of one replica, in slots of a mean rank."""


@dataclass(frozen=True, kw_only=True)
class PlanCase:
    """Counts [H, P, E] and what is asked of their plan. `kind`: how the counts were drawn."""

    kind: str
    counts_HPE: Tensor
    config: ReplicationConfig


def _random(H: int, P: int, e: int, g: torch.Generator) -> Tensor:
    return _ints(50, (H, P, P * e), g)


def _popular(H: int, P: int, e: int, g: torch.Generator) -> Tensor:
    share_E = 1.0 / (torch.randperm(P * e, generator=g) + 1) ** 1.5
    return (_ints(4000, (H, P, 1), g) * share_E).long()


def _one_expert(H: int, P: int, e: int, g: torch.Generator) -> Tensor:
    counts = torch.zeros(H, P, P * e, dtype=torch.int64)
    counts[:, :, int(_ints(P * e, (), g))] = _ints(999, (H, P), g)
    return counts


def _one_rank(H: int, P: int, e: int, g: torch.Generator) -> Tensor:
    return _of_ranks(_random(H, P, e, g), _ints(P, (1,), g))


def _one_rank_empty(H: int, P: int, e: int, g: torch.Generator) -> Tensor:
    """Needs the most replicas that any counts need: e (P - 1) / P, rounded up, on one rank."""
    counts = torch.full((H, P, P * e), 6)
    counts[:, :, int(_ints(P, (), g)) * e :][:, :, :e] = 0
    return counts


def _some_ranks(H: int, P: int, e: int, g: torch.Generator) -> Tensor:
    full = torch.full((H, P, P * e), 7) + _ints(2, (), g) * _ints(3, (H, P, P * e), g)
    return _of_ranks(full, torch.randperm(P, generator=g)[: int(_ints(P, (), g)) + 1])


def _near_the_mean(H: int, P: int, e: int, g: torch.Generator) -> Tensor:
    """Many small surpluses and rooms beside a few large ones: every kind of step of the alias table."""
    load_P = torch.tensor([99, 100, 101, 0, 200, 130])[_ints(6, (P,), g)]
    share_Pe = torch.rand(P, e, generator=g) + 0.01
    counts = torch.zeros(H, P, P * e, dtype=torch.int64)
    counts[0, int(_ints(P, (), g))] = (load_P[:, None] * share_Pe / share_Pe.sum(1, keepdim=True)).long().view(-1)
    return counts + _ints(2, (), g) * _ints(2, (H, P, P * e), g)


def _powers(H: int, P: int, e: int, g: torch.Generator) -> Tensor:
    return 2 ** _ints(20, (P * e,), g) * _ints(2, (H, P, P * e), g)


def _few(H: int, P: int, e: int, g: torch.Generator) -> Tensor:
    counts = torch.zeros(H, P, P * e, dtype=torch.int64)
    n = int(_ints(P + 2, (), g))
    return counts.index_put_((_ints(H, (n,), g), _ints(P, (n,), g), _ints(P * e, (n,), g)), torch.ones(n).long())


def _huge(H: int, P: int, e: int, g: torch.Generator) -> Tensor:
    return _random(H, P, e, g) * 10**7 * _ints(2, (P * e,), g)


def _equal(H: int, P: int, e: int, g: torch.Generator) -> Tensor:
    return torch.full((H, P, P * e), int(_ints(9, (), g)))


def _one_source(H: int, P: int, e: int, g: torch.Generator) -> Tensor:
    counts = _popular(H, P, e, g)
    return counts * (torch.arange(P) == _ints(P, (), g))[:, None]


def _ints(below: int, shape: tuple[int, ...], g: torch.Generator) -> Tensor:
    return torch.randint(0, below, shape, generator=g)


def _of_ranks(counts_HPE: Tensor, rank_n: Tensor) -> Tensor:
    ranks = counts_HPE.shape[1]
    mine_P = torch.zeros(ranks, dtype=torch.int64).index_fill_(0, rank_n, 1)
    return counts_HPE * mine_P.repeat_interleave(counts_HPE.shape[2] // ranks)


KINDS: dict[str, Callable[[int, int, int, torch.Generator], Tensor]] = {
    "random": _random, "popular": _popular, "one expert": _one_expert, "one rank": _one_rank,
    "one rank empty": _one_rank_empty, "some ranks": _some_ranks, "near the mean": _near_the_mean,
    "powers of two": _powers, "few slots": _few, "huge": _huge, "equal": _equal, "one source": _one_source,
}  # fmt: skip


def plan_case(seed: int, index: int, most_ranks: int = 64, most_experts: int = 512) -> PlanCase:
    """The case of a number: small ones, and one in four as large as asked for."""
    g = torch.Generator().manual_seed(seed * 1_000_003 + index)
    large = index // len(KINDS) % 4 == 3
    ranks = int(_ints(most_ranks if large else min(9, most_ranks), (), g)) + 1
    e = int(_ints(most_experts // ranks if large else 6, (), g)) + 1
    e = min(e, most_experts // ranks)
    kind = list(KINDS)[index % len(KINDS)]
    counts = KINDS[kind]((1, 1, 1, 2, 3)[int(_ints(5, (), g))], ranks, e, g)
    tolerance = TOLERANCES[int(_ints(len(TOLERANCES), (), g))]
    cost = int(counts.sum()) * COSTS[int(_ints(len(COSTS), (), g))] // ranks
    return PlanCase(
        kind=kind, counts_HPE=counts, config=ReplicationConfig(tolerance=tolerance, copy_cost=min(int(cost), 2**32))
    )


def check_plan(case: PlanCase) -> list[str]:
    """What is wrong with the plan of a case, in words."""
    counts_HPE, config = case.counts_HPE, case.config
    plan = replica_plan(counts_HPE, config)
    counts, ranks = counts_HPE.tolist(), counts_HPE.shape[1]
    cells_nEP = torch.stack(
        [slot_shares(plan, counts_HPE, h, rank) for h in range(counts_HPE.shape[0]) for rank in range(ranks)]
    )
    wrong = _broken_promises(plan, cells_nEP, counts_HPE, config)
    loads = counts_HPE.sum((0, 1)).tolist()
    found = candidates(loads, ranks, config.parts, config.copy_cost)
    chosen = best(found)
    moves = plan.slots_EP.clone()
    home_view(moves).zero_()
    here = {(int(e), int(rank)): int(moves[e, rank]) for e, rank in moves.nonzero()}
    if here != dict(chosen.moves):
        wrong.append(f"moves {here}, in loops {dict(chosen.moves)}")
    if int(plan.cap) != chosen.cap:
        wrong.append(f"cap {int(plan.cap)}, in loops {chosen.cap}")
    truth = torch.zeros_like(cells_nEP)
    for source, cell in enumerate(cells_of(counts, plan.slots_EP.tolist())):
        for expert, to in enumerate(cell):
            for rank, slots in to.items():
                truth[source, expert, rank] = slots
    if not torch.equal(cells_nEP, truth):
        wrong.append("cells other than in loops")
    if int(counts_HPE.sum()) < 3000:
        wrong += _wrong_ids(plan, cells_nEP, counts_HPE)
    return wrong


def _broken_promises(plan: ReplicaPlan, cells_nEP: Tensor, counts_HPE: Tensor, config: ReplicationConfig) -> list[str]:
    _, ranks, experts = counts_HPE.shape
    e = experts // ranks
    loads_E = counts_HPE.sum((0, 1))
    mean = -(-int(loads_E.sum()) // ranks)
    is_replica_EP = plan.slots_EP > 0
    home_view(is_replica_EP).fill_(False)
    pairs = int(is_replica_EP.view(ranks, e, ranks).any(1).sum())
    most = int(plan.loads_after_P.max())
    before = int(loads_E.view(ranks, e).sum(1).max())
    into_P = is_replica_EP.sum(0)
    place_EP = torch.full_like(plan.place_EP, -1)
    for rank in range(ranks):
        own = list(range(rank * e, rank * e + e))
        place_EP[own + is_replica_EP[:, rank].nonzero().view(-1).tolist(), rank] = torch.arange(e + int(into_P[rank]))
    cost = most + config.copy_cost * max(int(plan.replicas_P.max()), int(plan.replicas_PP.sum(1).max()))
    promises = {
        "no negative number of slots": bool((plan.slots_EP >= 0).all() and (cells_nEP >= 0).all()),
        "every slot is computed": torch.equal(plan.slots_EP.sum(1), loads_E),
        "cells of a source sum to its counts": torch.equal(cells_nEP.sum(2), counts_HPE.flatten(0, 1)),
        "cells of all sources sum to the plan": torch.equal(cells_nEP.sum(0), plan.slots_EP),
        "no rank over the cap": most <= int(plan.cap),
        "no rank heavier than before": most <= before,
        "at most e replicas on a rank": int(into_P.max()) <= e,
        "at most P - 1 pairs of ranks": pairs <= ranks - 1,
        "replicas are those with slots": torch.equal(plan.replicas_PP, is_replica_EP.view(ranks, e, ranks).sum(1)),
        "own experts first, then replicas by expert": torch.equal(plan.place_EP, place_EP),
    }
    if config.tolerance is not None:
        bounds = replica_bounds(config, tokens=int(loads_E.sum()), top_k=1, num_experts=experts, ranks=ranks)
        promises["bounds that are known before"] = (
            most <= bounds.expert_rows
            and int(into_P.max()) <= bounds.replicas
            and int(plan.replicas_PP.sum(1).max()) <= bounds.replicas_sent
        )
    if config.tolerance is None:
        promises["never dearer than moving nothing"] = cost <= before
    else:
        promises["the tolerance"] = most <= mean * (1 + Fraction(config.tolerance))
    return [f"broken: {promise}" for promise, kept in promises.items() if not kept]


def _wrong_ids(plan: ReplicaPlan, cells_nEP: Tensor, counts_HPE: Tensor) -> list[str]:
    """Slots of a few sources, in random order, some dropped."""
    wrong = []
    experts = counts_HPE.shape[2]
    for source, count_E in list(enumerate(counts_HPE.flatten(0, 1)))[:3]:
        ids_N = torch.cat((torch.arange(experts).repeat_interleave(count_E), torch.full((source % 2 * 3,), -1)))
        ids_N = ids_N[torch.randperm(len(ids_N), generator=torch.Generator().manual_seed(source))].int()
        found_N1 = physical_ids(ids_N[:, None], cells_nEP[source], plan)
        cell = [{r: n for r, n in enumerate(row) if n} for row in cells_nEP[source].tolist()]
        truth = places_of(ids_N.tolist(), cell, plan.place_EP.tolist(), experts // counts_HPE.shape[1])
        if found_N1.dtype != torch.int32 or found_N1[:, 0].tolist() != truth:
            wrong.append(f"physical ids of source {source}")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fuzz.replication", description=__doc__)
    parser.add_argument("cases", type=int, help="how many draws")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    progress, start, failures = Progress(options.cases), time.perf_counter(), 0
    for index in range(options.cases):
        case = plan_case(options.seed, index)
        if wrong := check_plan(case):
            failures += 1
            print(f"\ncase {options.seed}:{index} ({case.kind}, {case.config}): {'; '.join(wrong)[:2000]}")
        progress.step(f"{failures} failed")
    progress.close()
    print(f"{options.cases} draws of seed {options.seed}: {failures} failure(s), {time.perf_counter() - start:.0f} s")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
