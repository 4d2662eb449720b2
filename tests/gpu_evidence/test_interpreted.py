"""The numbers of Triton's kernels in its interpreter: those between grouped GEMMs, GEMMs at their edges, and plans and
whole experts as tests/gpu has them where there is a GPU."""

from __future__ import annotations

import pytest

from helpers.commands import run_python, with_tests

pytest.importorskip("triton")


@pytest.mark.parametrize(
    ("module", "parts"), [("interpreted", 10), ("interpreted_edges", 5), ("interpreted_experts", 15)]
)
def test_numbers_in_the_interpreter(module: str, parts: int) -> None:
    env = with_tests({"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"})
    done = run_python("-m", f"gpu_evidence.{module}", env=env, timeout=900)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == parts
