"""Known bugs of the field, put into trimtab at run time: what the ledger must catch.

Each mutant is a real bug that users of MoE training met, injected into the code that `trimtab verify` judges.
`mutants.score` says which case catches each.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

from mutants import (
    adapter_bugs,
    replication_bugs,
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
    *gradient_bugs.MUTANTS, *compiled_bugs.MUTANTS, *adapter_bugs.MUTANTS, *replication_bugs.MUTANTS,
)  # fmt: skip


def mutant_named(name: str) -> Mutant:
    """The mutant of that name. Raises ConfigError where there is none."""
    for mutant in MUTANTS:
        if mutant.name == name:
            return mutant
    raise ConfigError(f"no mutant {name!r}: choose one of {', '.join(m.name for m in MUTANTS)}")


def mutated(name: str) -> AbstractContextManager[None]:
    """Run with one bug put in, in this process alone."""
    return mutant_named(name).applied()
