"""A launch that was recorded instead of run, and what the compiler makes of it for a GPU that is not here.

The signature, the constants and the attributes are made by Triton itself, as at a launch on that GPU.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

REGISTERS, RESERVED = 65536, 1024
"""Of a multiprocessor, and the bytes of shared memory that each block loses to the system."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """A GPU. block, together: KiB of shared memory of a block and of a multiprocessor; mma: its products' pattern."""

    major: int
    minor: int
    block: int
    together: int
    mma: str
    gfx: str = ""

    @property
    def target(self) -> GPUTarget:
        if self.gfx:
            return GPUTarget("hip", self.gfx, 64)
        return GPUTarget("cuda", 10 * self.major + self.minor, 32)

    @property
    def properties(self) -> SimpleNamespace:
        """As `torch.cuda.get_device_properties` gives them."""
        return SimpleNamespace(major=self.major, minor=self.minor, multi_processor_count=132)


DEVICES = {
    "sm_80": Device(major=8, minor=0, block=163, together=164, mma=r"mma\.sync"),
    "sm_90": Device(major=9, minor=0, block=227, together=228, mma=r"wgmma\.mma_async"),
    "sm_100": Device(major=10, minor=0, block=227, together=228, mma=r"tcgen05\.mma"),
    "sm_120": Device(major=12, minor=0, block=99, together=100, mma=r"mma\.sync"),
    "gfx942": Device(major=9, minor=4, block=64, together=64, mma=r"v_mfma", gfx="gfx942"),
}


@dataclass(frozen=True)
class Pointer:
    """A tensor of a launch: all that the compiler asks of it."""

    dtype: torch.dtype
    offset: int


@dataclass(frozen=True)
class Launched:
    """A kernel with what it was launched with."""

    kernel: Any
    args: tuple[Any, ...]
    options: Mapping[str, Any]

    @classmethod
    def of(cls, kernel: Any, args: Sequence[Any], options: Mapping[str, Any]) -> Launched:
        held = tuple(Pointer(a.dtype, a.storage_offset()) if isinstance(a, Tensor) else a for a in args)
        return cls(kernel, held, {k: v for k, v in options.items() if k not in ("grid", "warmup")})

    @property
    def name(self) -> str:
        return str(self.kernel.__name__.strip("_"))

    def compiled(self, device: Device) -> Built:
        source, options = self._source(device)
        return Built(triton.compile(source, target=device.target, options=options.__dict__), device)

    def key(self, device: Device) -> str:
        """By this Triton finds a compiled kernel, or compiles one."""
        source, options = self._source(device)
        return f"{self.name} {source.signature} {source.constants} {source.attrs} {options}"

    def _source(self, device: Device) -> tuple[Any, Any]:
        backend = make_backend(device.target)
        bind = create_function_from_signature(self.kernel.signature, self.kernel.params, backend)
        real = [torch.empty(17, dtype=a.dtype)[a.offset % 16 :] if isinstance(a, Pointer) else a for a in self.args]
        bound = bind(*real, **self.options)
        options, signature, constants, attributes = self.kernel._pack_args(backend, dict(self.options), *bound)
        return ASTSource(self.kernel, signature, constants, attributes), options


@dataclass(frozen=True)
class Built:
    """One kernel for one GPU."""

    made: Any
    device: Device

    @property
    def shared(self) -> int:
        """Bytes of a block."""
        return int(self.made.metadata.shared)

    @cached_property
    def text(self) -> str:
        return str(self.made.asm["amdgcn" if self.device.gfx else "ptx"])

    @cached_property
    def numbers(self) -> tuple[int, int]:
        """Registers of a thread, and bytes of it that were spilled."""
        if self.device.gfx:
            found = {k: int(v) for k, v in re.findall(r"\.([av]gpr_count|vgpr_spill_count):\s+(\d+)", self.text)}
            return found["vgpr_count"], 4 * found["vgpr_spill_count"]
        reader = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(self.made.asm["cubin"]), file.flush()
            command = [str(reader), "--dump-resource-usage", file.name]
            told = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
        found = {k: int(v) for k, v in re.findall(r"(REG|STACK|LOCAL):(\d+)", told)}
        return found["REG"], found["STACK"] + found["LOCAL"]

    @property
    def fit(self) -> int:
        """How many blocks a multiprocessor holds; it gives each warp registers by the 256."""
        if self.device.gfx:
            return self.device.together * 1024 // max(self.shared, 1024)
        of_warp = -(-self.numbers[0] * 32 // 256) * 256
        by_memory = self.device.together * 1024 // (self.shared + RESERVED)
        return min(REGISTERS // (of_warp * self.made.metadata.num_warps), by_memory)

    @property
    def products(self) -> int:
        """Instructions of the GPU's tensor cores."""
        return len(re.findall(self.device.mma, self.text))

    @property
    def atomics(self) -> int:
        return len(re.findall(r"tt\.atomic", self.made.asm["ttir"]))

    def narrow(self) -> list[str]:
        """Pointers among the arguments that rows are found behind by 32 bits alone."""
        base, wide, used = dict[str, str](), set[str](), set[str]()
        for line in self.made.asm["ttir"].splitlines():
            if m := re.match(r"\s*(%\S+) = tt\.addptr (%\S+), %\S+ : \S+, (\S+)", line):
                root = base.get(m[2], m[2])
                base[m[1]] = root
                used.add(root)
                if "i64" in m[3]:
                    wide.add(root)
            elif m := re.match(r"\s*(%\S+) = tt\.(?:splat|broadcast|expand_dims) (%\S+)", line):
                base[m[1]] = base.get(m[2], m[2])
        return sorted(used - wide)
