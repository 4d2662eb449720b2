"""The kernels that layers of real models launch, as compilers make them for five GPUs: a part of the table that
`make gpu-table` prints."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gpu_evidence.compiled import GPUS, faults_of
from gpu_evidence.test_fake_cuda import needs_guard
from helpers.commands import run_python, with_tests

pytestmark = [*needs_guard, pytest.mark.xdist_group("compiled")]
CASES = (
    "sm_90/qwen3", "sm_90/qwen3/float16", "sm_90/qwen3/float32", "sm_90/next", "sm_90/half/float32",
    *(f"{gpu}/half" for gpu in GPUS if gpu != "sm_90"),
)  # fmt: skip
GEMMS = {"gate_up", "hidden_grad", "rows", "weight_grad"}
GOOD = {
    "gpu": "sm_90", "layer": "half", "dtype": "bfloat16", "kernel": "rows", "tile": "128x256x64",
    "spilled": 64, "fit": 1, "products": 4, "atomics": 0, "narrow": ["%offsets"], "fused": True, "ahead": True,
    "by_16": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    pytest.importorskip("triton")
    env = with_tests({"OMP_NUM_THREADS": "1"})
    done = run_python("-m", "gpu_evidence.compiled", "--json", "--brief", *CASES, env=env, timeout=600)
    assert done.stdout, done.stderr
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def test_every_kernel_compiles_without_a_fault(found: dict[str, Any]) -> None:
    assert not found["faults"]


def test_every_kernel_of_the_layers_is_there(found: dict[str, Any]) -> None:
    """What is the same for a GPU was compiled once."""
    for gpu in GPUS:
        for dtype in ("bfloat16", "float16", "float32") if gpu == "sm_90" else ("bfloat16",):
            rows = [r for r in found["rows"] if (r["gpu"], r["dtype"]) == (gpu, dtype)]
            assert {r["kernel"] for r in rows if r["tile"]} == GEMMS, (gpu, dtype)
    kernels = {r["kernel"] for r in found["rows"] if r["gpu"] == "sm_90"} - GEMMS
    assert kernels == {"count", "scan", "place", "combine", "gather", "activate", "activate_backward", "write"}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("spilled", 72), ("fit", 0), ("products", 0), ("atomics", 1), ("narrow", ["%offsets", "%x"]), ("fused", None),
        ("ahead", False),
    ],
)  # fmt: skip
def test_a_fault_is_found(field: str, value: Any) -> None:
    assert not faults_of(GOOD)
    assert len(faults_of(GOOD | {field: value})) == 1
    assert len(faults_of(GOOD | {"dtype": "float32"})) == 1
    assert len(faults_of(GOOD | {"layer": "qwen3"})) == 1
