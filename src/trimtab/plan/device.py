"""What a rank runs on, and what that adds to its tensors: rounding, memory outside of the allocator, what is kept free.

A plan counts tensors. What the machine adds are the numbers here, which its table names. Those of "cuda" are estimates
of ours; nobody has measured them on a card yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Device:
    """kind: the type of torch's device. rounding: bytes to which the allocator rounds a size up. outside: bytes beside
    the allocator's, in words. free: of all memory, what is to be left to fragmentation. copied: part of the name of the
    collective of which the network holds the input once more while it runs. foreach: whether PyTorch's optimizers step
    all parameters at once there, unless they are told otherwise. bytes: all its memory, None for as much as it takes.
    flops, link: FLOPs, and bytes that leave it, in a second at the most.
    """

    kind: str
    rounding: int = 1
    outside: Mapping[str, int] = field(default_factory=dict)
    free: float = 0.0
    copied: str | None = None
    foreach: bool = False
    bytes: float | None = None
    flops: float = 989e12
    link: float = 450e9

    @property
    def room(self) -> float:
        """Bytes for tensors: less what lies outside of the allocator, and what is left to fragmentation."""
        whole = float("inf") if self.bytes is None else self.bytes
        return whole * (1 - self.free) - sum(self.outside.values())

    def holds(self, func: Any, args: tuple[Any, ...]) -> int:
        """Bytes that the network holds inside an operator."""
        return args[1].nbytes if self.copied and self.copied in str(func) else 0  # the input is behind the output


DEVICES: dict[str, Device] = {
    "cpu": Device(kind="cpu", copied="_reduce_scatter_base_"),
    "cuda": Device(
        kind="cuda",
        rounding=512,
        outside={"CUDA context": 500 * MB, "NCCL": 600 * MB, "cuBLAS workspace": 64 * MB},
        free=0.08,
        foreach=True,
    ),
}
"""By kind: "cpu" with Gloo, whose reduce-scatter holds its input twice, "cuda" with NCCL."""
