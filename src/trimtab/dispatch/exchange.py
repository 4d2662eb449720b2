"""One movement of a layer call over one transport: under a guard it says where this rank is and, where the host waits
anyway, sees that all are there before rows move.

Legend: n rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor

from trimtab.dispatch.handshake import MOVEMENTS, CallId, announce
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
"""Where a rank is once a movement is done."""


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """What the movements of one layer call over one transport have in common.

    run: `layer_frame` of the layer. call: which every rank must be in. announced: whether ranks tell each other what
    comes before it moves; None for where they are guarded and move rows on the CPU. told: movements of the call that
    an earlier message has announced, and that need no other.
    """

    transport: Transport
    guard: Guard | None
    run: Callable[..., Any]
    call: CallId
    announced: bool | None = None
    told: set[tuple[str, Direction]] = field(default_factory=set)

    def announces(self, device: torch.device) -> bool:
        """Whether ranks tell each other what comes before rows on this device move."""
        return (self.guard is not None and device.type == "cpu") if self.announced is None else self.announced

    def move(
        self, phase: str, direction: Direction, splits: SplitSizes, rows: Sequence[Tensor],
        send: Callable[[], list[Tensor]], *, usable: bool = True,
    ) -> list[Tensor]:  # fmt: skip
        """What `send` brings. rows: [n, *] those whose widths and dtypes the call does not say. usable: whether this
        rank has something to send; where not, and it is announced, every rank raises InputError."""
        call, guard, device = self.call, self.guard, rows[0].device
        if guard is None and not self.announced:
            return cast(list[Tensor], self.run(send))
        with nullcontext() if guard is None else guard.alone(call.layer, phase):
            if guard is not None:
                guard.at(call.layer, phase, direction, call.number)
            here = phase, direction
            if here in self.told:
                self.told.discard(here)
            elif self.announces(device) and here in MOVEMENTS:
                said = rows if usable else None
                self.run(announce, self.transport, guard, splits, call, phase, direction, said, device)
            received = cast(list[Tensor], self.run(send))
        if guard is not None:
            after, turn, state = _AFTER[phase, direction]
            guard.at(call.layer, after, turn, call.number, state)
        return received


@contextmanager
def told_to(guard: Guard | None, own: Guard | None) -> Iterator[None]:
    """An error in here is also one of the ranks that `guard` watches, which are to meet this one later in the call.
    own: watches the group in which it counts ranks."""
    try:
        yield
    except TrimtabError as error:
        if guard is None:
            raise
        named = error if own is None else own.in_the_world(error)
        guard.fail(named, own)
        raise named.with_traceback(error.__traceback__) from error.__cause__
