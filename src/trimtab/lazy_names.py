"""Names of a package that are imported when they are first used."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(
    package: str, homes: Mapping[str, str], modules: Mapping[str, str] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` for `package`.

    Args:
        package: its full name, `__name__`.
        homes: for each name, the module that defines it.
        modules: for each name, the module that it stands for.
    """
    places = modules or {}

    def lazily(name: str) -> Any:
        if name in places:
            return importlib.import_module(places[name])
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(homes[name]), name)

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes, *places})

    return lazily, names
