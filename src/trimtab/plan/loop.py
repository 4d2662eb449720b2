"""What a loop of one's own holds on one rank of many, without values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from trimtab.dispatch.options import COPY_COST, ExchangeOptions, Replication
from trimtab.dispatch.planned import planned
from trimtab.plan.buckets import ddp_without_values
from trimtab.plan.device import DEVICES
from trimtab.plan.ledger import FORWARD
from trimtab.plan.traffic import Traffic
from trimtab.plan.without_values import World


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """peak: the most bytes of tensors that were alive. parts: of these, by what they were for. biggest: their largest
    storages, each with its size, operator and category.
    """

    peak: int
    parts: dict[str, int]
    biggest: list[tuple[int, str, str]]


def plan_memory(
    build: Callable[[], nn.Module], loop: Callable[[Any], object], *, ranks: int = 1, rank: int = 0, skew: str = "even",
    replicate_experts: Replication = "off", copy_cost: int = COPY_COST, device: str = "cuda",
) -> MemoryPlan:  # fmt: skip
    """What `loop(model)` holds on one of `ranks` ranks, of which no other is there, without values.

    Args:
        build: the model, its parameters on the meta device, spread over meshes as in the run, on device type "cpu". Its
            layers exchange over `ExpertParallel(transport="planned")`, or another integration's `transport="planned"`.
        loop: two steps or more of the training loop, with its optimizer, since the first one has no moments yet. The
            tensors that it makes have no values, and it reads none.
        skew: how tokens fall, one of `trimtab.plan.traffic.SKEWS`, or the path of a run's metrics.jsonl.
        replicate_experts, copy_cost: as the layers have them.
        device: "cuda", or "cpu" with Gloo: its rounding, its network, the kernels that layers' names stand for there.

    Raises:
        ConfigError: there is a process group already; the skew is none.
    """
    options = ExchangeOptions(replicate_experts=replicate_experts, copy_cost=copy_cost)
    kind, traffic = DEVICES[device], Traffic(skew=skew, replication=options.replication)
    of_rank, exchange = World(ranks, rank), planned(traffic, rounds=device == "cpu", bounds=skew == "worst")
    ledger = kind.ledger()
    with of_rank as world, exchange, kind.as_there(), ddp_without_values(world, ledger):
        model = build()
        world.fill(model)
        model.register_forward_pre_hook(lambda *_: setattr(ledger, "phase", FORWARD))
        model.register_forward_hook(lambda *_: setattr(ledger, "phase", "behind it"))
        with world.mode, ledger:
            ledger.know([*model.parameters(), *model.buffers()], "weights")
            loop(model)
    peak, at = ledger.peak()
    biggest = [(storage.size, storage.operator, ledger.category(storage)) for storage in ledger.biggest(at)]
    return MemoryPlan(peak=peak, parts=ledger.categories(at), biggest=biggest)
