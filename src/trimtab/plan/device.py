"""What a kind of device, and its network, adds to the tensors: rounding, memory outside of the allocator, what is free.

A plan counts tensors. What the machine adds are these numbers, which its table names; those of GPUs are from their
documentation and from reports, and are measured once per card by `make gpu-bench`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

MB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Device:
    """rounding: bytes to which the allocator rounds a size up. outside: bytes beside the allocator's, in words.
    free: of all memory, what is to be left to fragmentation. copied: parts of names of collectives of which the network
    holds the input once more while they run. foreach: whether PyTorch's optimizers step all parameters at once there,
    unless they are told otherwise.
    """

    rounding: int = 1
    outside: Mapping[str, int] = field(default_factory=dict)
    free: float = 0.0
    copied: tuple[str, ...] = ()
    foreach: bool = False

    @property
    def added(self) -> int:
        return sum(self.outside.values())

    def holds(self, func: Any, args: tuple[Any, ...]) -> int:
        """Bytes that the network holds inside an operator."""
        if not any(name in str(func) for name in self.copied):
            return 0
        given: Tensor = args[1]  # behind the output
        return given.nbytes


DEVICES: dict[str, Device] = {
    "cpu": Device(copied=("_reduce_scatter_base_",)),
    "cuda": Device(
        rounding=512,
        outside={"CUDA context": 500 * MB, "NCCL": 600 * MB, "cuBLAS workspace": 64 * MB},
        free=0.08,
        foreach=True,
    ),
}
"""By the type of torch's device; "cpu" with Gloo, whose reduce-scatter copies its input, "cuda" with NCCL."""
