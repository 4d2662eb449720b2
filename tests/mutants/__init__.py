"""Known bugs of the field, put into trimtab at run time: what the ledger must catch.

Each mutant is a real bug that users of MoE training met, injected into the code that `trimtab verify` judges.
`mutants.score` says which case catches each.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from mutants import (
    compiled_bugs,
    dispatch_bugs,
    expert_bugs,
    gradient_bugs,
    input_bugs,
    routing_bugs,
    token_bugs,
)
from mutants.patching import Mutant as Mutant
from trimtab.errors import ConfigError

MUTANTS: tuple[Mutant, ...] = (
    *routing_bugs.MUTANTS, *input_bugs.MUTANTS, *expert_bugs.MUTANTS, *dispatch_bugs.MUTANTS, *token_bugs.MUTANTS,
    *gradient_bugs.MUTANTS, *compiled_bugs.MUTANTS,
)  # fmt: skip


def mutant_named(name: str) -> Mutant:
    """The mutant of that name.

    Raises:
        ConfigError: there is none.
    """
    for mutant in MUTANTS:
        if mutant.name == name:
            return mutant
    raise ConfigError(f"no mutant {name!r}: choose one of {', '.join(m.name for m in MUTANTS)}")


@contextlib.contextmanager
def mutated(name: str | None) -> Iterator[None]:
    """Run with one bug put in, or with none. In this process alone.

    Raises:
        ConfigError: no mutant of that name.
    """
    if name is None:
        yield
        return
    with mutant_named(name).applied():
        yield
