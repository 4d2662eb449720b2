"""The cases of a run, in an order that spreads over topologies and patterns early, and how one is named.

4r-ep2-tp2-sharded-fsdp/zipf1/float32          topology / pattern / dtype: what --only matches
"""

from __future__ import annotations

import fnmatch
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from trimtab.errors import ConfigError
from trimtab.verify.patterns import PATTERNS, Pattern
from trimtab.verify.topologies import Topology, default_topologies, quick_topologies, topologies_for

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
LEVELS = {"quick": ("float32",), "default": ("float32", "bfloat16"), "full": ("float64", "float32", "bfloat16")}
"""Dtypes of each level."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One cell of the ledger in one dtype."""

    topology: Topology
    pattern: Pattern
    dtype: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.topology.name}/{self.pattern.name}/{self.dtype}"

    @property
    def data_seed(self) -> int:
        """Differs from case to case, and with `--seed`."""
        return zlib.crc32(f"{self.name} {self.seed}".encode())


def plan_cases(level: str, world: int, *, only: Sequence[str] = (), seed: int = 0) -> list[Case]:
    """The cases of a level that fit into `world` ranks, grouped by (topology, dtype), wide ones spread in between.

    only: names or glob patterns (`*ep2*/zipf?/float32`); a plain word matches where it occurs.

    Raises:
        ConfigError: `only` matches nothing.
    """
    topologies = quick_topologies() if level == "quick" else default_topologies()
    if world > max(t.ranks for t in topologies) and level != "quick":
        topologies += topologies_for(world)
    cases = [
        Case(topology=topology, pattern=pattern, dtype=dtype, seed=seed)
        for topology in topologies
        for dtype in LEVELS[level]
        for pattern in PATTERNS
        if topology.ranks <= world
    ]
    for wanted in only:
        glob = wanted if any(c in wanted for c in "*?[") or wanted.count("/") == 2 else f"*{wanted}*"
        cases = [case for case in cases if fnmatch.fnmatchcase(case.name, glob)]
        if not cases:
            raise ConfigError(
                f"--only {wanted}: no case of {world} rank(s) at this level has such a name. A case is named "
                "TOPOLOGY/PATTERN/DTYPE, for example 2r-ep2/zipf1/float32"
            )
    return cases
