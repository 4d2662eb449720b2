"""`python -m benchmarks layer`: one MoE experts layer, forward and forward+backward, against peers and the limit.

The fewest bytes that such a layer reads and writes:

    forward     weights of experts that have rows, tokens in, tokens out
    backward    the same weights, tokens and output gradients in, input gradients out,
                gradients of all experts' weights out
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarks.contestant import Contestant, Role
from benchmarks.layer_builds import MANY_RANKS, ONE_RANK
from benchmarks.layer_case import LayerCase
from benchmarks.layer_truth import layer_judge
from benchmarks.machine import native_bf16
from benchmarks.subject import BOTH, FORWARD
from benchmarks.task import Task
from benchmarks.workloads import token_counts
from trimtab.errors import ConfigError
from trimtab.layout import experts_per_rank

COPY_BYTES = 2**27
BACKENDS = {"auto": {}, "torch": {"TRIMTAB_COMPILED": "0"}}
"""What a process is told, so that trimtab takes its C++ where it can, or stock PyTorch alone."""


def layer_task(
    shape: tuple[int, int, int, int],
    *,
    tokens: int,
    dtype: str,
    threads: int = 1,
    ranks: int = 1,
    workloads: Sequence[str] = ("balanced",),
    backends: Sequence[str] = ("auto",),
    transports: Sequence[str] = ("alltoall",),
    peers: Sequence[str] = (),
    modes: Sequence[str] = (FORWARD, BOTH),
    memory: bool = False,
    against: str = "",
) -> Task:
    """Contestants: ours by backend (and transport), the peers, the limits; each once per workload.

    threads: of each rank. against: the `src` folder of another checkout of trimtab, which races as the peer "before".

    Raises ConfigError for a peer that does not run on so many ranks, or sizes that do not fit.
    """
    able = MANY_RANKS if ranks > 1 else ONE_RANK
    if wrong := [peer for peer in peers if peer not in able]:
        raise ConfigError(f"peer {wrong[0]!r} does not race on {ranks} rank(s): there are {', '.join(able)}")
    experts_per_rank(shape[2], ranks)
    cases = [
        LayerCase.shaped(shape, tokens=tokens, dtype=dtype, workload=workload, ranks=ranks) for workload in workloads
    ]
    many = len(workloads) > 1
    contestants: list[Contestant] = []

    def add(
        name: str, role: Role, build: str, case: LayerCase | None, *, env: Any = None, source: str = "", **args: Any
    ) -> None:
        group = "" if case is None or (role == "limit" and ranks == 1) else case.workload
        contestants.append(
            Contestant(
                name=f"{name} @{group}" if many and group else name,
                role=role,
                group=group,
                args=args if case is None else case.as_args(**args),
                build=f"benchmarks.{build}",
                ranks=ranks,
                threads=threads,
                env=env or {},
                source=source,
            )
        )

    for case in cases:
        ours = {"implementation": "trimtab"}
        for transport in transports if ranks > 1 else ("",):
            for backend in backends:
                name = " ".join(filter(None, ("trimtab", backend, transport)))
                add(name, "ours", "layer_builds:build", case, env=BACKENDS[backend], transport=transport, **ours)
            if against:
                name = " ".join(filter(None, ("before", transport)))
                add(name, "peer", "layer_builds:build", case, source=against, transport=transport, **ours)
        for peer in peers:
            add(peer, "peer", "layer_builds:build", case, implementation=peer)
        if case is cases[0] or ranks > 1:  # on one rank every workload has the same rows
            # Of bfloat16 and float32 the faster counts; where bfloat16 is emulated it is float32.
            precisions = ("fp32", case.products) if native_bf16() else ("fp32",)
            for precision in dict.fromkeys(precisions):
                add(f"dense {precision}", "limit", "limits:build_dense", case, dtype=precision)
    add("copy", "bandwidth", "limits:build_copy", None, bytes=COPY_BYTES)
    described: dict[str, Any] = {
        "shape": list(shape),
        "dtype": dtype,
        "tokens": tokens,
        "threads": threads,
        "ranks": ranks,
        "workloads": list(workloads),
    }
    first = [c for c in contestants if c.role in ("ours", "peer") and c.group == workloads[0]]
    return Task(
        part="layer",
        case=described,
        contestants=contestants,
        modes=[*modes, "copy"],
        fewest_bytes={case.workload: {mode: fewest_bytes(case, mode) for mode in modes} for case in cases},
        weighed=[rehearsed(c) for c in first] if memory else (),
        make_judge=layer_judge,
    )


def rehearsed(c: Contestant) -> Contestant:
    """It first runs a layer whose memory is next to nothing."""
    small = c.args["case"] | {"dim": 32, "hidden": 32, "tokens": 8}
    return replace(c, rehearsal=c.args | {"case": small})


def fewest_bytes(case: LayerCase, mode: str) -> int:
    """Of the rank that has the most."""
    e = experts_per_rank(case.num_experts, case.ranks)
    used = {int(expert) for rank in range(case.ranks) for expert in case.ids(rank).flatten().tolist()}
    counts = token_counts(case.workload, case.tokens, case.ranks)
    one_expert = 3 * case.dim * case.hidden
    values = []
    for rank in range(case.ranks):
        weights, tokens = sum(i // e == rank for i in used) * one_expert, counts[rank] * case.dim
        forward = weights + 2 * tokens
        values.append(forward + weights + 3 * tokens + e * one_expert if mode == BOTH else forward)
    return max(values) * case.torch_dtype.itemsize
