"""What each path would launch on a GPU, and where its host would wait for it, counted on fake CUDA tensors.

bfloat16, T 4096, D 2048, F 768, E 128, K 8, 8 ranks. A budget is what was counted when it was set.
"""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from helpers.commands import run_python, with_tests
from trimtab.dispatch.over_group import pack, unpack

LIBRARY = Path(torch.__file__).parent / "lib" / "libtorch_cuda.so"
needs_guard = [
    pytest.mark.skipif(LIBRARY.exists(), reason="PyTorch built for CUDA wants a driver for fake tensors, too"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="a guard of CUDA devices is compiled for PyTorch"),
]
pytestmark = [*needs_guard, pytest.mark.xdist_group("fake_cuda")]


class Budget(NamedTuple):
    """Most launches forward and in the backward, and the host's waits forward; in a backward there are none."""

    forward: int
    backward: int = 0
    waits: int = 0


WITH_TRITON = {
    "experts": Budget(9, 12), "experts, triton": Budget(8, 10), "experts, bias": Budget(23, 37),
    "experts, geglu": Budget(9, 12), "experts, blockwise": Budget(105, 206), "experts, mxfp8": Budget(117, 234),
    "experts, nvfp4": Budget(171, 572), "router": Budget(14), "router, groups": Budget(26), "plan": Budget(3),
    "replicas": Budget(28), "layer": Budget(35, 20), "all-to-all": Budget(86, 23, waits=1),
    "all-to-all, triton": Budget(85, 21, waits=1), "all-to-all, guarded": Budget(87, 23, waits=1),
    "all-to-all, replicas": Budget(131, 41, waits=1), "all-to-all, ordered": Budget(111, 31, waits=1),
    "all-to-all, few tokens": Budget(86, 23, waits=1), "all-to-all, no tokens": Budget(86, 23, waits=1),
    "linear": Budget(19, 17), "ddp, flags": Budget(6),
}  # fmt: skip
ALONE = {"experts": Budget(28, 31), "plan": Budget(14), "layer": Budget(54, 39)}
"""Without Triton."""


@cache
def counts(*options: str) -> dict[str, Any]:
    """Of all cases, counted in one process."""
    cases = ALONE if options else WITH_TRITON
    done = run_python("-m", "gpu_evidence", *options, *cases, env=with_tests({"OMP_NUM_THREADS": "1"}), timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def check(found: dict[str, Any], budget: Budget) -> None:
    for step, most in (("forward", budget.forward), ("backward", budget.backward)):
        if step in found:
            assert found[step]["launches"] <= most, (step, found[step]["launches"], found[step]["lines"])
            assert len(found[step]["waits"]) == (budget.waits if step == "forward" else 0), found[step]["waits"]


@pytest.mark.parametrize("case", WITH_TRITON)
def test_a_path_launches_no_more_than_its_budget_and_waits_once_at_most(case: str) -> None:
    check(counts()[case], WITH_TRITON[case])


@pytest.mark.parametrize("case", ALONE)
def test_so_does_pytorch_alone(case: str) -> None:
    check(counts("--no-triton")[case], ALONE[case])


class Elsewhere(torch.Tensor):
    device = torch.device("cuda")


@pytest.mark.parametrize(("width", "skipped"), [(4, 0), (4, 3), (3, 0)])
def test_a_device_packs_the_bytes_that_the_host_packs(width: int, skipped: int) -> None:
    x, ids, tokens = torch.randn(60).half()[skipped:], torch.randint(0, 9, (9, 3)), torch.tensor([8, 0, 3, 3])
    parts = [x[: 9 * width].view(9, width), ids, ids.int()]
    there = pack([t.as_subclass(Elsewhere) for t in parts], tokens)  # type: ignore[type-var]
    for got, part in zip(unpack(there, parts), parts, strict=True):
        assert torch.equal(got.as_subclass(torch.Tensor), part[tokens])


@pytest.mark.parametrize(("case", "tokens"), [("", 4096), (", few tokens", 36), (", no tokens", 0)])
def test_collectives_of_a_layer_in_order_and_shape(case: str, tokens: int) -> None:
    """8 counts of 23 numbers; rows of D bfloat16, weights and ids, and of what comes home; from a rank of few tokens
    and from one of none as from any other. 8192 come here."""
    sent = 2 * tokens
    golden = {
        "forward": ["torch.int64 [8, 23] <- torch.int64 [8, 23]", (8192, sent, 4160), (sent, 8192, 4096)],
        "backward": [(8192, sent, 4096), (sent, 8192, 4128)],
    }
    for step, calls in golden.items():
        rows = [
            c if isinstance(c, str) else "torch.uint8 [{0}, {2}] <- torch.uint8 [{1}, {2}]".format(*c) for c in calls
        ]
        assert counts()[f"all-to-all{case}"][step]["collectives"] == [f"alltoall_base_ {call}" for call in rows]
