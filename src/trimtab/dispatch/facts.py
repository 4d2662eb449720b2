"""The facts that ranks must share in one layer call: a fixed table that every handshake compares, before rows move.
Where two ranks differ, every rank raises the same error, with both sides in words.

    fact         among             a rank sends
    call         all ranks         movement, number, sizes, a checksum of the configuration, the layer's name
    weights      all ranks         a checksum of what replicated experts hold, and of what of it is trained
    plan         all ranks         the checksum of the plan of replicas, a tensor on the device
    tp_tokens    a line of ranks   the line, and its number of sequences (of each pack, too) and positions
    cp_tokens    a line of ranks   the line, and its number of sequences (of each pack, too)

A message is as wide whatever a call uses: ranks out of step meet in messages of one size. On a device a
`Dispatcher` with sizes=True appends how many slots go to each expert of the receiver; then all layers must.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from trimtab.dispatch.transport import Handshake
from trimtab.errors import DesyncError, InputError

NAME_COLUMNS = 4
ROWS, SLOTS, TOKENS, BAD, GRAD, REPLICAS, REPLICA_SLOTS = range(7)
WEIGHTS, PLAN, TP_LINE, TP_TOKENS, CP_LINE, CP_TOKENS = range(7, 13)
MOVEMENT, CALL, EXPERTS, TOP_K, WIDTH, FINGERPRINT, NAME = range(13, 20)
COLUMNS = NAME + NAME_COLUMNS
MOVEMENTS = (
    ("count", "forward"), ("route", "forward"), ("experts", "forward"), ("combine", "forward"),
    ("combine", "backward"), ("experts", "backward"), ("dispatch", "backward"),
)  # fmt: skip
UNUSABLE = -1
"""BAD of a rank that takes part although it cannot send what it was given."""
UNFIT = -1
"""PLAN of a rank whose own slots are not as they were gathered."""
_HALF = 1 << 32
"""Two numbers travel in one column."""


class LineTokens(NamedTuple):
    """Tokens of a rank of which the ranks of one line of a mesh have equal numbers. line: its first rank. positions: of
    each sequence, -1 where they may differ. packed: how many each of these holds at most, 0 where they are no packs."""

    line: int
    sequences: int
    positions: int = -1
    packed: int = 0


class Facts(NamedTuple):
    """Facts of one rank's call beside the call itself and the plan. weights: "" where ranks do not compare them."""

    weights: str = ""
    tp_tokens: LineTokens | None = None
    cp_tokens: LineTokens | None = None

    def columns(self) -> list[int]:
        """WEIGHTS to CP_TOKENS. PLAN, which is on the device, is left at 0."""
        found = [zlib.crc32(self.weights.encode()), 0]
        for line in (self.tp_tokens, self.cp_tokens):
            found += (0, 0) if line is None else (
                line.packed * _HALF + line.line + 1, line.sequences * _HALF + line.positions + 1
            )  # fmt: skip
        return found


NO_FACTS = Facts()


@dataclass(frozen=True, kw_only=True)
class CallId:
    """One layer call, as every rank of the group must have it. fingerprint: the rest of the configuration. sized: the
    number of columns from COLUMNS on."""

    layer: str
    number: int
    experts: int
    top_k: int
    width: int
    fingerprint: str
    sized: int = 0

    def columns(self, phase: str, direction: str) -> list[int]:
        """The columns from MOVEMENT on. The name travels as its last 32 bytes, the fingerprint as a checksum."""
        return [MOVEMENTS.index((phase, direction)), *self._fixed]

    @cached_property
    def _fixed(self) -> list[int]:
        """The columns that are equal at each movement of the call."""
        tail = self.layer.encode()[-8 * NAME_COLUMNS :].rjust(8 * NAME_COLUMNS, b"\0")
        name = [int.from_bytes(tail[i : i + 8], "little", signed=True) for i in range(0, len(tail), 8)]
        checksum = zlib.crc32(f"{self.layer} {self.fingerprint}".encode())
        return [self.number, self.experts, self.top_k, self.width, checksum, *name, *[0] * self.sized]


class _OfAll(NamedTuple):
    """A fact of all ranks. Wrong is a rank whose columns differ from this one's, or that sends `sentinel`."""

    columns: slice
    says: str
    sentinel: int | None = None


