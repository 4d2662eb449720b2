"""Names of a package that are imported when they are first used."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from typing import Any


def lazy_names(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` for `package`, `__name__`. Its names are those that its source imports
    under `if TYPE_CHECKING:` as themselves, `from HOME import NAME as NAME`: the one list of them."""
    spec: Any = sys.modules[package].__spec__
    tree = ast.parse(spec.loader.get_source(package))
    blocks = (node.body for node in tree.body if isinstance(node, ast.If))
    imports = (node for body in blocks for node in body if isinstance(node, ast.ImportFrom))
    homes = {alias.name: str(node.module) for node in imports for alias in node.names if alias.name == alias.asname}

    def lazily(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(__import__(homes[name], fromlist=[name]), name)

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes})

    # A star would hide a framework behind our module of its name.
    return lazily, names, [name for name, home in homes.items() if home != "trimtab.integrations"]
