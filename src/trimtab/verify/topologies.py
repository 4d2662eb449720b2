"""How ranks are arranged: the rows of the ledger.

    dense mesh    [dp, tp]     rank = d * tp + t        every data-parallel rank d has tokens of its own; with cp,
                  those of one d // cp have positions of the same sequences
    expert mesh   [edp, etp, ep]   rank = (i * etp + s) * ep + j   the same ranks, folded: rank j of an ep group owns
                  experts j * e …, slice s of their hidden dim

Both are cut from ranks 0 .. ranks - 1, so that tensor-parallel ranks are also expert-parallel ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Data = Literal["none", "fsdp", "hsdp", "ddp"]
Tokens = Literal["own", "replicated", "sharded"]


@dataclass(frozen=True, kw_only=True)
class Topology:
    """One arrangement.

    ranks: processes that take part. ep: ranks that share the experts. tp: ranks that share the tokens.
    cp: data-parallel ranks with positions of the same sequences; there the layers have a loss per sequence besides.
    data: how the parameters are kept over data-parallel ranks; "none" reduces gradients by hand.
    tokens: "own" (tp = 1), "replicated" (each rank of a tp group is given all positions) or "sharded" (its own).
    transport: "local" where ep = 1, else a name in `TRANSPORTS`. combine: as in `Dispatcher`.
    etp: ranks that split each expert's hidden dim.
    """

    ranks: int
    ep: int = 1
    tp: int = 1
    cp: int = 1
    etp: int = 1
    data: Data = "none"
    tokens: Tokens = "own"
    transport: str = "alltoall"
    combine: Literal["sum", "ordered"] = "sum"

    @property
    def dp(self) -> int:
        """Data-parallel ranks: those with tokens of their own."""
        return self.ranks // self.tp

    @property
    def edp(self) -> int:
        """Copies of each expert."""
        return self.ranks // (self.ep * self.etp)

    @property
    def num_experts(self) -> int:
        """E: two on each rank, four at least."""
        return max(4, 2 * self.ep)

    @property
    def name(self) -> str:
        """Short and unique: what `--only` matches."""
        sizes = [("ep", self.ep), ("etp", self.etp), ("cp", self.cp), ("tp", self.tp)]
        parts = [f"{self.ranks}r", *(f"{name}{size}" for name, size in sizes if size > 1)]
        parts += [str(part) for part in (self.tokens, self.data) if part not in ("own", "none")]
        parts += [self.transport.replace("_", "")] if self.transport != "alltoall" else []
        return "-".join([*parts, "ordered"] if self.combine == "ordered" else parts)


def default_topologies() -> list[Topology]:
    """1 to 8 ranks, each way of keeping parameters, each way of holding tokens, each transport."""
    from trimtab.dispatch.transports import TRANSPORTS  # here: commands start without torch

    t = Topology
    others = [name for name in TRANSPORTS if name not in ("alltoall", "auto")]
    local: dict[str, Any] = {"transport": "local"}
    return [
        t(ranks=1, **local), t(ranks=1, combine="ordered", **local), t(ranks=1, data="fsdp", **local),
        t(ranks=2, data="fsdp", **local), t(ranks=2, data="ddp", **local),
        t(ranks=2, tp=2, tokens="sharded", **local), t(ranks=2, ep=2), t(ranks=2, ep=2, combine="ordered"),
        *(t(ranks=2, ep=2, transport=name) for name in others),
        t(ranks=2, ep=2, data="fsdp"), t(ranks=2, ep=2, data="ddp"),
        t(ranks=2, ep=2, tp=2, tokens="replicated"), t(ranks=2, ep=2, tp=2, tokens="sharded"),
        t(ranks=2, etp=2, **local), t(ranks=3, ep=3), t(ranks=3, data="ddp", **local),
        t(ranks=3, ep=3, tp=3, tokens="replicated", data="fsdp"),
        t(ranks=3, ep=3, tp=3, tokens="sharded", transport="allgather", combine="ordered"), t(ranks=4, ep=4),
        *(t(ranks=4, ep=4, transport=name) for name in others),
        t(ranks=4, ep=2, tp=2, tokens="sharded", data="fsdp", transport="shared_memory", combine="ordered"),
        t(ranks=4, ep=4, combine="ordered"), t(ranks=4, ep=2, data="fsdp"),
        t(ranks=4, ep=2, data="ddp"), t(ranks=4, ep=2, data="hsdp"), t(ranks=4, ep=4, data="fsdp"),
        t(ranks=4, ep=4, tp=2, tokens="replicated"), t(ranks=4, ep=4, tp=2, tokens="sharded", data="ddp"),
        t(ranks=4, ep=2, tp=2, tokens="sharded", data="fsdp"),
        t(ranks=4, ep=2, tp=4, tokens="replicated", combine="ordered"),
        t(ranks=4, ep=2, tp=2, tokens="replicated", data="ddp"), t(ranks=4, ep=4, tp=4, tokens="sharded"),
        t(ranks=4, ep=2, etp=2), t(ranks=4, ep=2, etp=2, tp=2, tokens="sharded", data="fsdp"), t(ranks=5, ep=5),
        t(ranks=5, ep=5, transport="allgather", data="ddp"), t(ranks=6, ep=3, data="fsdp"),
        t(ranks=6, ep=6, tp=2, tokens="replicated"), t(ranks=6, ep=2, tp=3, tokens="sharded", data="ddp"),
        t(ranks=7, ep=7), t(ranks=8, ep=8), t(ranks=8, ep=4, data="fsdp"),
        t(ranks=8, ep=8, tp=2, tokens="sharded", data="fsdp"), t(ranks=8, ep=8, transport="shared_memory"),
        t(ranks=8, ep=4, tp=4, tokens="replicated", data="ddp"), t(ranks=2, ep=2, cp=2),
        t(ranks=4, ep=4, cp=2, data="fsdp"), t(ranks=4, ep=2, cp=2, tp=2, tokens="sharded", data="ddp"),
    ]  # fmt: skip


def quick_topologies() -> list[Topology]:
    """Up to 4 ranks, each axis of the default list at least once, but for etp."""
    names = (
        "1r-local", "2r-fsdp-local", "2r-ddp-local", "2r-ep2", "2r-ep2-ddp", "2r-ep2-sharedmemory",
        "2r-ep2-tp2-sharded", "3r-ep3-tp3-replicated-fsdp", "4r-ep4-allgather", "4r-ep4-ordered", "4r-ep2-hsdp",
        "4r-ep4-tp2-sharded-ddp", "2r-ep2-cp2",
    )  # fmt: skip
    by_name = {topology.name: topology for topology in default_topologies()}
    return [by_name[name] for name in names]


def topologies_for(world: int) -> list[Topology]:
    """All of `world` ranks at once, for worlds that the default list does not reach: what a cluster is tried with."""
    divisors = [d for d in range(2, world + 1) if world % d == 0]
    made = [Topology(ranks=world, ep=ep, data=data) for ep in divisors for data in ("none", "fsdp", "ddp")]
    tensor = [d for d in divisors if d <= 8]
    for tokens in ("replicated", "sharded"):
        made += [Topology(ranks=world, ep=max(divisors), tp=tp, tokens=tokens, data="fsdp") for tp in tensor]
    return made
