"""Names of a package that are imported when they are first used."""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable
from importlib import import_module
from itertools import pairwise
from typing import Any


def lazy_names(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` for `package`, `__name__`. Its names are those that it imports under
    `if TYPE_CHECKING:` as themselves, `from HOME import NAME as NAME`: the one list of them. It is read off the
    compiled module, which an installation without sources has as well."""
    module = sys.modules[package]
    spec: Any = module.__spec__
    there, home, homes = set(vars(module)), "", dict[str, str]()
    for step, after in pairwise(
        i for i in dis.get_instructions(spec.loader.get_code(package)) if i.opname != "EXTENDED_ARG"
    ):
        if step.opname == "IMPORT_NAME":
            home = step.argval
        elif step.opname == "IMPORT_FROM" and after.argval == step.argval not in there:
            homes[step.argval] = home

    def lazily(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if homes[name] == package:
            return import_module(f"{package}.{name}")
        return getattr(import_module(homes[name]), name)

    def names() -> list[str]:
        own = (n for n, value in vars(module).items() if n[:2] == "__" or getattr(value, "__module__", "") == package)
        return sorted({*own, *homes})

    # A star would hide a framework, or a module of torch, behind ours of its name.
    return lazily, names, [name for name, home in homes.items() if home not in (package, "trimtab.integrations")]
