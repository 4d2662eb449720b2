"""Parts that peers share: the reasons why one is not asked for a case, and a stack of their layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from torch import Tensor, nn

from trimtab.verify.patterns import Pattern
from trimtab.verify.topologies import Topology


def reason(lacking: Mapping[str, bool], t: Topology, pattern: Pattern, *, grouped_mm: bool = True) -> str | None:
    """The first reason that holds, of the peer's own and of those that peers share; None if it can be asked."""
    shared = {
        f"it has no transport {t.transport}": t.transport not in ("local", "alltoall"),
        "it has no ordered combine": t.combine == "ordered",
        "its experts have no adapters of their own": t.adapter != "none",
        "it copies no experts for one call": t.replicas != "none",
        "it is not asked to run layers again": t.rerun != "none",
        "its experts are not asked to be codes": t.codes != "none",
        "it is not asked where gradients of weights go": (t.sink, t.later) != ("none", "none"),
        "it does not split experts over etp as well as over ep": t.etp > 1,
        "its MoE takes no token mask: padding is routed as any token is": pattern.masked > 0,
        "it has no dropped slots: each slot holds an expert's id": pattern.name in ("dropped", "all_dropped"),
        "its ids come from its own top-k, so none is out of range": pattern.spoil == "id",
        "it leaves open which of equal scores is chosen": pattern.ties,
        "it promises no error for a NaN, which goes through as in PyTorch": pattern.spoil == "nan",
        "its grouped_mm takes rows of multiples of 16 bytes alone": pattern.odd and grouped_mm,
    }
    return next((said for said, holds in {**lacking, **shared}.items() if holds), None)


def residual(layers: Iterable[nn.Module], h: Tensor, run: Callable[[nn.Module, Tensor], Tensor]) -> Tensor:
    """The layers in turn, h = h + layer(h) between them; the last one's own output."""
    y = h
    for i, layer in enumerate(layers):
        h = h + y if i else h
        y = run(layer, h)
    return y
