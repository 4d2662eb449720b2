"""`python -m benchmarks gpu`: a layer on one CUDA device, on each backend, beside transformers and dense products.

Contestants live in processes of their own here too: one that breaks the device, or hangs, ends alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.contestant import Contestant, Role
from benchmarks.layer import COPY_BYTES, fewest_bytes, rehearsed
from benchmarks.layer_case import LayerCase
from benchmarks.layer_truth import layer_judge
from benchmarks.subject import BOTH, FORWARD
from benchmarks.task import Task

SHAPES = ((2048, 768, 128, 8), (4096, 1536, 128, 8), (4096, 14336, 8, 2))
GRAPH = ", CUDA graph"


def gpu_task(shape: tuple[int, int, int, int], *, tokens: int, backends: Sequence[str], device: str = "cuda") -> Task:
    """bfloat16, routing drawn evenly. backends: trimtab's; on device "cpu" no CUDA graphs, to see that it runs."""
    case = LayerCase.shaped(shape, tokens=tokens, dtype="bf16", workload="random", device=device)

    def made(name: str, role: Role, build: str, **args: Any) -> Contestant:
        group = "" if role in ("limit", "bandwidth") else "CUDA graph" if args["graph"] else "eager"
        given = case.as_args(**args) if role != "bandwidth" else args
        return Contestant(name=name, role=role, build=build, args=given, group=group, threads=4)

    contestants = []
    for graph in (False, True) if device == "cuda" else (False,):
        after = GRAPH if graph else ""
        for backend in backends:
            build = "benchmarks.layer_builds:build_alone"
            contestants.append(made(f"trimtab {backend}{after}", "ours", build, backend=backend, graph=graph))
        build, peer = "benchmarks.layer_builds:build", "grouped_mm"
        contestants.append(made(f"transformers {peer}{after}", "peer", build, implementation=peer, graph=graph))
    weighed = [rehearsed(c) for c in contestants if GRAPH not in c.name]
    contestants.append(made("dense bf16", "limit", "benchmarks.limits:build_dense", dtype="bf16"))
    contestants.append(made("copy", "bandwidth", "benchmarks.limits:build_copy", bytes=COPY_BYTES, device=device))
    fewest = {mode: fewest_bytes(case, mode) for mode in (FORWARD, BOTH)}
    return Task(
        part="gpu",
        case={"shape": list(shape), "dtype": "bf16", "tokens": tokens},
        contestants=contestants,
        modes=[FORWARD, BOTH, "copy"],
        fewest_bytes=dict.fromkeys(("eager", "CUDA graph"), fewest),
        weighed=weighed,
        make_judge=layer_judge,
    )
