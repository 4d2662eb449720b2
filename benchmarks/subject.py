"""What a contestant's process holds: functions to be timed, and what tells whether they compute the right thing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

FORWARD = "forward"
BOTH = "forward+backward"


@dataclass(frozen=True, kw_only=True)
class Where:
    """A rank's place in the contestant's group of ranks."""

    rank: int
    ranks: int


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What a contestant's `build(args, where)` gives.

    modes: name -> one step, collective where the contestant has several ranks. A step that returns a dict has timed
        its parts itself: part -> seconds.
    outcome: runs one step and returns what a judge compares; None where there is nothing to judge.
    judged: the mode whose step `outcome` runs, "" where it is none.
    held: bytes of gradients that one step leaves.
    facts: what it chose, for the reader.
    rest: seconds after a turn in which its threads keep cores busy, that nobody else's steps are to be timed in.
    """

    modes: Mapping[str, Callable[[], object]]
    outcome: Callable[[], dict[str, Tensor]] | None = None
    judged: str = ""
    held: int = 0
    facts: Mapping[str, Any] = field(default_factory=dict)
    rest: float = 0.0


Build = Callable[[dict[str, Any], Where], Subject]
"""Imports what the contestant needs, and no more. ImportError and any other exception become its row's reason."""
