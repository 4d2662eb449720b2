"""`trimtab bench layer`: one MoE experts layer, forward and forward+backward, against peers and the limit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarks.contestant import Contestant
from benchmarks.cost import layer_bytes
from benchmarks.layer_case import LayerCase
from benchmarks.layer_peers import MANY_RANKS, ONE_RANK
from benchmarks.layer_truth import layer_judge
from benchmarks.subject import BOTH, FORWARD
from benchmarks.task import Task
from benchmarks.workloads import token_counts
from trimtab.errors import ConfigError
from trimtab.layout import experts_per_rank

COPY_BYTES = 2**27


def layer_task(
    shape: tuple[int, int, int, int],
    *,
    tokens: int,
    dtype: str,
    threads: int = 1,
    ranks: int = 1,
    workloads: Sequence[str] = ("balanced",),
    kernels: Sequence[str] = ("auto",),
    transports: Sequence[str] = ("alltoall",),
    peers: Sequence[str] = (),
    modes: Sequence[str] = (FORWARD, BOTH),
    in_place: bool = False,
    memory: bool = False,
    family: str = "qwen3_moe",
) -> Task:
    """Contestants: ours by kernels (and transport), the peers, the limits; each once per workload.

    threads: of each rank. family: whose experts, of `benchmarks.layer_case.FAMILIES`.

    Raises ConfigError for a peer that does not run on so many ranks or has no such experts, or sizes that do not fit.
    """
    dim, hidden, num_experts, top_k = shape
    able = MANY_RANKS if ranks > 1 else ONE_RANK
    if wrong := [peer for peer in peers if peer not in able]:
        raise ConfigError(f"peer {wrong[0]!r} does not race on {ranks} rank(s): there are {', '.join(able)}")
    if family != "qwen3_moe" and (ranks > 1 or "torchtitan" in peers):
        raise ConfigError(f"--family {family}: races on one rank, and not against torchtitan")
    experts_per_rank(num_experts, ranks)
    cases = [
        LayerCase(
            dim=dim, hidden=hidden, num_experts=num_experts, top_k=top_k, tokens=tokens, dtype=dtype,
            workload=workload, ranks=ranks, in_place=in_place, family=family,
        )
        for workload in workloads
    ]  # fmt: skip
    contestants: list[Contestant] = []
    many = len(workloads) > 1

    def add(name: str, role: Any, build: str, case: LayerCase | None, **args: Any) -> None:
        group = "" if case is None else case.workload
        made = args if case is None else case.as_args(**args)
        contestants.append(
            Contestant(
                name=f"{name} @{group}" if many and group else name, role=role, group=group, args=made,
                build=f"benchmarks.{build}", ranks=ranks, threads=threads,
            )
        )  # fmt: skip

    for case in cases:
        for kernel in kernels:
            for transport in transports if ranks > 1 else ("",):
                name = f"trimtab {kernel}" + (f" {transport}" if transport else "")
                add(name, "ours", "layer_ours:build", case, kernels=kernel, transport=transport)
        for peer in peers:
            build = "build_torchtitan" if peer == "torchtitan" else "build_transformers"
            own = peer == "trimtab-hf"
            add("trimtab hf" if own else peer, "ours" if own else "peer", f"layer_peers:{build}", case, peer=peer)
        if case is cases[0] or ranks > 1:  # on one rank every workload has the same rows
            # Where bf16 is emulated, float32 GEMMs are faster.
            for precision in dict.fromkeys(("fp32", case.products)):
                add(f"dense {precision}", "limit", "limits:build_dense", case, dtype=precision)
    if ranks == 1 and many:  # it serves all workloads
        contestants = [c if c.role != "limit" else replace(c, group="") for c in contestants]
    add("copy", "bandwidth", "limits:build_copy", None, bytes=COPY_BYTES)
    described = {
        "shape": list(shape), "dtype": dtype, "tokens": tokens, "threads": threads, "ranks": ranks,
        "workloads": list(workloads), "in_place": in_place,
    }  # fmt: skip
    if family != "qwen3_moe":
        described["family"] = family
    if list(kernels) != ["auto"]:
        described["kernels"] = list(kernels)
    if ranks > 1 and list(transports) != ["alltoall"]:
        described["transports"] = list(transports)
    first = [c for c in contestants if c.role in ("ours", "peer") and c.group == workloads[0]]
    return Task(
        part="layer",
        case=described,
        contestants=contestants,
        modes=[*modes, "copy"],
        fewest_bytes={case.workload: {mode: _bytes(case, mode) for mode in modes} for case in cases},
        weighed=[_weighed(c) for c in first] if memory else (),
        make_judge=layer_judge,
    )


def _weighed(c: Contestant) -> Contestant:
    """Without main_grad, which peers do not have; rehearsed on a layer whose memory is next to nothing."""
    case = {**c.args["case"], "in_place": False}
    small = case | {"dim": 32, "hidden": 16, "tokens": 8}
    return replace(c, args={**c.args, "case": case}, rehearsal={**c.args, "case": small})


def _bytes(case: LayerCase, mode: str) -> int:
    """Of the rank that has the most."""
    e = experts_per_rank(case.num_experts, case.ranks)
    used = {int(expert) for rank in range(case.ranks) for expert in case.ids(rank).flatten().tolist()}
    counts = token_counts(case.workload, case.tokens, case.ranks)
    return max(
        layer_bytes(
            counts[rank], case.dim, case.hidden, experts=e, active=sum(i // e == rank for i in used),
            size=case.torch_dtype.itemsize, backward=mode == BOTH, in_place=case.in_place,
        )
        for rank in range(case.ranks)
    )  # fmt: skip
