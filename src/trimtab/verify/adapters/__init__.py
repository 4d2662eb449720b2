"""Implementations that can be judged, by name. A peer is imported when it is asked for, and only then."""

from __future__ import annotations

import importlib

from trimtab.errors import BackendError, ConfigError
from trimtab.verify.adapters.base import Implementation

NAMES = ("trimtab", "transformers", "torchtitan")


def home_of(name: str) -> tuple[str, str]:
    """(module, class) of an implementation. Raises ConfigError where there is none of that name."""
    module, _, attribute = name.partition(":")
    if attribute:
        return module, attribute
    if name not in NAMES:
        raise ConfigError(f"--impl {name}: must be one of {', '.join(NAMES)}, or MODULE:CLASS for one of your own")
    return f"trimtab.verify.adapters.{name}_impl", "Impl"


def get_implementation(name: str) -> Implementation:
    """The adapter of that name, or `MODULE:CLASS`, an `Implementation` of one's own.

    Raises:
        ConfigError: no such name, module or class. BackendError: a peer can't be imported here; says why.
    """
    module, attribute = home_of(name)
    try:
        home = importlib.import_module(module)
    except (ImportError, AttributeError, ValueError) as error:
        kind = BackendError if name in NAMES else ConfigError
        raise kind(f"--impl {name} can't be judged here: {error}") from error
    try:
        made: Implementation = getattr(home, attribute)()
    except (AttributeError, TypeError) as error:
        raise ConfigError(f"--impl {name}: {module}.{attribute} cannot be made ({error})") from error
    if absent := [part for part in ("name", "refusal", "lacks", "build") if not hasattr(made, part)]:
        raise ConfigError(
            f"--impl {name}: has no {', no '.join(absent)}, which trimtab.verify.adapters.base.Implementation describes"
        )
    return made
