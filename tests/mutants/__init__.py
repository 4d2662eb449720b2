"""Known bugs of the field, put into trimtab at run time: what the ledger must catch.

Each mutant is a real bug that users of MoE training met, injected into the code that `trimtab verify` judges.
`mutants.score` says which case catches each.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from fnmatch import fnmatchcase

from mutants import dispatch_bugs, expert_bugs, gradient_bugs, optim_bugs, replication_bugs, routing_bugs
from mutants.patching import Mutant as Mutant
from trimtab.errors import ConfigError

MUTANTS: tuple[Mutant, ...] = (
    *routing_bugs.MUTANTS, *expert_bugs.MUTANTS, *dispatch_bugs.MUTANTS, *gradient_bugs.MUTANTS,
    *replication_bugs.MUTANTS, *optim_bugs.MUTANTS,
)  # fmt: skip


def mutant_named(name: str) -> Mutant:
    """The mutant of that name. Raises ConfigError where there is none."""
    for mutant in MUTANTS:
        if mutant.name == name:
            return mutant
    raise ConfigError(f"no mutant {name!r}: choose one of {', '.join(m.name for m in MUTANTS)}")


def mutants_named(*patterns: str) -> tuple[Mutant, ...]:
    """Mutants by name, glob ("adapter_*") or file ("dispatch_bugs"); once each; all where no pattern is given.

    Raises ConfigError where a pattern fits none.
    """
    found: list[Mutant] = []
    for pattern in patterns:
        files = sys.modules.get(f"{__name__}.{pattern}")
        fits = files.MUTANTS if files else tuple(m for m in MUTANTS if fnmatchcase(m.name, pattern))
        found += fits or (mutant_named(pattern),)
    return tuple(dict.fromkeys(found)) if patterns else MUTANTS


def mutated(name: str) -> AbstractContextManager[None]:
    """Run with one bug put in, in this process alone."""
    return mutant_named(name).applied()
