"""What the compiler makes of a kernel for compute capability 9.0, without a device.

Legend of a signature: pointers and 64-bit strides as a launch gives them, aligned to 16 as PyTorch's memory is.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

ALIGNED = [["tt.divisibility", 16]]
REGISTERS, SHARED, RESERVED = 65536, 228 * 1024, 1024
"""Of a multiprocessor: registers, bytes of shared memory, and how many of them each block loses to the system."""


@dataclass(frozen=True)
class Built:
    """One kernel's assembly and what a block of it takes: bytes of shared memory, warps, and a thread's registers and
    spilled bytes."""

    ptx: str
    shared: int
    warps: int
    registers: int
    spilled: int

    @property
    def fit(self) -> int:
        """How many blocks a multiprocessor holds; it gives each warp registers by the 256."""
        of_warp = -(-self.registers * 32 // 256) * 256
        return min(REGISTERS // (of_warp * self.warps), SHARED // (self.shared + RESERVED))


def build(
    kernel: Any, types: dict[str, str], constants: dict[str, Any], options: dict[str, int], folder: Path
) -> Built:  # fmt: skip
    """Compile for Hopper, as a launch does.

    types: of the arguments that are no constants. Those integers that a launch looks at are multiples of 16.
    """
    known = set(types) | set(constants)
    assert known == set(kernel.arg_names), known ^ set(kernel.arg_names)
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    aligned = {(p.num,): ALIGNED for p in kernel.params if p.name in types and not p.do_not_specialize}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    cubin, reader = folder / "kernel.cubin", Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    cubin.write_bytes(built.asm["cubin"])
    command = [str(reader), "--dump-resource-usage", str(cubin)]
    told = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    numbers = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", told)}
    return Built(
        ptx=built.asm["ptx"], shared=built.metadata.shared, warps=built.metadata.num_warps, registers=numbers["REG"],
        spilled=numbers["STACK"] + numbers["LOCAL"],
    )  # fmt: skip
