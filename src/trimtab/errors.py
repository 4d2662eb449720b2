"""Typed errors: who, where, what was expected, what to do. The ground floor: imports nothing of ours."""

from __future__ import annotations


class TrimtabError(Exception):
    """Base of all errors raised on purpose.

    Args:
        message: what is wrong, what was expected and what to do about it.
        rank: the rank within the expert group that is at fault, if one is known.
        layer: the name of the MoE layer, if one is known.
        phase: route, count, dispatch, experts or combine, if one applies.
    """

    def __init__(
        self, message: str, *, rank: int | None = None, layer: str | None = None, phase: str | None = None
    ) -> None:
        self.rank, self.layer, self.phase = rank, layer, phase
        places = [f"{name} {value}" for name, value in (("rank", rank), ("phase", phase)) if value is not None]
        if layer:
            places.insert(0, f"layer {layer}")
        super().__init__(f"[{', '.join(places)}] {message}" if places else message)


class InputError(TrimtabError, ValueError):
    """A value handed in by the caller cannot be used. Raised before data moves, on every rank that could hang."""


class ConfigError(TrimtabError, ValueError):
    """Sizes, names or options that do not fit together."""


class BackendError(TrimtabError, RuntimeError):
    """A backend or transport that was asked for by name cannot run here."""


class DesyncError(TrimtabError, RuntimeError):
    """The ranks of one expert group are not in the same call: other layer, other step or other configuration."""
