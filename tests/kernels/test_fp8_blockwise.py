"""The blockwise FP8 kernels: their numbers in Triton's interpreter, and what the compiler makes of them for Hopper.

Nothing here has run on a GPU; tests/gpu does that where there is one.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from helpers.interpreted import SIZES
from trimtab.kernels.fp8_blockwise import BLOCK, groups_kernel, rows_kernel
from trimtab.kernels.triton.language import FUSED

SHARED_LIMIT = 227 * 1024  # bytes a block can have on compute capability 9.0
OPTIONS = {"num_warps": 8, "num_stages": 3, **FUSED}
TYPES = {"x": "*fp8e4nv", "w": "*fp8e4nv", "dy": "*fp8e4nv", "y": "*bf16", "dw": "*bf16", "offsets": "*i64"}
TYPES |= dict.fromkeys(("x_scale", "w_scale", "dy_scale"), "*fp32")
TYPES |= dict.fromkeys(("experts", "n", "c", "a_width", "b_width", "rows"), "i32")


def test_numbers_in_the_interpreter() -> None:
    tests, env = Path(__file__).parents[1], os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "helpers.interpreted"],
        cwd=tests, env=env, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 1 + 3 * len(SIZES) + 2


@pytest.mark.parametrize(("kernel", "constants"), [(rows_kernel, {"EXPERTS": 64}), (groups_kernel, {})])
def test_hopper_code_uses_its_tensor_cores_and_spills_nothing(
    kernel: Any, constants: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    constants = {**constants, "BLOCK": BLOCK, "WIDE": False}
    signature = {name: TYPES.get(name, "constexpr") for name in kernel.arg_names}
    looked_at = [p for p in kernel.params if p.name in TYPES and not p.do_not_specialize]
    aligned = {(p.num,): [["tt.divisibility", 16]] for p in looked_at}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=OPTIONS)
    ptx = built.asm["ptx"]
    assert "wgmma.mma_async" in ptx
    assert "e4m3.e4m3" in ptx
    assert built.metadata.shared <= SHARED_LIMIT
    cubin, reader = tmp_path / "kernel.cubin", Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    cubin.write_bytes(built.asm["cubin"])
    command = [str(reader), "--dump-resource-usage", str(cubin)]
    told = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert re.findall(r"STACK:(\d+)", told) == ["0"], told
    assert re.findall(r"LOCAL:(\d+)", told) == ["0"], told
