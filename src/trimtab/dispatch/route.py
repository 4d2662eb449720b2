"""A route: the sparse linear map of one layer call, P, and its transpose, without gradients.

    spread   P    tokens -> rows on the ranks that own their experts
    collect  P^T  rows -> sum per token, back home

`RankRoute` composes SpreadRanks with a transport; `LocalRoute` is the identity of a group of one rank.

Legend: T local tokens, M' rows received, R kept slots received, D model dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Literal, NoReturn, Protocol, cast

import torch
from torch import Tensor

from trimtab.dispatch.handshake import MOVEMENTS, CallId, announce
from trimtab.dispatch.plan import RankPlan, csr_of
from trimtab.dispatch.transport import SplitSizes, Transport, guard_of
from trimtab.errors import InputError
from trimtab.kernels.rows import Csr, combine_rows

Direction = Literal["forward", "backward"]

_AFTER = {
    ("dispatch", "forward"): ("experts", "forward", "in"),
    ("combine", "forward"): ("combine", "forward", "past"),
    ("combine", "backward"): ("experts", "backward", "in"),
    ("dispatch", "backward"): ("route", "backward", "in"),
}
"""Where a rank is once a movement is done."""


class Route(Protocol):
    """One layer call on one rank. Each method is a collective of the group, the same on every rank.

    `direction` says whose turn it is: the transpose of the one is the backward of the other.
    """

    @property
    def num_slots(self) -> int | None:
        """Kept slots among the received rows, or how many at most, where the host knows it."""
        ...

    def dispatch(self, tensors: Sequence[Tensor], direction: Direction = "forward") -> list[Tensor]:
        """P: tensors [T, *] -> [M', *], rows grouped by source rank, in token order within one."""
        ...

    def combine(self, tensors: Sequence[Tensor], direction: Direction = "forward") -> list[Tensor]:
        """P^T: tensors [M', *] -> [T, *], summed per token in at least float32, in the order of its slots."""
        ...

    def combine_slots(self, rows_RD: Tensor) -> Tensor:
        """One row per kept slot, in the order (row, k), back home: [T, D], summed per token in the order of k."""
        ...

    def refuse(self, error: InputError, like: Tensor) -> NoReturn:
        """Raise `error` in place of a combine, on every rank that would wait for this one."""
        ...


@dataclass(frozen=True, kw_only=True)
class LocalRoute:
    """The identity: all experts are on this rank, nothing moves and nothing is counted."""

    ids_TK: Tensor
    num_slots: int | None = None

    def dispatch(self, tensors: Sequence[Tensor], direction: Direction = "forward") -> list[Tensor]:
        return list(tensors)

    def combine(self, tensors: Sequence[Tensor], direction: Direction = "forward") -> list[Tensor]:
        return list(tensors)

    def combine_slots(self, rows_RD: Tensor) -> Tensor:
        kept_N = self.ids_TK.reshape(-1) >= 0
        return combine_rows(rows_RD, csr_of(kept_N.cumsum(0) - 1, kept_N, self.ids_TK.shape[0]))

    def refuse(self, error: InputError, like: Tensor) -> NoReturn:
        raise error


@dataclass(frozen=True, kw_only=True)
class RankRoute:
    """SpreadRanks and an exchange over `transport`. `call_id`: the call that every rank must be in."""

    transport: Transport
    plan: RankPlan
    rows: SplitSizes
    slots: SplitSizes
    tokens: tuple[int, ...]
    call_id: CallId

    @property
    def num_slots(self) -> int:
        return sum(self.slots.incoming)

    def dispatch(self, tensors: Sequence[Tensor], direction: Direction = "forward") -> list[Tensor]:
        if torch.compiler.is_compiling():
            return _eagerly(self.dispatch, tensors, direction)
        phase = "dispatch" if direction == "forward" else "combine"
        with self._movement(phase, direction, self.rows, tensors):
            return self.transport.dispatch(tensors, self.plan.row_token_M, self.rows, self.tokens)

    def combine(self, tensors: Sequence[Tensor], direction: Direction = "forward") -> list[Tensor]:
        if torch.compiler.is_compiling():
            return _eagerly(self.combine, tensors, direction)
        splits = self.rows.reversed()
        phase = "combine" if direction == "forward" else "dispatch"
        with self._movement(phase, direction, splits, tensors):
            received = self.transport.combine(tensors, splits, self.tokens)
        return combine_parts(received, self.plan.token_csr)

    def combine_slots(self, rows_RD: Tensor) -> Tensor:
        splits, bags = self.slots.reversed(), self.plan.slot_csr
        assert bags is not None
        with self._movement("combine", "forward", splits, [rows_RD]):
            (received,) = self.transport.combine([rows_RD], splits, self.tokens)
        return combine_rows(received, bags)

    def refuse(self, error: InputError, like: Tensor) -> NoReturn:
        guard = guard_of(self.transport)
        if guard is not None and like.device.type == "cpu":
            with suppress(InputError), guard.alone(self.call_id.layer, "combine"):
                announce(self.transport, self.rows.reversed(), self.call_id, "combine", "forward", None)
        raise error

    @contextmanager
    def _movement(self, phase: str, direction: Direction, splits: SplitSizes, rows: Sequence[Tensor]) -> Iterator[None]:
        """Say where this rank is and, where the host waits anyway, see that all are there before rows move."""
        guard, call_id = guard_of(self.transport), self.call_id
        if guard is None:
            yield
            return
        with guard.alone(call_id.layer, phase):
            guard.at(call_id.layer, phase, direction, call_id.call)
            if rows[0].device.type == "cpu" and (phase, direction) in MOVEMENTS:
                announce(self.transport, splits, call_id, phase, direction, rows[0])
            yield
        after, turn, state = _AFTER[phase, direction]
        guard.at(call_id.layer, after, turn, call_id.call, state)


def _eagerly(move: Callable[..., list[Tensor]], tensors: Sequence[Tensor], direction: Direction) -> list[Tensor]:
    """Out of the graph of a backward, which compiled autograd traces: an exchange and its guard are in none."""
    from trimtab.eager import eagerly

    return cast(list[Tensor], eagerly(move, tensors, direction))


def slots_of(ids_MK: Tensor, num_slots: int | None) -> tuple[Tensor, Csr]:
    """The kept slots of received rows in the order (row, k): their numbers row * K + k, and one bag per row."""
    kept_N = (ids_MK >= 0).reshape(-1)
    bags = csr_of(torch.arange(kept_N.shape[0], device=kept_N.device), kept_N, ids_MK.shape[0], num_slots)
    place = Csr(indices=torch.arange(bags.indices.shape[0], device=kept_N.device), indptr=bags.indptr)
    return bags.indices, place


def combine_parts(parts: Sequence[Tensor], csr: Csr) -> list[Tensor]:
    """`combine_rows` of each part [n, *], which lie side by side in the same rows or each alone.

    Side by side, all parts of the first one's dtype come out of one sum over the whole row: to sum a part whose rows
    are not adjacent, kernels would copy it first. The others, which are narrow, are summed alone.
    """
    first = parts[0]
    stride, storages = first.stride(0), {part.untyped_storage().data_ptr() for part in parts}
    if len(parts) == 1 or len(storages) > 1 or stride == first.shape[1]:  # alone, a part may have padding too
        return [combine_rows(part, csr) for part in parts]
    summed = combine_rows(first.as_strided((first.shape[0], stride), (stride, 1)), csr)
    starts = [part.storage_offset() - first.storage_offset() for part in parts]
    return [
        summed[:, start : start + part.shape[1]] if part.dtype == first.dtype else combine_rows(part, csr)
        for part, start in zip(parts, starts, strict=True)
    ]
