"""The plan of replicated experts in plain loops over Python's integers: the reference."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

Moves = Counter[tuple[int, int]]
"""Slots that go to another rank, by (expert, rank)."""


@dataclass
class Walk:
    """What one donor still holds: slots of each of its experts, largest first."""

    surplus: int
    held: list[tuple[int, int]]
    moves: Moves = field(default_factory=Counter)

    def give(self, slots: int, to: int) -> int:
        """Move so many slots, from where the last move stopped; returns how many there were."""
        left = slots
        while left and self.held:
            expert, size = self.held[0]
            n = min(left, size)
            if n:
                self.moves[expert, to] += n
            left -= n
            self.held[0] = expert, size - n
            if not size - n:
                self.held.pop(0)
        return slots - left


def surplus_to_room(loads: Sequence[int], ranks: int, cap: int) -> Moves:
    """Each donor's surplus into the receivers' room, as it comes."""
    order, room, donors = _sides(loads, ranks, cap)
    receivers = [rank for rank in reversed(order) if room[rank] > 0]
    moves: Moves = Counter()
    for donor in donors.values():
        while donor.surplus > 0:
            n = min(donor.surplus, room[receivers[0]])
            assert donor.give(n, receivers[0]) == n
            donor.surplus -= n
            room[receivers[0]] -= n
            if not room[receivers[0]]:
                receivers.pop(0)
        moves += donor.moves
    return moves


def alias_table(loads: Sequence[int], ranks: int, cap: int) -> Moves:
    """Each receiver whole from one donor; what a donor lacks then comes from the next one."""
    order, room, donors = _sides(loads, ranks, cap)
    heavy = list(donors)
    for light in (rank for rank in reversed(order) if room[rank] > 0):
        if not heavy:
            break
        donor = donors[heavy[0]]
        n = min(room[light], sum(donors[rank].surplus for rank in heavy))
        assert donor.give(n, light) == n
        donor.surplus -= n
        while heavy and donors[heavy[0]].surplus <= 0:
            lacking = heavy.pop(0)
            lack = -donors[lacking].surplus
            if heavy and lack:
                assert donors[heavy[0]].give(lack, lacking) == lack
                donors[heavy[0]].surplus -= lack
    return sum((walk.moves for walk in donors.values()), Counter())


def _sides(loads: Sequence[int], ranks: int, cap: int) -> tuple[list[int], dict[int, int], dict[int, Walk]]:
    """Ranks from the heaviest on, the room of each, and those over the cap."""
    e = len(loads) // ranks
    own = {rank: range(rank * e, rank * e + e) for rank in range(ranks)}
    load = {rank: sum(loads[expert] for expert in own[rank]) for rank in range(ranks)}
    order = sorted(own, key=lambda rank: (-load[rank], rank))
    donors = {}
    for rank in order:
        if load[rank] > cap:
            held = sorted(((expert, loads[expert]) for expert in own[rank]), key=lambda pair: (-pair[1], pair[0]))
            donors[rank] = Walk(load[rank] - cap, held)
    return order, {rank: cap - load[rank] for rank in order}, donors


@dataclass
class Candidate:
    """One cap's moves. most: the most replicas that come to or leave a rank."""

    cap: int
    moves: Moves
    into: int
    most: int
    cost: int


def candidates(loads: Sequence[int], ranks: int, tolerance: int | None, copy_cost: int) -> list[Candidate]:
    """Every cap that the tolerance allows, from the tightest on; see `trimtab.dispatch.replica_plan`."""
    e = len(loads) // ranks
    heaviest = max(sum(loads[rank * e : rank * e + e]) for rank in range(ranks))
    mean = -(-sum(loads) // ranks)
    if tolerance is None:
        caps = [mean, *(mean + mean * 2**power // 64 for power in range(9)), heaviest]
    else:
        caps = [mean + mean * tolerance // 1024]
    found = []
    for cap in (min(cap, heaviest) for cap in caps):
        moves = surplus_to_room(loads, ranks, cap)
        if max(Counter(rank for _, rank in moves).values(), default=0) > e:
            moves = alias_table(loads, ranks, cap)
        into = max(Counter(rank for _, rank in moves).values(), default=0)
        most = max(into, max(Counter(expert // e for expert, _ in moves).values(), default=0))
        after = Counter({rank: sum(loads[rank * e : rank * e + e]) for rank in range(ranks)})
        for (expert, rank), slots in moves.items():
            after[rank] += slots
            after[expert // e] -= slots
        found.append(Candidate(cap, moves, into, most, max(after.values()) + copy_cost * most))
    return found


def best(found: Sequence[Candidate]) -> Candidate:
    """The cheapest; of equal ones that with the fewest replicas, of these the loosest."""
    return min(found, key=lambda one: (one.cost, one.most, -one.cap))


def cells_of(counts: Sequence[Sequence[Sequence[int]]], slots: Sequence[Sequence[int]]) -> list[list[dict[int, int]]]:
    """[H * P][E] of each source (etp_rank, rank): how many of its slots of an expert each rank computes.

    counts: [H][P][E]. slots: [E][P] of each expert that each rank computes.
    """
    ranks, experts = len(counts[0]), len(slots)
    cells: list[list[dict[int, int]]] = [[{} for _ in range(experts)] for _ in range(len(counts) * ranks)]
    for expert in range(experts):
        left = [row[rank][expert] for row in counts for rank in range(ranks)]
        room = list(slots[expert])
        for first in (True, False):  # what a rank computes itself stays there; then as it comes
            to = 0
            for source, cell in enumerate(cells):
                while left[source] and to < ranks:
                    rank = source % ranks if first else to
                    n = min(left[source], room[rank])
                    if n:
                        cell[expert][rank] = cell[expert].get(rank, 0) + n
                    left[source] -= n
                    room[rank] -= n
                    if first:
                        break
                    to += not room[to]
        assert not any(left), "an expert's slots all have a rank"
    return cells


def places_of(ids: Sequence[int], cell: Sequence[dict[int, int]], place: Sequence[Sequence[int]], e: int) -> list[int]:
    """Physical ids of one rank's slots: those of an expert go to its ranks in ascending order, as many as `cell`."""
    queue = [
        [rank * 2 * e + place[x][rank] for rank in sorted(to) for _ in range(to[rank])] for x, to in enumerate(cell)
    ]
    return [queue[expert].pop(0) if 0 <= expert < len(queue) else -1 for expert in ids]
