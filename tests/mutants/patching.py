"""What a mutant is, and patches that undo themselves."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

_ABSENT = object()


class Patches:
    """Attributes replaced in this process, and what they were."""

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, Any]] = []

    def put(self, owner: type | ModuleType, name: str, new: Any) -> None:
        """Replace one attribute of a module or a class. It must exist, so that a renamed one is not patched in vain."""
        getattr(owner, name)
        self._undo.append((owner, name, vars(owner).get(name, _ABSENT)))
        setattr(owner, name, new)

    def wrap(self, owner: type | ModuleType, name: str, make: Callable[[Callable[..., Any]], Any]) -> None:
        """Replace a function by what `make` gives for it: as `put`, a static method stays one."""
        static = isinstance(vars(owner).get(name), staticmethod)
        new = make(getattr(owner, name))
        self.put(owner, name, staticmethod(new) if static else new)

    def around(self, owner: type | ModuleType, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Replace a function by the decorated one, which is handed what it replaces first."""

        def decorate(new: Callable[..., Any]) -> Callable[..., Any]:
            self.wrap(owner, name, lambda original: lambda *args, **named: new(original, *args, **named))
            return new

        return decorate

    def everywhere(self, old: Any, new: Any) -> None:
        """Replace a function in its own module and in all that imported it by name."""
        for module in [m for n, m in sys.modules.items() if n == "trimtab" or n.startswith("trimtab.")]:
            if module.__name__.startswith(__package__ or __name__):
                continue  # a mutant may call what it replaces
            for name in [name for name, value in vars(module).items() if value is old]:
                self.put(module, name, new)

    def undo(self) -> None:
        """All as it was, last first."""
        while self._undo:
            owner, name, old = self._undo.pop()
            if old is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, old)


@dataclass(frozen=True, kw_only=True)
class RanksTest:
    """`run(*args)`, a function of a module, on each of `ranks` ranks: raises where something is wrong."""

    run: Callable[..., object]
    ranks: int
    args: tuple[Any, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.run.__module__}.{self.run.__name__}"


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One known bug as a patch of the code under test.

    says: the bug, and where it was met. look: a pattern of case names that are tried first, since it should show there.
    hangs: whether ranks wait for each other until somebody ends it. test: what fails with it, where it is out of the
    ledger's sight: bits of a sum, or what the ledger's layers do not use.
    """

    name: str
    says: str
    patch: Callable[[Patches], None]
    look: str = "1r-local/*"
    test: RanksTest | None = None
    hangs: bool = False

    @contextmanager
    def applied(self) -> Iterator[None]:
        """With the bug in this process; after, whatever was raised, without it."""
        patches = Patches()
        try:
            self.patch(patches)
            yield
        finally:
            patches.undo()