FACTS = {
    "call": _OfAll(slice(MOVEMENT, COLUMNS), (
        "are in another call than rank {rank}. {sides}. Rank {rank} also has ({call.fingerprint}). Every rank of an "
        "expert group must run the same layers in the same order with the same configuration"
    )),
    "weights": _OfAll(slice(WEIGHTS, PLAN), (
        "hold other experts than rank {rank} (call {call.number}), which has ({weights}). What runs replicated "
        "experts, their names, dtypes, shapes and what is trained must be the same on every rank"
    )),
    "slots": _OfAll(slice(PLAN, TP_LINE), (
        "have other numbers of slots for each expert than those that were gathered from them (call {call.number}): "
        "what was gathered came back changed, or a checkpointed block decides otherwise when it is run again; see "
        "`trimtab.replay_in_recompute`"
    ), UNFIT),
    "plan": _OfAll(slice(PLAN, TP_LINE), (
        "place replicas of experts by another plan than rank {rank} (call {call.number}): the ranks have gathered "
        "other numbers of slots"
    )),
}  # fmt: skip
LINES = {"tp_mesh": TP_LINE, "cp_mesh": CP_LINE}
"""By mesh, the column of a rank's line; that of its tokens is the next."""


def compare(met: Handshake, rank: int, call: CallId, phase: str, weights: str = "") -> None:
    """Raise the first difference in the table. Every rank sees all messages, so either all raise or none.

    Raises:
        InputError: a rank was given what it cannot send.
        DesyncError: a fact differs between ranks.
    """
    if unusable := tuple(p for p, theirs in enumerate(met.received) if theirs[BAD] == UNUSABLE):
        problem = "of the wrong shape or dtype, of a layout that cannot be sent, or on several devices"
        text = f"{_ranks(unusable)} were given tensors {problem}; the error there says which"
        raise InputError(text, ranks=unusable, layer=call.layer, phase=phase)
    mine = met.sent[rank]
    for columns, says, sentinel in FACTS.values():
        own, each = mine[columns], [theirs[columns] for theirs in met.received]
        wrong = (theirs != own if sentinel is None else theirs == [sentinel] for theirs in each)
        if others := tuple(p for p, differs in enumerate(wrong) if differs):
            sides = "; ".join(f"rank {p}: {_call_in_words(theirs, mine)}" for p, theirs in enumerate(met.received))
            text = says.format(rank=rank, call=call, weights=weights, sides=sides)
            raise DesyncError(f"{_ranks(others)} {text}", ranks=others, layer=call.layer, phase=phase)
    for mesh, column in LINES.items():
        _compare_lines(mesh, [theirs[column : column + 2] for theirs in met.received], call.layer)


def _compare_lines(mesh: str, lines_P: Sequence[Sequence[int]], layer: str) -> None:
    """Raises DesyncError where two ranks of a line have other numbers of sequences or positions."""
    for line in {line % _HALF for line, _ in lines_P if line}:
        by_tokens: dict[tuple[int, int], list[int]] = {}
        for rank, (own, tokens) in enumerate(lines_P):
            if own % _HALF == line:
                by_tokens.setdefault((tokens, own // _HALF), []).append(rank)
        if len(by_tokens) > 1:
            each = "; ".join(f"{_ranks(ranks)}: {_tokens_in_words(*tokens)}" for tokens, ranks in by_tokens.items())
            why = "hold the same tokens" if any(tokens % _HALF for tokens, _ in by_tokens) else "share sequences"
            raise DesyncError(
                f"ranks of one {mesh} that must {why} were given others ({each}). With tokens='replicated' each is "
                "given all tokens of its tp_mesh; with a sequence_aux_loss the ranks of a tp_mesh or cp_mesh have "
                "positions of the same sequences, or of the same packs with one num_sequences",
                ranks=tuple(rank for ranks in by_tokens.values() for rank in ranks), layer=layer, phase="count",
            )  # fmt: skip


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank(s) {', '.join(map(str, ranks))}"


def _tokens_in_words(tokens: int, packed: int) -> str:
    sequences, positions = divmod(tokens, _HALF)
    what = f"pack(s) with num_sequences={packed}" if packed else "sequence(s)"
    return f"{sequences} {what}" + (f" of {positions - 1} position(s)" if positions else "")


def _call_in_words(theirs: Sequence[int], mine: Sequence[int]) -> str:
    """One rank's call, as far as it came over the wire."""
    phase, direction = MOVEMENTS[theirs[MOVEMENT]]
    tail = b"".join(value.to_bytes(8, "little", signed=True) for value in theirs[NAME:COLUMNS]).lstrip(b"\0")
    name = ("…" if len(tail) == 8 * NAME_COLUMNS else "") + tail.decode(errors="replace")
    text = f"{phase} {direction} of layer {name}, call {theirs[CALL]}"
    text += f" ({theirs[EXPERTS]} experts, top-{theirs[TOP_K]}, width {theirs[WIDTH]})"
    named = (*range(MOVEMENT, FINGERPRINT), *range(NAME, COLUMNS))
    only_fingerprint = theirs[FINGERPRINT] != mine[FINGERPRINT] and all(theirs[i] == mine[i] for i in named)
    return f"{text}, with another dtype, combine, guard or fingerprint" if only_fingerprint else text
