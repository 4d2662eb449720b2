"""transformers, for commands that cannot do without it."""

from __future__ import annotations

import importlib
from types import ModuleType

from trimtab.errors import ConfigError


def import_transformers(who: str) -> ModuleType:
    """The module. Raises ConfigError where it cannot be imported: `who` needs it, and how to get it."""
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise ConfigError(f"{who} needs transformers (pip install 'trimtab[hf]'): {error}") from error
