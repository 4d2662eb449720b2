"""What a rank runs on, and what that adds to its tensors: rounding, memory outside of the allocator, what is kept free.

A plan counts tensors. What the machine adds are the numbers here, which its table names. Those of "cuda" are estimates
of ours; nobody has measured them on a card yet.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from trimtab.optim import newton_schulz
from trimtab.plan.ledger import Ledger
from trimtab.plan.unrun import kernels_without_values

MB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Device:
    """kind: the type of torch's device. twice: parts of names of collectives of which the network holds the larger
    tensor once more meanwhile. rounding: bytes to which the allocator rounds a size up. outside: bytes beside the
    allocator's, in words. free: of all memory, what is to be left to fragmentation. foreach: whether PyTorch's
    optimizers step all parameters of a group at once there, if none is a DTensor. bytes: all its memory, None for as
    much as it takes. flops, link: FLOPs, and bytes that leave it, in a second at the most.
    """

    kind: str
    twice: tuple[str, ...] = ()
    rounding: int = 1
    outside: Mapping[str, int] = field(default_factory=dict)
    free: float = 0.0
    foreach: bool = False
    bytes: float | None = None
    flops: float = 989e12
    link: float = 450e9

    @property
    def room(self) -> float:
        """Bytes for tensors: less what lies outside of the allocator, and what is left to fragmentation."""
        whole = float("inf") if self.bytes is None else self.bytes
        return whole * (1 - self.free) - sum(self.outside.values())

    def ledger(self) -> Ledger:
        """Of tensors without values."""
        return Ledger(self.rounding, partial(kernels_without_values, kind=self.kind), self.holds)

    def holds(self, func: Any, args: tuple[Any, ...]) -> int:
        """Bytes that the network holds inside an operator."""
        return max(args[0].nbytes, args[1].nbytes) if any(name in str(func) for name in self.twice) else 0

    @contextmanager
    def as_there(self) -> Iterator[None]:
        """Have optimizers that are not told otherwise step as they do there, and Muon take as much at once."""
        most = newton_schulz.MOST_ON_CPU if self.kind == "cpu" else newton_schulz.MOST
        with patch.object(newton_schulz, "MOST_ON_CPU", most), register_optimizer_step_pre_hook(self._before_step):
            yield

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        for group in optimizer.param_groups if self.foreach else ():
            told = group.get("fused") or group.get("foreach", True) is not None
            if not told and not any(isinstance(p, DTensor) for p in group["params"]):
                group["foreach"] = True


DEVICES: dict[str, Device] = {
    "cpu": Device(kind="cpu", twice=("_allgather_base_", "_reduce_scatter_base_")),
    "cuda": Device(
        kind="cuda", rounding=512, free=0.08, foreach=True,
        outside={"CUDA context": 500 * MB, "NCCL": 600 * MB, "cuBLAS workspace": 64 * MB},
    ),
}  # fmt: skip
"""By kind."""
