"""One movement of a layer call over one transport: under a guard it notes where this rank is and, where the host waits
anyway, compares with the other ranks before rows move.

Legend: n rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor

from trimtab.dispatch.facts import MOVEMENTS, CallId
from trimtab.dispatch.handshake import agree_on_rows
from trimtab.dispatch.transport import SplitSizes, Transport
from trimtab.errors import TrimtabError

if TYPE_CHECKING:
    from trimtab.guard.guard import Guard

Direction = Literal["forward", "backward"]

_AFTER = {
    ("route", "forward"): ("route", "forward", "in"),
    ("dispatch", "forward"): ("experts", "forward", "in"),
    ("experts", "forward"): ("experts", "forward", "in"),
    ("combine", "forward"): ("combine", "forward", "past"),
    ("combine", "backward"): ("experts", "backward", "in"),
    ("experts", "backward"): ("experts", "backward", "past"),
    ("dispatch", "backward"): ("route", "backward", "in"),
}
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
