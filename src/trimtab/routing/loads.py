"""How evenly a router loads the experts: counts of all layers in one vector, and what they say.

Legend: T tokens, E experts, K experts per token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trimtab.routing.balance import max_vio
from trimtab.routing.scores import count_ids


class LoadCounts:
    """Tokens per (layer, expert) of this rank, end to end in one vector on the device: no host sync, one all-reduce.

    Args:
        sizes: the number of experts of each layer, by its name.
        device: where the counts live.

    Attributes:
        real: which of the next tokens are no padding, bool [T]; all of them if None.
        top_k: K, once something was counted.
    """

    def __init__(self, sizes: dict[str, int], device: torch.device) -> None:
        self.names, self.sizes = list(sizes), list(sizes.values())
        self.real: Tensor | None = None
        self.top_k = 0
        self._batch = torch.zeros(sum(self.sizes), dtype=torch.int64, device=device)
        self._counts = self._batch.clone()
        self._of = dict(zip(self.names, torch.split(self._batch, self.sizes), strict=True))

    def count(self, name: str, ids_TK: Tensor) -> None:
        """Choices of layer `name`; ids that name no expert of it are not counted."""
        ids, view = ids_TK.detach().long(), self._of[name]
        self.top_k = ids.shape[-1]
        if self.real is not None:
            ids = ids.masked_fill(~self.real.to(ids.device)[:, None], -1)
        view.add_(count_ids(ids, view.numel()).to(view.device))

    def end_batch(self) -> Tensor:
        """This rank's counts of the forward that has ended, int64, all layers end to end."""
        batch = self._batch.clone()
        self._counts += batch
        self._batch.zero_()
        return batch

    def take(self) -> Tensor:
        """This rank's counts of the forwards that have ended since the last call, as `end_batch` gives them."""
        taken = self._counts.clone()
        self._counts.zero_()
        return taken

    def split(self, summed: Sequence[float]) -> dict[str, list[int]]:
        """Tokens per expert by layer name, from the sum of what the ranks' `take` gave."""
        layers, start = {}, 0
        for name, size in zip(self.names, self.sizes, strict=True):
            layers[name] = [round(count) for count in summed[start : start + size]]
            start += size
        return layers


def load_metrics(tokens_per_expert: list[int], dropped: int = 0) -> dict[str, Any]:
    """One layer's record: `max_vio` = (max load - mean load) / mean load, `dead_experts`, `entropy` of the load over
    that of an even one (1 even, 0 all on one expert or on none), `drop_rate` of the slots, `tokens_per_expert`.

    dropped: slots for which an expert had no room; they are in no load.
    """
    total = sum(tokens_per_expert)
    shares = [count / total for count in tokens_per_expert if count]
    most = math.log(max(len(tokens_per_expert), 2))
    return {
        "max_vio": max_vio(torch.tensor(tokens_per_expert)),
        "dead_experts": tokens_per_expert.count(0),
        "entropy": -sum(share * math.log(share) for share in shares) / most + 0.0,  # no -0.0
        "drop_rate": dropped / max(total + dropped, 1),
        "tokens_per_expert": tokens_per_expert,
    }


def load_scalars(layers: dict[str, dict[str, Any]], most_keys: int = 64) -> dict[str, float]:
    """Numbers for a tracker, from records of `load_metrics` by layer: what the worst layer has, the mean over layers,
    and single layers as far as `most_keys` goes; where it does not, some from the first to the last, evenly apart.

    Keys are `loads/NAME` and `loads/NAME/LAYER`, of which there are never more than `most_keys` (at least 5), whatever
    the model. Tokens per expert are not among them. No layers, no numbers. Where experts are copied, `busiest_before`
    and `busiest_after` are those of the worst layer, `replicas` and `replica_bytes` of all, where 9 keys have room.
    """
    if not layers:
        return {}
    records = list(layers.values())
    found = {
        "loads/max_vio": max(record["max_vio"] for record in records),
        "loads/max_vio_mean": sum(record["max_vio"] for record in records) / len(records),
        "loads/dead_experts": float(sum(record["dead_experts"] for record in records)),
        "loads/entropy": min(record["entropy"] for record in records),
        "loads/drop_rate": max(record["drop_rate"] for record in records),
    }
    copied = [record["replicated"] for record in records if "replicated" in record]
    if copied and most_keys >= len(found) + 4:
        found |= {f"loads/{name}": max(one[name] for one in copied) for name in ("busiest_before", "busiest_after")}
        found |= {f"loads/{name}": float(sum(one[name] for one in copied)) for name in ("replicas", "replica_bytes")}
    each = ("max_vio", "dead_experts", "entropy", "drop_rate")
    room = min(max(most_keys - len(found), 0) // len(each), len(records))
    numbers = [round(i * (len(records) - 1) / max(room - 1, 1)) for i in range(room)]
    return found | {f"loads/{name}/{number}": float(records[number][name]) for name in each for number in numbers}
