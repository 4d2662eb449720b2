"""The cases of a run, and how one is named.

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
"""Dtypes of each level. "default" runs the quick topologies in float64 besides."""


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
    """The cases of a level that fit into `world` ranks, by topology, dtype and pattern.

    only: whole names, of any level; glob patterns (`*ep2*/zipf?/float32`); or words that occur in the name. A case
        that one of them matches is taken.

    Raises:
        ConfigError: one of `only` matches nothing.
    """
    exact = {name for name in only if name.count("/") == 2 and not set(name) & set("*?[")}
    topologies = quick_topologies() if level == "quick" and not exact else default_topologies()
    if world > max(t.ranks for t in topologies) and level != "quick":
        topologies += topologies_for(world)
    closest = {t.name for t in quick_topologies()} if level == "default" else set()
    cases = [
        Case(topology=topology, pattern=pattern, dtype=dtype, seed=seed)
        for topology in topologies
        for dtype in (LEVELS["full"] if exact or topology.name in closest else LEVELS[level])
        for pattern in PATTERNS
        if topology.ranks <= world
    ]
    globs = {name: name if set(name) & set("*?[") or name in exact else f"*{name}*" for name in only}
    for name, glob in globs.items():
        if not any(fnmatch.fnmatchcase(case.name, glob) for case in cases):
            raise ConfigError(
                f"--only {name}: no case of up to {world} rank(s) at this level has such a name. A case is named "
                "TOPOLOGY/PATTERN/DTYPE, for example 2r-ep2/zipf1/float32"
            )
    if globs:
        cases = [case for case in cases if any(fnmatch.fnmatchcase(case.name, glob) for glob in globs.values())]
    return cases
