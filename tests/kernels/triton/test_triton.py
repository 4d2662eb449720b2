"""The Triton kernels: their numbers in Triton's interpreter, and what the compiler makes of them for Hopper.

Nothing here has run on a GPU; tests/gpu does that where there is one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from helpers.ahead import Built, build
from helpers.triton_checks import FALLS
from trimtab.kernels.triton.language import FUSED, Launch, Tiles
from trimtab.kernels.triton.moves import (
    BLOCK,
    CHUNK,
    STEP,
    combine_kernel,
    count_kernel,
    gather_kernel,
    place_kernel,
    scan_kernel,
)
from trimtab.kernels.triton.products import rows_kernel, weight_grad_kernel
from trimtab.kernels.triton.swiglu import gate_up_kernel, hidden_grad_kernel

BF16, F16, F32, I64 = "*bf16", "*fp16", "*fp32", "*i64"
GEMM = {"EVEN": True, "WIDE": False, "EXPERTS": 256}
WGRADS = ("weight_grad", "weight_grad, x gathered", "weight_grad, dy gathered")
GEMMS = ("rows, weighted", "rows, back", "gate_up", "hidden_grad", *WGRADS)
POINTERS = {torch.bfloat16: BF16, torch.float16: F16, torch.float32: F32}
LAUNCH = Launch()
INDEXES = ("slot_R", "row_R", "bag_index")


def gemm(kernel: Any, t: Tiles, types: dict[str, str], constants: dict[str, Any], folder: Path) -> Built:
    shape, options = {"BM": t.m, "BN": t.n, "BK": t.k}, {"num_warps": t.warps, "num_stages": t.stages, **FUSED}
    return build(kernel, types, {**constants, **shape}, options, folder)


def build_named(name: str, dtype: torch.dtype, folder: Path, launch: Launch = LAUNCH) -> Built:
    """The kernels as the layer launches them on rows of `dtype`, weights stored [e, out, in]."""
    X = POINTERS[dtype]
    rows_types = {"x": X, "w": X, "offsets": I64, "y": X}
    rows_types |= dict.fromkeys(("experts", "rows", "contracted", "width", "w_e"), "i32")
    if name == "rows, weighted":  # h W_down: the weight's contracted axis is contiguous
        constants = GEMM | {"SCALE": True, "TAIL": False, "w_a": 1}
        types = rows_types | {"scale": F32, "w_b": "i32"}
        return gemm(rows_kernel, launch.tiles(launch.rows, dtype), types, constants, folder)
    if name == "rows, back":  # d_pre W_up: the weight's output axis is contiguous
        constants = GEMM | {"SCALE": False, "TAIL": True, "scale": None, "w_b": 1}
        types = rows_types | {"w_a": "i32"}
        return gemm(rows_kernel, launch.tiles(launch.across, dtype), types, constants, folder)
    if name == "gate_up":
        types = {"x": X, "index": I64, "up": X, "offsets": I64, "pre": X, "h": X}
        types |= dict.fromkeys(("experts", "rows", "dim", "hidden", "up_e", "up_i"), "i32")
        tiles = launch.tiles(launch.gate_up, dtype)
        return gemm(gate_up_kernel, tiles, types, GEMM | {"KEEP": True, "up_d": 1}, folder)
    if name == "hidden_grad":
        types = {"dy": X, "index": I64, "down": X, "weight": F32, "offsets": I64, "pre": X}
        types |= {"d_pre": X, "hw": X, "dots": F32}
        types |= dict.fromkeys(("experts", "rows", "dim", "hidden", "down_e", "down_d"), "i32")
        return gemm(hidden_grad_kernel, launch.tiles(launch.dh, dtype), types, GEMM | {"down_f": 1}, folder)
    types = {"a": X, "b": X, "offsets": I64, "out": F32}
    types |= dict.fromkeys(("experts", "a_width", "b_width", "out_e", "out_b"), "i32")
    constants = {"ADD": True, "EVEN": True, "WIDE": False, "out_a": 1}
    constants |= {"GATHER_A": name == "weight_grad, x gathered", "GATHER_B": name == "weight_grad, dy gathered"}
    for index, given in (("a_index", constants["GATHER_A"]), ("b_index", constants["GATHER_B"])):
        types |= {index: I64} if given else {}
        constants |= {} if given else {index: None}
    tiles = launch.wgrad if name == "weight_grad" else launch.wgrad_gathered
    return gemm(weight_grad_kernel, launch.tiles(tiles, dtype), types, constants, folder)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", GEMMS)
def test_a_gemm_uses_hopper_s_tensor_cores_and_spills_nothing(name: str, dtype: torch.dtype, folder: Path) -> None:
    built = build_named(name, dtype, folder)
    assert "wgmma.mma_async" in built.ptx
    assert "cp.async" in built.ptx  # tiles are fetched while others are multiplied
    assert (built.spilled, built.fit >= 1) == (0, True), (built.spilled, built.shared, built.registers)


def test_as_many_rows_are_under_way_where_they_are_gathered(folder: Path) -> None:
    plain, *gathered = (build_named(name, torch.bfloat16, folder) for name in WGRADS)
    assert all(plain.shared <= built.shared and built.fit >= 1 for built in gathered), (plain.shared, gathered)


@pytest.mark.parametrize("name", GEMMS)
def test_a_gemm_of_float32_spills_nothing(name: str, folder: Path) -> None:
    built = build_named(name, torch.float32, folder)
    assert "fma.rn.f32" in built.ptx  # no tensor core rounds the operands
    assert "mma." not in built.ptx
    assert "cp.async" in built.ptx
    older = triton.__version__.startswith(("3.7.", "3.8."))  # these keep four registers fewer
    most = 16 if older and name == "weight_grad, x gathered" else 0
    assert (built.spilled <= most, built.fit >= 1) == (True, True), (built.spilled, built.shared)


def others() -> dict[str, tuple[Any, dict[str, str], dict[str, Any], int]]:
    """(kernel, types of its pointers, constants, warps) of what multiplies nothing."""
    power, i32 = {"EXPERTS": 256}, "*i32"
    places = dict.fromkeys(("offsets_e", *INDEXES, "bag_offsets"), I64)
    chunk, moved = power | {"CHUNK": CHUNK}, {"BLOCK": BLOCK}
    return {
        "count": (count_kernel, {"ids": i32, "counts": i32} | dict.fromkeys(INDEXES, I64), chunk, 4),
        "scan": (scan_kernel, {"counts": i32, "counts_e": I64, "offsets_e": I64}, power | {"STEP": STEP}, 8),
        "place": (place_kernel, {"ids": i32, "before": i32} | places, chunk, 8),
        "gather": (gather_kernel, {"x": BF16, "index": I64, "out": BF16}, moved, 4),
        "combine": (combine_kernel, {"rows": BF16, "index": I64, "offsets": I64, "out": BF16}, moved, 4),
    }


def test_what_moves_rows_and_places_slots_compiles_for_hopper(folder: Path) -> None:
    built = {}
    for name, (kernel, pointers, constants, warps) in others().items():
        numbers = set(kernel.arg_names) - set(pointers) - set(constants)
        built[name] = build(
            kernel, pointers | dict.fromkeys(numbers, "i32"), constants, {"num_warps": warps, **FUSED}, folder
        )
    assert {name: b.spilled for name, b in built.items()} == dict.fromkeys(built, 0)
    assert "ld.global.v4" in built["gather"].ptx  # 16 bytes at a time


def test_numbers_in_the_interpreter() -> None:
    tests = Path(__file__).parents[2]
    found = os.pathsep.join([str(tests.parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    env = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": found}
    done = subprocess.run(
        [sys.executable, "-m", "helpers.triton_interpreted"],
        cwd=tests, env=env, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 2 * len(FALLS) + 5
