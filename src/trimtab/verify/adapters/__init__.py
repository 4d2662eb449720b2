"""Implementations that can be judged, by name. A peer is imported when it is asked for, and only then."""

from __future__ import annotations

import importlib

from trimtab.errors import BackendError, ConfigError
from trimtab.verify.adapters.base import Implementation

NAMES = ("trimtab", "transformers", "torchtitan")


def get_implementation(name: str) -> Implementation:
    """The adapter of that name.

    Raises:
        ConfigError: no such name. BackendError: the peer's package can't be imported here; says why.
    """
    if name not in NAMES:
        raise ConfigError(f"--impl {name}: must be one of {', '.join(NAMES)}")
    try:
        module = importlib.import_module(f"trimtab.verify.adapters.{name}_impl")
    except ImportError as error:
        raise BackendError(f"--impl {name}: {error}. Install {name} to judge it") from error
    made: Implementation = module.Impl()
    return made
