"""Handshakes: messages that the ranks exchange before rows move, beside the facts that they compare.

    count     forward    ROWS and SLOTS that follow, TOKENS held, BAD,      every transport, one host sync
                         GRAD, REPLICAS and REPLICA_SLOTS
    the others           ROWS that follow, EXPECTED rows, VALUES in one,    guarded, where the host waits anyway (CPU)
                         BAD, their DTYPE

Legend: P ranks, C columns.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trimtab.dispatch import facts as wire
from trimtab.dispatch.facts import NO_FACTS, CallId, Facts
from trimtab.dispatch.transport import SplitSizes, Transport
from trimtab.errors import DesyncError
from trimtab.validation import DTYPES

if TYPE_CHECKING:
    from trimtab.guard.guard import Guard

EXPECTED, VALUES, DTYPE = wire.SLOTS, wire.TOKENS, wire.GRAD
_DIFFERS = {"route": "the counts", "experts": "the experts' weights, or what a backward is asked for,"}


def count_message(rows_P: Tensor, call: CallId, values: Mapping[int, Tensor | int], facts: Facts = NO_FACTS) -> Tensor:
    """The message [P, C] int64 of a count, made on the device of `rows_P`: no copy to it and no sync.

    values: by column; an int, or int64 [P] or [].
    """
    same = [0] * wire.WEIGHTS + facts.columns() + call.columns("count", "forward")
    tensors = {wire.ROWS: rows_P}
    for column, value in values.items():
        if isinstance(value, Tensor):
            tensors[column] = value
        else:
            same[column] = int(value)
    if rows_P.device.type == "cpu":
        message = torch.tensor(same, device="cpu").repeat(rows_P.shape[0], 1)
    else:
        message = rows_P.new_zeros(rows_P.shape[0], wire.COLUMNS)
        for column, number in enumerate(same):
            if number:
                message[:, column].fill_(number)
    for column, value in tensors.items():
        message[:, column] = value
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
    met = transport.handshake(torch.tensor([[*count, *same] for count in counts], device=device))
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
    """VALUES, BAD and DTYPE, a dtype by its number; for several tensors, or codes, a checksum below 0."""
    values, dtypes = [row.shape[1] for row in rows], [row.dtype for row in rows]
    if len(rows) == 1 and dtypes[0] in DTYPES:
        return values[0], 0, DTYPES.index(dtypes[0])
    return sum(values), 0, -1 - zlib.crc32(f"{values} {dtypes}".encode())


def _kind_in_words(values: int, kind: int) -> str:
    dtype = f"values of kind {-1 - kind:08x}" if kind < 0 else str(DTYPES[kind]).removeprefix("torch.")
    return f"{values} {dtype}"
