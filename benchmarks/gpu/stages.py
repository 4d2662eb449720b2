"""The stages of a run, each a row of one table, in order of their worth: what comes first is there if time runs out.

A stage is either files of tests, side by side, or a function that measures. Each has processes of its own.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Stage:
    """limit: seconds; what is left of the run, if that is less.

    tests: files for pytest, from the root of the repository. measure: "module:function", see `child.Measuring`.
    only: pytest's -k. under: a command that the tests run under; where it is not there, the stage is skipped.
    """

    name: str
    about: str
    limit: float
    tests: tuple[str, ...] = ()
    measure: str = ""
    only: str = ""
    under: tuple[str, ...] = ()


def _tests(*names: str) -> tuple[str, ...]:
    return tuple(f"tests/gpu/test_gpu_{name}.py" for name in names)


STAGES = (
    Stage(name="machine", about="what is here, and the rates of a copy and of a dense product: the limits of all",
          limit=40, measure="benchmarks.gpu.machine:measure"),
    Stage(name="kernels", about="experts against float64, host waits, CUDA graphs; recipes on their own hardware",
          limit=170, tests=_tests("triton", "experts", "recipes")),
    Stage(name="moe", about="router, layer, and an exchange over a group of one rank, against float64; plans replayed",
          limit=60, tests=(*_tests("moe"), "tests/kernels/test_one_launch.py")),
    Stage(name="profile", about="one step on each backend: launches, host waits, time of each kernel",
          limit=60, measure="benchmarks.gpu.profile:measure"),
    Stage(name="layers", about="forward, forward+backward, peak memory of a layer, in turns; wrong numbers do not race",
          limit=150, measure="benchmarks.gpu.layers:measure"),
    Stage(name="plan", about="peak memory of steps of a small model, planned, and as the allocator counts it",
          limit=50, measure="benchmarks.gpu.plan:measure"),
    Stage(name="tiles", about="each of Triton's GEMM launches alone, in other tiles than those that ship",
          limit=90, measure="benchmarks.gpu.tiles:measure"),
    Stage(name="memcheck", about="a slice of the tests under compute-sanitizer", limit=240, tests=_tests("triton"),
          only="experts_are_true and random and bfloat16",
          under=("compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9")),
)  # fmt: skip
