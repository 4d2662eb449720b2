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
from trimtab.verify import topologies as rows
from trimtab.verify.patterns import PATTERNS, Pattern

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
LEVELS = {"quick": ("float32",), "default": ("float32", "bfloat16"), "full": tuple(DTYPES), "proof": ("float64",)}
"""Dtypes of each level. "default" runs the quick topologies in float64 besides, and `narrow` ones as "proof", as "full"
runs `further_topologies` that are no default ones."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One cell of the ledger in one dtype."""

    topology: rows.Topology
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
    globs = [name if name.count("/") == 2 or set(name) & set("*?[") else f"*{name}*" for name in only]
    exact = any(not set(glob) & set("*?[") for glob in globs)
    quick = level == "quick" and not exact
    topologies = [rows.topology_named(name) for name in rows.QUICK] if quick else rows.default_topologies()
    if world > max(t.ranks for t in topologies) and level != "quick":
        topologies += rows.topologies_for(world)
    dtypes = {topology: _dtypes("full" if exact else level, topology) for topology in topologies}
    if level == "full" or exact:
        more, own = "full" if exact else "proof", rows.further_topologies()
        dtypes |= {topology: _dtypes(more, topology) for topology in own if topology not in dtypes}
    cases = [
        Case(topology=topology, pattern=pattern, dtype=dtype, seed=seed)
        for topology, own in dtypes.items()
        for dtype in own
        for pattern in PATTERNS if topology.ranks <= world
    ]  # fmt: skip
    for name, glob in zip(only, globs, strict=True):
        if not fnmatch.filter([case.name for case in cases], glob):
            raise ConfigError(
                f"--only {name}: no case of up to {world} rank(s) at this level has such a name. A case is named "
                "TOPOLOGY/PATTERN/DTYPE, for example 2r-ep2/zipf1/float32"
            )
    return [c for c in cases if not globs or any(fnmatch.fnmatchcase(c.name, glob) for glob in globs)]


def _dtypes(level: str, t: rows.Topology) -> tuple[str, ...]:
    own = LEVELS[level if level != "default" else "full" if t.name in rows.QUICK else "proof" if t.narrow else level]
    return LEVELS["default"][: len(own)] if "panels" in t.name else own  # panels hold no float64
