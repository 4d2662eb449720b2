"""One movement of a layer call over one transport, and the handshake before rows move: under a guard a rank notes where
it is and, where the host waits anyway, compares with the other ranks, beside the facts, what comes.

    count     forward    ROWS and SLOTS that follow, TOKENS held, BAD,      every transport, one host sync
                         GRAD, and experts and slots of other ranks
    the others           ROWS that follow, EXPECTED rows, VALUES in one,    guarded, where the host waits anyway (CPU)
                         BAD, their DTYPE

Legend: n rows, P ranks, C columns.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor

from trimtab.dispatch import facts as wire
from trimtab.dispatch.facts import MOVEMENTS, NO_FACTS, CallId, Facts
from trimtab.dispatch.transport import SplitSizes, Transport
from trimtab.errors import DesyncError, TrimtabError
from trimtab.validation import DTYPES

if TYPE_CHECKING:
    from trimtab.guard.guard import Guard

Direction = Literal["forward", "backward"]

EXPECTED, VALUES, DTYPE = wire.SLOTS, wire.TOKENS, wire.GRAD
_DIFFERS = {"route": "the counts", "experts": "the experts' weights, or what a backward is asked for,"}

_AFTER = {
    ("route", "forward"): ("route", "forward", "in"), ("dispatch", "forward"): ("experts", "forward", "in"),
    ("experts", "forward"): ("experts", "forward", "in"), ("combine", "forward"): ("combine", "forward", "past"),
    ("combine", "backward"): ("experts", "backward", "in"), ("experts", "backward"): ("experts", "backward", "past"),
    ("dispatch", "backward"): ("route", "backward", "in"),
}  # fmt: skip
"""The place of a rank once a movement is done."""


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """Moves rows for one layer call over one transport.

    run: `layer_frame` of the layer. call: which every rank must be in. agrees: whether ranks compare what comes before
    it moves; None for where they are guarded and move rows on the CPU. agreed: movements of the call that an earlier
    handshake has covered, and that need no other.
    """

    transport: Transport
    guard: Guard | None
    run: Callable[..., Any]
    call: CallId
    agrees: bool | None = None
    agreed: set[tuple[str, Direction]] = field(default_factory=set)

    def agrees_on(self, device: torch.device) -> bool:
        """True where ranks compare what comes before rows on this device move."""
        return (self.guard is not None and device.type == "cpu") if self.agrees is None else self.agrees

    def move(
        self, phase: str, direction: Direction, splits: SplitSizes, rows: Sequence[Tensor],
        send: Callable[[], list[Tensor]], *, usable: bool = True,
    ) -> list[Tensor]:  # fmt: skip
        """Call `send`, and return what it brings. rows: [n, *] those whose widths and dtypes the call does not say.
        usable=False: this rank has nothing to send, and where ranks compare every one raises InputError."""
        call, guard, device = self.call, self.guard, rows[0].device
        if guard is None and not self.agrees:
            return cast(list[Tensor], self.run(send))
        with nullcontext() if guard is None else guard.alone(call.layer, phase):
            if guard is not None:
                guard.at(call.layer, phase, direction, call.number)
            here = phase, direction
            if here in self.agreed:
                self.agreed.discard(here)
            elif self.agrees_on(device) and here in MOVEMENTS:
                given = rows if usable else None
                self.run(agree_on_rows, self.transport, guard, splits, call, phase, direction, given, device)
            received = cast(list[Tensor], self.run(send))
        if guard is not None:
            after, turn, state = _AFTER[phase, direction]
            guard.at(call.layer, after, turn, call.number, state)
        return received


@contextmanager
def error_scope(guard: Guard | None, own: Guard | None) -> Iterator[None]:
    """Also fail `guard`'s group when this block raises: its ranks wait for this one later in the call. own: watches the
    group whose ranks the error names."""
    try:
        yield
    except TrimtabError as error:
        if guard is None:
            raise
        named = error if own is None else own.in_the_world(error)
        guard.fail(named, own)
        raise named.with_traceback(error.__traceback__) from error.__cause__


def count_message(rows_P: Tensor, call: CallId, values: Mapping[int, Tensor | int], facts: Facts = NO_FACTS) -> Tensor:
    """The message [P, C] int64 of a count on the device of `rows_P`: what the host knows goes there in one copy, which
    it does not wait for.

    values: by column; an int, or int64 [P] or [], or [P, e] from COLUMNS on.
    """
    same = [-1] + [0] * (wire.WEIGHTS - 1) + facts.columns() + call.columns("count", "forward")  # ROWS: not known
    tensors = {wire.ROWS: rows_P}
    for column, value in values.items():
        if isinstance(value, Tensor):
            tensors[column] = value
        else:
            same[column] = int(value)
    message = torch.tensor(same, device="cpu").repeat(rows_P.shape[0], 1)
    if rows_P.device.type != "cpu":
        message = message.to(rows_P.device, non_blocking=True)
    for column, value in tensors.items():
        message[:, column if column < wire.COLUMNS else slice(column, None)] = value
    message.known = [same] * rows_P.shape[0]  # type: ignore[attr-defined]  # for a transport that reads no values
    return message


def agree_on_rows(
    transport: Transport, guard: Guard | None, splits: SplitSizes, call: CallId, phase: str, direction: str,
    rows: Sequence[Tensor] | None, device: torch.device,
) -> None:  # fmt: skip
    """Compare with each peer the rows that come, before they move. Collective, with a host sync.

    rows: those whose widths and dtypes the call does not say; None for what this rank cannot send. device: where the
    ranks meet.

    Raises:
        DesyncError: a rank is at another call, or will not send what this rank expects.
        InputError: a rank was given rows that it cannot send.
    """
    kind = (0, wire.UNUSABLE, 0) if rows is None else _kind(rows)
    same = [*kind, *[0] * (wire.MOVEMENT - DTYPE - 1), *call.columns(phase, direction)]
    counts = list(zip(splits.outgoing, splits.incoming, strict=True))
    known = [[*count, *same] for count in counts]
    message: Any = torch.tensor(known, device=device)
    message.known = known
    met = transport.handshake(message)
    wire.compare(met, transport.rank, call, phase)
    kinds = [(theirs[VALUES], theirs[DTYPE]) for theirs in met.received]
    if len(set(kinds)) > 1:
        raise DesyncError(
            f"rows of {', '.join(_kind_in_words(*kind) for kind in kinds)} come from ranks 0..{len(kinds) - 1} "
            f"({direction}, call {call.number}): the width or the dtype of "
            f"{_DIFFERS.get(phase, 'what the experts gave back')} differs between ranks",
            ranks=tuple(p for p, kind in enumerate(kinds) if kind != kinds[transport.rank]),
            layer=call.layer, phase=phase,
        )  # fmt: skip
    wrong = {
        p: f"rank {p} will send {theirs[wire.ROWS]} rows where {coming} are expected, and expects {theirs[EXPECTED]} "
        f"where {going} come"
        for p, (theirs, (going, coming)) in enumerate(zip(met.received, counts, strict=True))
        if (theirs[wire.ROWS], theirs[EXPECTED]) != (coming, going)
    }
    if wrong:
        error = DesyncError(
            f"{'; '.join(wrong.values())} ({direction}, call {call.number}), as rank {transport.rank} sees it. The "
            "ranks hold different plans of one call",
            ranks=tuple(wrong), layer=call.layer, phase=phase,
        )  # fmt: skip
        if guard is not None:
            guard.fail(error)
        raise error


def _kind(rows: Sequence[Tensor]) -> tuple[int, int, int]:
    """VALUES, BAD and DTYPE, a dtype by its number; for several tensors, or others, a checksum below 0."""
    values, dtypes = [row.shape[1] for row in rows], [row.dtype for row in rows]
    if len(rows) == 1 and dtypes[0] in DTYPES:
        return values[0], 0, DTYPES.index(dtypes[0])
    return sum(values), 0, -1 - zlib.crc32(f"{values} {dtypes}".encode())


def _kind_in_words(values: int, kind: int) -> str:
    dtype = f"values of kind {-1 - kind:08x}" if kind < 0 else str(DTYPES[kind]).removeprefix("torch.")
    return f"{values} {dtype}"
