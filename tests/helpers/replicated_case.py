"""Ranks as threads of one process that lend each other experts, without a dispatcher: their rows are where they are to
be computed. The truth is one module that has all experts and all rows.

Legend: P ranks, e experts at home on each, n replicas on one, M rows, K slots per row, D model dim.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from trimtab.experts.module import ExpertMLP

D, F, K, P, HOME = 64, 64, 2, 3, 2
HELD = ([], [(0, 1), (2, 0)], [(0, 0), (0, 1), (1, 1)])
"""For each rank the (home rank, expert there) of its replicas, in order."""


class Meeting:
    """Where the threads give each other things."""

    def __init__(self, ranks: int = P) -> None:
        self.barrier, self.given = threading.Barrier(ranks, timeout=30), [None] * ranks

    def all(self, rank: int, mine: Any) -> list[Any]:
        self.given[rank] = mine
        self.barrier.wait()
        found = list(self.given)
        self.barrier.wait()
        return found


@dataclass(kw_only=True)
class Lent:
    """`trimtab.experts.replicated.Replicas` of one rank. log: its movements, with the widths and dtypes that moved."""

    meeting: Meeting
    rank: int
    held: Sequence[Sequence[tuple[int, int]]] = HELD
    num_home_slots: int | None = None
    num_slots: int | None = None
    log: list[tuple[str, list[tuple[torch.dtype, torch.Size]]]] = field(default_factory=list)

    @property
    def number(self) -> int:
        return len(self.held[self.rank])

    def send(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        everyone = self.meeting.all(self.rank, list(tensors))
        self.log.append(("send", [(t.dtype, t.shape[1:]) for t in tensors]))
        mine = self.held[self.rank]
        return [
            torch.stack([everyone[r][i][e] for r, e in mine]) if mine else t.new_empty(0, *t.shape[1:])
            for i, t in enumerate(tensors)
        ]

    def add_home(self, replicas: Sequence[Tensor], into: Sequence[Tensor], then: Sequence[Tensor] = ()) -> None:
        everyone = self.meeting.all(self.rank, list(replicas))
        self.log.append(("home", [(t.dtype, t.shape[1:]) for t in replicas]))
        for r, held in enumerate(self.held):
            for j, (home, expert) in enumerate(held):
                for i, target in enumerate(into):
                    assert everyone[r][i].dtype == target.dtype
                    if home == self.rank:
                        target[expert] += everyone[r][i][j]
        self.meeting.barrier.wait()


def in_threads(work: Callable[[int], Any], ranks: int = P) -> list[Any]:
    """What each thread returned."""
    found: list[Any] = [None] * ranks

    def run(rank: int) -> None:
        try:
            found[rank] = True, work(rank)
        except BaseException as error:
            found[rank] = False, error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    errors = [what for good, what in found if not good]
    for error in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
        raise error
    return [what for _, what in found]


@dataclass(kw_only=True)
class Rows:
    """Of one rank: ids as it has them, and as the module of all experts has them."""

    x: Tensor
    w: Tensor
    dy: Tensor
    ids: Tensor
    true_ids: Tensor


def rows_of(rank: int, rows: int, dtype: torch.dtype) -> Rows:
    """Random ones over what the rank has, with dropped slots."""
    g = torch.Generator().manual_seed(rank)
    experts = [rank * HOME + e for e in range(HOME)] + [r * HOME + e for r, e in HELD[rank]]
    ids = torch.randint(-1, len(experts), (rows, K), generator=g)
    x, dy = (torch.randn(rows, D, generator=g, dtype=torch.float64).to(dtype) for _ in range(2))
    w = torch.rand(rows, K, generator=g, dtype=torch.float64).to(torch.promote_types(dtype, torch.float32))
    return Rows(x=x, w=w, dy=dy, ids=ids, true_ids=torch.tensor([*experts, -1])[ids])


def part_of(whole: ExpertMLP, rank: int) -> ExpertMLP:
    """A module with one rank's experts."""
    part = copy.deepcopy(whole)
    part.num_experts = HOME
    for name, param in list(part.named_parameters()):
        own, _, last = name.rpartition(".")
        cut = param.data if param.shape[0] == 1 else param.data[rank * HOME : (rank + 1) * HOME].clone()
        setattr(part.get_submodule(own), last, torch.nn.Parameter(cut, requires_grad=param.requires_grad))
    return part


def joined(parts: Sequence[dict[str, Tensor]], like: ExpertMLP) -> dict[str, Tensor]:
    """Of all ranks, as the module of all experts has them: one after the other; summed where all share one."""
    whole = {name: param.shape for name, param in like.named_parameters()}
    return {
        name: sum(part[name] for part in parts) if shape[0] == 1 else torch.cat([part[name] for part in parts])
        for name, shape in whole.items() if name in parts[0]
    }  # fmt: skip
