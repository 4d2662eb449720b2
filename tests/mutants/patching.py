"""What a mutant is: a known bug as other text of the functions that it changes, and how it is put in and taken out."""

from __future__ import annotations

import importlib
import inspect
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any, NamedTuple


class Edit(NamedTuple):
    """`old` becomes `new` in the source of a function, `where`: "dispatch.route:Combine.backward". It stands there
    once, so that code which has changed is not edited in vain."""

    where: str
    old: str
    new: str


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
    """One known bug.

    says: the bug, and where it was met. look: a pattern of case names that are tried first, since it should show there.
    hangs: whether ranks wait for each other until somebody ends it. test: what fails with it, where it is out of the
    ledger's sight: the bits of a sum.
    """

    name: str
    says: str
    edits: tuple[Edit, ...]
    look: str
    test: RanksTest | None
    hangs: bool

    @contextmanager
    def applied(self) -> Iterator[None]:
        """With the bug in this process, whoever has imported the functions; after, whatever was raised, without it."""
        kept: list[tuple[FunctionType, CodeType]] = []
        try:
            for where in dict.fromkeys(edit.where for edit in self.edits):
                function = function_at(where)
                kept.append((function, function.__code__))
                function.__code__ = _edited(function, [edit for edit in self.edits if edit.where == where])
            yield
        finally:
            for function, code in kept:
                function.__code__ = code


def bug(
    name: str, says: str, *edits: Edit, look: str = "1r-local/*", test: RanksTest | None = None, hangs: bool = False
) -> Mutant:
    """A row of a table of mutants."""
    return Mutant(name=name, says=says, edits=edits, look=look, test=test, hangs=hangs)


def function_at(where: str) -> FunctionType:
    """The function as it was defined, whatever decorates it."""
    module, _, path = where.partition(":")
    found: Any = importlib.import_module(f"trimtab.{module}")
    for name in path.split("."):
        found = inspect.getattr_static(found, name)
    function: FunctionType = defined(found)
    return function


def defined(found: Any) -> Any:
    """What a method, a property or a decorator was made of."""
    found = getattr(found, "__func__", None) or getattr(found, "fget", None) or found
    return inspect.unwrap(found) if callable(found) else found


def _edited(function: FunctionType, edits: list[Edit]) -> CodeType:
    source, before = textwrap.dedent(inspect.getsource(function)), function.__code__
    for where, old, new in edits:
        if source.count(old) != 1:
            raise NameError(f"{old!r} stands {source.count(old)} times in trimtab.{where}")
        source = source.replace(old, new)
    free = "".join(f"    {name} = None\n" for name in before.co_freevars)
    made = compile(f"def around():\n{free}{textwrap.indent(source, '    ')}", before.co_filename, "exec")
    (code,) = (c for c in _within(_within(made)[0]) if c.co_name == before.co_name)
    return code.replace(co_qualname=before.co_qualname, co_firstlineno=before.co_firstlineno)


def _within(code: CodeType) -> list[CodeType]:
    return [const for const in code.co_consts if isinstance(const, CodeType)]
