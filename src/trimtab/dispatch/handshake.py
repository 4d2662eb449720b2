"""What ranks tell each other before rows move, in one shape for every movement: whatever two ranks meet at, they
compare the same columns, so a rank out of step is an error with both sides' names on every rank.

    count     forward    ROWS and SLOTS that follow, TOKENS held, BAD,      every transport, one host sync
                         GRAD, LINES and SIZES of what is shared,
                         REPLICAS, REPLICA_SLOTS and PLAN of replicated experts
    the others           ROWS that follow, EXPECTED rows, VALUES in one,    guarded, where the host waits anyway (CPU)
                         BAD, their DTYPE

Legend: P ranks, C columns.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from trimtab.dispatch.transport import Handshake, SplitSizes, Transport
from trimtab.errors import DesyncError, InputError
from trimtab.validation import DTYPES

if TYPE_CHECKING:
    from trimtab.guard.guard import Guard

NAME_COLUMNS = 4
ROWS, SLOTS, TOKENS, BAD, GRAD, LINES, SIZES, REPLICAS, REPLICA_SLOTS, PLAN = range(10)
MOVEMENT, CALL, EXPERTS, TOP_K, WIDTH, FINGERPRINT, NAME = range(10, 17)
EXPECTED, VALUES, DTYPE = SLOTS, TOKENS, GRAD
COLUMNS = NAME + NAME_COLUMNS
MOVEMENTS = (
    ("count", "forward"), ("route", "forward"), ("experts", "forward"), ("combine", "forward"),
    ("combine", "backward"), ("experts", "backward"), ("dispatch", "backward"),
)  # fmt: skip
UNUSABLE = -1
"""BAD of a rank that can take no part: it cannot send what it was given."""
UNFIT = -1
"""PLAN of a rank whose own slots are not as they were gathered."""
_HALF = 1 << 32
"""Two numbers travel in one column."""
_UNREPLICATED = (0, 0, 0)
_WHAT = {"route": "the counts", "experts": "the experts' weights, or what a backward is asked for,"}


class Shared(NamedTuple):
    """What of this rank's tokens other ranks of the group must have as much of.

    tp, cp: the first rank of this one's line of the mesh, -1 where nothing is compared along it.
    sequences, positions: how many. positions: of each sequence, compared along tp; -1 where they may differ.
    """

    tp: int = -1
    cp: int = -1
    sequences: int = 0
    positions: int = -1

    def columns(self) -> list[int]:
        """LINES and SIZES."""
        return [(self.tp + 1) * _HALF + self.cp + 1, self.sequences * _HALF + self.positions + 1]


NOTHING = Shared()


@dataclass(frozen=True, kw_only=True)
class CallId:
    """One layer call, as every rank of the group must have it. `fingerprint`: what else must be equal."""

    layer: str
    number: int
    experts: int
    top_k: int
    width: int
    fingerprint: str

    def columns(self, phase: str, direction: str) -> list[int]:
        """The columns from MOVEMENT on. The name travels as its last 32 bytes, the fingerprint as a checksum."""
        return [MOVEMENTS.index((phase, direction)), *self._fixed]

    @cached_property
    def _fixed(self) -> list[int]:
        """What is the same at each movement of the call."""
        tail = self.layer.encode()[-8 * NAME_COLUMNS :].rjust(8 * NAME_COLUMNS, b"\0")
        name = [int.from_bytes(tail[i : i + 8], "little", signed=True) for i in range(0, len(tail), 8)]
        checksum = zlib.crc32(f"{self.layer} {self.fingerprint}".encode())
        return [self.number, self.experts, self.top_k, self.width, checksum, *name]


def fill(
    rows_P: Tensor, slots_P: Tensor, tokens: int, bad: Tensor | int, call: CallId, *, grad: bool = False,
    shared: Shared = NOTHING, columns: Mapping[int, Tensor] = MappingProxyType({}),
) -> Tensor:  # fmt: skip
    """The message [P, C] int64 of a count, made on the device of the counts: no copy to it and no sync.

    grad: whether this rank's tokens or their weights want a gradient. columns: [P] or [] int64 others by number.
    """
    same = [0, 0, tokens, 0, int(grad), *shared.columns(), *_UNREPLICATED, *call.columns("count", "forward")]
    if rows_P.device.type == "cpu":
        message = torch.tensor(same, device="cpu").repeat(rows_P.shape[0], 1)
    else:
        message = rows_P.new_zeros(rows_P.shape[0], COLUMNS)
        for column, value in enumerate(same):
            if value:
                message[:, column].fill_(value)
    message[:, ROWS], message[:, SLOTS], message[:, BAD] = rows_P, slots_P, bad
    for column, values in columns.items():
        message[:, column] = values
    return message


def announce(
    transport: Transport, guard: Guard | None, splits: SplitSizes, call: CallId, phase: str, direction: str,
    rows: Sequence[Tensor] | None, device: torch.device,
) -> None:  # fmt: skip
    """Tell each peer what comes and check what they tell, before rows move. Collective, with a host sync.

    rows: those whose widths and dtypes the call does not say; None for what this rank cannot send. device: where the
    ranks meet.

    Raises:
        DesyncError: a rank is at another call, or will not send what this rank expects.
        InputError: a rank was given rows that it cannot send.
    """
    values, kind = (0, 0) if rows is None else _kind(rows)
    tail = [values, 0 if rows is not None else UNUSABLE, kind, *NOTHING.columns(), *_UNREPLICATED]
    counts = list(zip(splits.outgoing, splits.incoming, strict=True))
    here = call.columns(phase, direction)
    told = transport.handshake(torch.tensor([[*count, *tail, *here] for count in counts], device=device))
    compare(told, transport.rank, call, phase)
    kinds = [(said[VALUES], said[DTYPE]) for said in told.received]
    if len(set(kinds)) > 1:
        raise DesyncError(
            f"rows of {', '.join(_of_kind(*kind) for kind in kinds)} come from ranks 0..{len(kinds) - 1} ({direction}, "
            f"call {call.number}): the width or the dtype of {_WHAT.get(phase, 'what the experts gave back')} differs "
            "between ranks",
            ranks=tuple(p for p, kind in enumerate(kinds) if kind != kinds[transport.rank]),
            layer=call.layer, phase=phase,
        )  # fmt: skip
    wrong = {
        p: f"rank {p} will send {said[ROWS]} rows where {coming} are expected, and expects {said[EXPECTED]} where "
        f"{going} come"
        for p, (said, (going, coming)) in enumerate(zip(told.received, counts, strict=True))
        if (said[ROWS], said[EXPECTED]) != (coming, going)
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


def _kind(rows: Sequence[Tensor]) -> tuple[int, int]:
    """How many values a row has, and their dtype by its number; of several tensors, or codes, a checksum below 0."""
    values, dtypes = [row.shape[1] for row in rows], [row.dtype for row in rows]
    if len(rows) == 1 and dtypes[0] in DTYPES:
        return values[0], DTYPES.index(dtypes[0])
    return sum(values), -1 - zlib.crc32(f"{values} {dtypes}".encode())


def _of_kind(values: int, kind: int) -> str:
    dtype = f"values of kind {-1 - kind:08x}" if kind < 0 else str(DTYPES[kind]).removeprefix("torch.")
    return f"{values} {dtype}"


def compare(told: Handshake, rank: int, call: CallId, phase: str) -> None:
    """What is wrong with what the ranks told each other. Every rank sees all of it, so either all raise or none.

    Raises:
        InputError: a rank was given what it cannot send.
        DesyncError: the ranks are not in the same call, or have not as much of what they share.
    """
    _raise_if_unusable(told.received, call.layer, phase)
    _raise_if_desynced(told, rank, call, phase)
    _raise_if_unlike(told.received, call.layer)
    _raise_if_planned_otherwise(told.received, rank, call, phase)


def _raise_if_desynced(told: Handshake, rank: int, call: CallId, phase: str) -> None:
    mine = told.sent[rank]
    others = tuple(p for p, said in enumerate(told.received) if said[MOVEMENT:] != mine[MOVEMENT:])
    if others:
        sides = "; ".join(f"rank {p}: {_in_words(said, mine)}" for p, said in enumerate(told.received))
        raise DesyncError(
            f"rank(s) {', '.join(map(str, others))} are in another call than rank {rank}. {sides}. "
            f"Rank {rank} also has ({call.fingerprint}). Every rank of an expert group must run the same layers in the "
            "same order with the same configuration",
            ranks=others, layer=call.layer, phase=phase,
        )  # fmt: skip


def _raise_if_planned_otherwise(received: Sequence[Sequence[int]], rank: int, call: CallId, phase: str) -> None:
    """Ranks of replicated experts that would not move the same replicas."""
    if unfit := tuple(p for p, said in enumerate(received) if said[PLAN] == UNFIT):
        raise DesyncError(
            f"rank(s) {', '.join(map(str, unfit))} have other numbers of slots for each expert than those that were "
            f"gathered from them (call {call.number}): what was gathered came back changed, or a checkpointed block "
            "decides otherwise when it is run again; see `trimtab.replay_in_recompute`",
            ranks=unfit, layer=call.layer, phase=phase,
        )  # fmt: skip
    if others := tuple(p for p, said in enumerate(received) if said[PLAN] != received[rank][PLAN]):
        raise DesyncError(
            f"rank(s) {', '.join(map(str, others))} place replicas of experts by another plan than rank {rank} (call "
            f"{call.number}): the ranks have gathered other numbers of slots",
            ranks=others, layer=call.layer, phase=phase,
        )  # fmt: skip


def _raise_if_unlike(received: Sequence[Sequence[int]], layer: str) -> None:
    """Ranks that must have as many sequences or positions."""
    lines: dict[tuple[str, int], dict[tuple[int, int], list[int]]] = {}
    for rank, said in enumerate(received):
        (tp, cp), (sequences, positions) = divmod(said[LINES], _HALF), divmod(said[SIZES], _HALF)
        for mesh, line, size in (("tp_mesh", tp, (sequences, positions)), ("cp_mesh", cp, (sequences, 0))):
            if line:
                lines.setdefault((mesh, line), {}).setdefault(size, []).append(rank)
    for (mesh, _), sizes in lines.items():
        if len(sizes) > 1:
            each = "; ".join(
                f"rank(s) {', '.join(map(str, ranks))}: {sequences} sequence(s)"
                + (f" of {positions - 1} position(s)" if positions else "")
                for (sequences, positions), ranks in sizes.items()
            )
            why = "hold the same tokens" if max(positions for _, positions in sizes) else "share sequences"
            raise DesyncError(
                f"ranks of one {mesh} that must {why} were given others ({each}). With tokens='replicated' each is "
                "given all tokens of its tp_mesh; with a sequence_aux_loss the ranks of a tp_mesh or cp_mesh have "
                "positions of the same sequences",
                ranks=tuple(rank for ranks in sizes.values() for rank in ranks), layer=layer, phase="count",
            )  # fmt: skip


def _raise_if_unusable(received: Sequence[Sequence[int]], layer: str, phase: str) -> None:
    """A rank that was given something that it cannot send says so instead of staying away."""
    guilty = tuple(p for p, said in enumerate(received) if said[BAD] == UNUSABLE)
    if guilty:
        raise InputError(
            f"rank(s) {', '.join(map(str, guilty))} were given tensors of the wrong shape or dtype, "
            "of a layout that cannot be sent, or on several devices; the error there says which",
            ranks=guilty, layer=layer, phase=phase,
        )  # fmt: skip


def _in_words(said: Sequence[int], mine: Sequence[int]) -> str:
    """One rank's call, as far as it came over the wire."""
    phase, direction = MOVEMENTS[said[MOVEMENT]]
    tail = b"".join(value.to_bytes(8, "little", signed=True) for value in said[NAME:]).lstrip(b"\0")
    name = ("…" if len(tail) == 8 * NAME_COLUMNS else "") + tail.decode(errors="replace")
    text = f"{phase} {direction} of layer {name}, call {said[CALL]}"
    text += f" ({said[EXPERTS]} experts, top-{said[TOP_K]}, width {said[WIDTH]})"
    named = (*range(MOVEMENT, FINGERPRINT), *range(NAME, COLUMNS))
    only_fingerprint = said[FINGERPRINT] != mine[FINGERPRINT] and all(said[i] == mine[i] for i in named)
    return f"{text}, with another dtype, combine, guard or fingerprint" if only_fingerprint else text
