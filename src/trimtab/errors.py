"""Typed errors: who, where, what was expected, what to do. The ground floor: imports nothing of ours."""

from __future__ import annotations

import contextlib
import math
import shutil
import sys
from pathlib import Path

LEAST_FREE = 20_000_000
"""Bytes: with fewer, a disk may be why something could not be written."""


class TrimtabError(Exception):
    """Base of all errors raised on purpose.

    Args:
        message: what is wrong, what was expected and what to do about it.
        rank: the rank within the expert group that is at fault, if one is known.
        ranks: the same where there may be several.
        layer: the name of the MoE layer, if one is known.
        phase: route, count, dispatch, experts or combine, if one applies.
    """

    def __init__(
        self, message: str, *, rank: int | None = None, layer: str | None = None, phase: str | None = None,
        ranks: tuple[int, ...] = (),
    ) -> None:  # fmt: skip
        self.ranks: tuple[int, ...] = ranks if rank is None else (rank,)
        self.rank = self.ranks[0] if len(self.ranks) == 1 else None
        self.layer, self.phase, self.message = layer, phase, message
        who = f"{'rank' if len(self.ranks) == 1 else 'ranks'} {', '.join(map(str, self.ranks))}" if self.ranks else ""
        places = [part for part in (who, f"phase {phase}" if phase is not None else "") if part]
        if layer:
            places.insert(0, f"layer {layer}")
        # As Exception.__init__ does; the compiler of torch 2.11 loses an error that calls it.
        self.args = (f"[{', '.join(places)}] {message}" if places else message,)


class InputError(TrimtabError, ValueError):
    """A value handed in by the caller that cannot be used: a tensor, a file, a folder. Also a ValueError."""


class ConfigError(TrimtabError, ValueError):
    """Sizes, names or options that do not fit together, and packages that are missing for them. Also a ValueError."""


class BackendError(TrimtabError, RuntimeError):
    """A backend, transport or package that was asked for and cannot run here. Also a RuntimeError."""


class DesyncError(TrimtabError, RuntimeError):
    """The ranks of one expert group are not in the same call: other layer, other step or other configuration."""


class PeerLost(TrimtabError, RuntimeError):
    """A rank of the expert group is dead, frozen or cut off. `ranks` names it; `layer` and `phase` say where it was or,
    where no trace of it could be read, where this rank waited for it."""


class PhaseTimeout(TrimtabError, RuntimeError):
    """A rank of the expert group is alive, but did not come to where the others waited for it within the deadline."""


def full_disk(folder: Path) -> str:
    """Words for a message if the disk of `folder` is nearly full or files are limited in size, else "": libraries that
    fail to write then name other reasons."""
    free, most = free_room(folder), _file_limit()
    full = f"; {free / 1e6:.1f} MB are free on the disk of {folder}" if is_full(folder) else ""
    return full + (f"; this process may write files of {most / 1e6:.1f} MB at most (ulimit -f)" if most >= 0 else "")


def is_full(folder: Path) -> bool:
    """True if the disk of `folder` is nearly full."""
    return free_room(folder) < LEAST_FREE


def free_room(folder: Path) -> float:
    """Bytes that are free on the disk where `folder` is, or would be made; infinite where nothing says how many."""
    for place in (folder, *folder.parents):
        with contextlib.suppress(OSError):
            usage = shutil.disk_usage(place)
            return usage.free if usage.total else math.inf
    return math.inf


def _file_limit() -> int:
    """Bytes that this process may write to one file; negative for any number."""
    if sys.platform == "win32":
        return -1
    import resource

    return resource.getrlimit(resource.RLIMIT_FSIZE)[0]


def first_line(error: BaseException, *, typed: bool = False) -> str:
    """The first line of its message, or its type where it has none. typed: the type before it in either case."""
    first = next(iter(str(error).strip().splitlines()), "")
    if typed:
        return f"{type(error).__name__}: {first or 'no message'}"
    return first or type(error).__name__
