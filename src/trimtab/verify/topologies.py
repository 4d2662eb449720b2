"""How ranks are arranged: the rows of the ledger.

    dense mesh    [dp, tp]     rank = d * tp + t        every data-parallel rank d has tokens of its own; with cp,
                  those of one d // cp have positions of the same sequences
    expert mesh   [edp, etp, ep]   rank = (i * etp + s) * ep + j   the same ranks, folded: rank j of an ep group owns
                  experts j * e …, slice s of their hidden dim

Both are cut from ranks 0 .. ranks - 1, so that tensor-parallel ranks are also expert-parallel ranks.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

from trimtab.dispatch.transports import TRANSPORTS
from trimtab.errors import ConfigError

QUICK = (
    "1r-local", "2r-fsdp-local", "2r-ddp-local", "2r-ep2", "2r-ep2-ddp", "2r-ep2-sharedmemory", "2r-ep2-tp2-sharded",
    "3r-ep3-tp3-replicated-fsdp", "4r-ep4-allgather", "4r-ep4-ordered", "4r-ep2-hsdp", "4r-ep4-tp2-sharded-ddp",
    "2r-ep2-cp2", "2r-ep2-lora", "2r-etp2-local-sharedlora", "2r-ep2-replicas", "4r-ep2-fsdp-replicas-recomputed",
    "2r-ep2-fsdp-nf4-lora", "2r-ep2-ddp-maingrad-delayed", "2r-ep2-ordered-nf4-sharedlora-replicas-reentrant",
    "2r-ep2-cp2-packed", "2r-etp2-local-muon", "2r-ep2-fsdp-panels-lora",
)  # fmt: skip
"""Up to 4 ranks, each axis of the default rows at least once, but for etp."""
DEFAULT = (
    "1r-local", "1r-local-ordered", "1r-fsdp-local", "2r-fsdp-local", "2r-ddp-local", "2r-tp2-sharded-local", "2r-ep2",
    "2r-ep2-ordered", "2r-ep2-*", "2r-ep2-fsdp", "2r-ep2-ddp", "2r-ep2-tp2-replicated", "2r-ep2-tp2-sharded",
    "2r-etp2-local", "3r-ep3", "3r-ddp-local", "3r-ep3-tp3-replicated-fsdp", "3r-ep3-tp3-sharded-allgather-ordered",
    "4r-ep4", "4r-ep4-*", "4r-ep2-tp2-sharded-fsdp-sharedmemory-ordered", "4r-ep4-ordered", "4r-ep2-fsdp", "4r-ep2-ddp",
    "4r-ep2-hsdp", "4r-ep4-fsdp", "4r-ep4-tp2-replicated", "4r-ep4-tp2-sharded-ddp", "4r-ep2-tp2-sharded-fsdp",
    "4r-ep2-tp4-replicated-ordered", "4r-ep2-tp2-replicated-ddp", "4r-ep4-tp4-sharded", "4r-ep2-etp2",
    "4r-ep2-etp2-tp2-sharded-fsdp", "5r-ep5", "5r-ep5-ddp-allgather", "6r-ep3-fsdp", "6r-ep6-tp2-replicated",
    "6r-ep2-tp3-sharded-ddp", "7r-ep7", "8r-ep8", "8r-ep4-fsdp", "8r-ep8-tp2-sharded-fsdp", "8r-ep8-sharedmemory",
    "8r-ep4-tp4-replicated-ddp", "2r-ep2-cp2", "4r-ep4-cp2-fsdp", "4r-ep2-cp2-tp2-sharded-ddp", "2r-ep2-lora",
    "2r-etp2-local-sharedlora", "1r-local-lora", "1r-local-sharedlora", "1r-local-twolora", "2r-ep2-sharedmemory-lora",
    "2r-ep2-ordered-sharedlora", "2r-ep2-fsdp-lora", "2r-etp2-local-lora", "4r-ep2-etp2-lora", "4r-ep2-etp2-sharedlora",
    "4r-ep2-fsdp-twolora", "4r-ep2-ddp-sharedlora", "4r-ep2-hsdp-sharedlora", "4r-ep2-tp2-sharded-fsdp-lora",
    "4r-ep4-tp2-sharded-ddp-lora", "4r-ep2-etp2-tp2-sharded-fsdp-sharedlora", "3r-ep3-tp3-replicated-fsdp-lora",
    "2r-ep2-mergedlora", "4r-ep2-etp2-mergedlora", "1r-local-replicas", "2r-ep2-replicas",
    "2r-ep2-tp2-sharded-ddp-replicas-recomputed", "2r-ep2-sharedmemory-lora-replicas-recomputed", "2r-ep2-autoreplicas",
    "3r-ep3-allgather-replicas", "4r-ep4-sharedmemory-ordered-replicas", "4r-ep2-fsdp-replicas-recomputed",
    "4r-ep2-hsdp-sharedlora-replicas", "4r-ep2-etp2-replicas", "4r-ep4-tp2-replicated-autoreplicas",
    "6r-ep3-cp2-fsdp-replicas", "8r-ep8-replicas", "1r-local-nf4", "1r-local-nf4-lora", "2r-ep2-nf4-sharedlora",
    "2r-etp2-local-int8-lora", "2r-ep2-fsdp-nf4-lora", "2r-ep2-ordered-nf4-sharedlora-replicas-reentrant",
    "4r-ep2-ddp-nf4-sharedlora", "4r-ep2-etp2-tp2-sharded-fsdp-nf4-twolora-replicas", "2r-ep2-frozen",
    "2r-ep2-fsdp-replicas-recomputed-downalone", "1r-local-maingrad-delayed", "2r-ep2-maingrad",
    "2r-etp2-local-maingrad", "2r-ep2-ddp-maingrad-delayed", "1r-local-panels", "2r-ep2-fsdp-panels-lora",
    "3r-fsdp-local-panels", "4r-ep4-tp2-sharded-ddp-panels-twolora",
    "2r-ep2-ordered-panels-sharedlora-replicas-reentrant", "2r-ep2-ddp-panels-lora-maingrad-delayed",
    "2r-ep2-int8-replicas", "4r-ep2-etp2-ddp-maingrad", "2r-ep2-sharedmemory-replicas-rerouted-maingrad",
    "1r-local-lora-delayed", "2r-ep2-nf4-delayed", "2r-ep2-ddp-nf4-lora-maingrad-delayed",
    "2r-ep2-fsdp-sharedlora-delayed", "2r-fsdp-local-delayed", "2r-ep2-delayed", "4r-ep2-etp2-fsdp-delayed",
    "1r-local-packed", "2r-ep2-ddp-packed", "2r-ep2-fsdp-recomputed-packed", "2r-ep2-cp2-packed",
    "2r-ep2-tp2-replicated-packed", "2r-ep2-tp2-sharded-packed", "4r-ep4-cp2-fsdp-packed",
    "4r-ep2-cp2-tp2-sharded-ddp-packed", "4r-ep4-tp2-replicated-ddp-reentrant-packed", "1r-local-muon", "2r-ep2-muon",
    "2r-etp2-local-muon", "2r-ep2-ddp-maingrad-delayed-muon", "3r-fsdp-local-muon", "4r-ep2-etp2-tp2-sharded-fsdp-muon",
    "4r-ep2-hsdp-muon", "4r-ep2-etp2-fsdp-lora-muon", "8r-ep2-fsdp-muon", "2r-ep2-adamw", "3r-fsdp-local-adamw",
    "4r-ep2-ddp-adamw", "4r-ep2-etp2-tp2-sharded-fsdp-adamw", "4r-ep2-hsdp-sharedlora-adamw",
)  # fmt: skip
"""1 to 8 ranks, each way of keeping parameters and of holding tokens; *: each transport but all-to-all."""


@dataclass(frozen=True, kw_only=True)
class Topology:
    """One arrangement.

    ranks: processes that take part. ep: ranks that share the experts. tp: ranks that share the tokens.
    cp: data-parallel ranks with positions of the same sequences; there the layers have a loss per sequence besides.
    etp: ranks that split each expert's hidden dim.
    data: how the parameters are kept over data-parallel ranks; "none" reduces gradients by hand.
    tokens: "own" (tp = 1), "replicated" (each rank of a tp group is given all positions) or "sharded" (its own).
    transport: "local" where ep = 1, else a name in `TRANSPORTS`. combine: as in `Dispatcher`.
    codes: what the experts' weights are quantized to, "panels" where they are packed; "none" where they are weights.
    adapter: "lora", each expert has its own; "sharedlora", all have one; "twolora", two, of which one is active;
        "mergedlora", one that was merged before the first step.
    frozen: "frozen", experts have no gradients; "downalone", their second weight alone has one.
    sink: "maingrad", weight gradients are added to `main_grad`. later: "delayed", they wait for `backward_dw()`.
    replicas: "replicas", hot experts are copied until no rank of a group computes a slot more than the mean;
        "autoreplicas", where a replica takes two slots off the busiest rank.
    rerun: "recomputed", each layer is run again in the backward; "reentrant", by the reentrant checkpoint; "rerouted",
        by one that has its router decide again; "compiled", each layer is compiled.
    packed: "packed", rows are packs of documents; there the layers have a loss per document besides.
    optimizer: "adamw" or "muon", whose step is judged besides: parameters as they are behind it.
    """

    ranks: int
    ep: int = 1
    etp: int = 1
    cp: int = 1
    tp: int = 1
    data: Literal["none", "fsdp", "hsdp", "ddp"] = "none"
    tokens: Literal["own", "replicated", "sharded"] = "own"
    transport: str = "alltoall"
    combine: Literal["sum", "ordered"] = "sum"
    codes: Literal["none", "nf4", "int8", "panels"] = "none"
    adapter: Literal["none", "lora", "sharedlora", "twolora", "mergedlora"] = "none"
    replicas: Literal["none", "replicas", "autoreplicas"] = "none"
    rerun: Literal["none", "recomputed", "reentrant", "rerouted", "compiled"] = "none"
    frozen: Literal["none", "frozen", "downalone"] = "none"
    sink: Literal["none", "maingrad"] = "none"
    later: Literal["none", "delayed"] = "none"
    packed: Literal["none", "packed"] = "none"
    optimizer: Literal["none", "adamw", "muon"] = "none"

    @property
    def dp(self) -> int:
        """Data-parallel ranks: those with tokens of their own."""
        return self.ranks // self.tp

    @property
    def edp(self) -> int:
        """Replicas of each expert."""
        return self.ranks // (self.ep * self.etp)

    @property
    def narrow(self) -> bool:
        """True where nothing depends on the dtype that other rows do not show in each."""
        return (self.replicas, self.sink, self.later, self.frozen, self.packed, self.optimizer) != ("none",) * 6

    @property
    def num_experts(self) -> int:
        """E: two on each rank, four at least."""
        return max(4, 2 * self.ep)

    @property
    def name(self) -> str:
        """Short and unique: what `--only` matches, and `topology_named` reads."""
        sizes = [f"{name}{getattr(self, name)}" for name in ("ep", "etp", "cp", "tp") if getattr(self, name) > 1]
        words = [self.tokens, self.data, self.transport.replace("_", ""), self.combine]
        words += [self.codes, self.adapter, self.replicas, self.rerun, self.frozen, self.sink, self.later, self.packed]
        words += [self.optimizer]
        plain = ("own", "none", "alltoall", "sum")
        return "-".join([f"{self.ranks}r", *sizes, *(word for word in words if word not in plain)])


_WORDS = {name: get_args(kind) for name, kind in get_type_hints(Topology).items() if get_origin(kind) is Literal}
"""Of each axis but sizes and the transport. "none" is of several, and stands in no name."""


def topology_named(name: str) -> Topology:
    """The topology of that name. Raises ConfigError for a word that is none."""
    first, *words = name.split("-")
    given: dict[str, Any] = {"ranks": int(first.removesuffix("r"))}
    transports = {transport.replace("_", ""): transport for transport in TRANSPORTS}
    for word in words:
        if size := re.fullmatch(r"(ep|etp|cp|tp)(\d+)", word):
            given[size[1]] = int(size[2])
        else:
            axis = next((axis for axis, known in _WORDS.items() if word in known), "transport")
            if axis == "transport" and word not in transports and word != "local":
                raise ConfigError(f"{name!r}: no arrangement has the word {word!r}")
            given[axis] = transports.get(word, word)
    return Topology(**given)


def default_topologies() -> list[Topology]:
    """Those of `DEFAULT`."""
    others = [name.replace("_", "") for name in TRANSPORTS if name not in ("alltoall", "auto")]
    return [
        topology_named(name.replace("*", other))
        for name in DEFAULT
        for other in (others if name.endswith("*") else [""])
    ]


def further_topologies() -> list[Topology]:
    """For `--full`: the default ones over ranks that share experts, each with replicated ones, and each recomputed."""
    spread = [t for t in default_topologies() if t.ep > 1 and t.replicas == t.rerun == "none"]
    return [replace(t, replicas="replicas", rerun=rerun) for t in spread for rerun in ("none", "recomputed")]


def topologies_for(world: int) -> list[Topology]:
    """All of `world` ranks at once, for worlds that the default list does not reach: what a cluster is tried with."""
    divisors = [d for d in range(2, world + 1) if world % d == 0]
    made = [topology_named(f"{world}r-ep{ep}{data}") for ep in divisors for data in ("", "-fsdp", "-ddp")]
    return made + [
        topology_named(f"{world}r-ep{world}-tp{tp}-{tokens}-fsdp")
        for tokens in ("replicated", "sharded")
        for tp in divisors if tp <= 8
    ]  # fmt: skip
