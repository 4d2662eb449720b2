"""A layer over two real processes of this host: right numbers forward and backward, latency and bandwidth."""

from __future__ import annotations

import re
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from trimtab.dispatch.all_to_all import AllToAll
from trimtab.dispatch.shared_memory import SharedMemory
from trimtab.dispatch.transport import SplitSizes, Transport
from trimtab.doctor.findings import Finding
from trimtab.errors import BackendError
from trimtab.verify.adapters import make_place
from trimtab.verify.adapters.trimtab_impl import Impl
from trimtab.verify.cases import Case
from trimtab.verify.on_rank import BOUNDS, Bench
from trimtab.verify.patterns import pattern_named
from trimtab.verify.ranks import run_ranks
from trimtab.verify.topologies import Topology

RANKS = 2
BOUND = BOUNDS[torch.float64]
MEGABYTES = 8
WHERE = "2 ranks, "
SLOW_US, SLOW_GBS = 5000.0, 0.05
OWN = "the layer itself failed: install trimtab and torch afresh; if it stays, report it with what stands above"
NETWORK = (
    "a host name or interface that Gloo cannot use is the usual cause: set GLOO_SOCKET_IFNAME=lo and run this again; a "
    "firewall on the host's own address is another"
)


@dataclass(frozen=True, kw_only=True)
class Loopback:
    """What carries the rows, the largest relative difference from the truth, forward and all gradients, the median of
    an exchange of counts, and rows sent by one rank, while it receives as many."""

    over: str = "gloo"
    error: float
    latency_us: float
    gigabytes_per_s: float


def look() -> list[Finding]:
    """Start two ranks and run them, over Gloo and through shared memory."""
    try:
        answers = run_ranks(on_rank, RANKS, deadline=60.0)
    except (AssertionError, OSError) as error:
        told = [line.strip() for line in str(error).splitlines() if re.search("Error|no answer|died", line)]
        return [judge_failure("; ".join(dict.fromkeys(told)) or repr(error))]
    found = []
    for one, other in zip(*answers, strict=True):
        if isinstance(one, str):  # on both ranks
            found.append(Finding("note", WHERE + "shared_memory", f"cannot run here, so 'auto' is alltoall: {one}"))
        else:
            found += judge(one, other)
    return found


def judge_failure(failed: str) -> Finding:
    """The finding where the ranks did not come through. failed: the errors of both."""
    do = NETWORK if re.search(r"no answer|onnect|gloo|socket|address|interface", failed) else OWN
    return Finding("broken", WHERE + "gloo", f"two ranks on this host did not come through: {failed}", do)


def judge(*ranks: Loopback) -> list[Finding]:
    """Findings about what all ranks measured: the worst counts."""
    where = WHERE + ranks[0].over
    right = all(rank.error <= BOUND for rank in ranks)  # NaN is not
    error, latency = max(rank.error for rank in ranks), max(rank.latency_us for rank in ranks)
    speed = min(rank.gigabytes_per_s for rank in ranks)
    numbers = f"one layer forward and backward: {error:.1e} from the truth (bound {BOUND:.0e})"
    rates = f"exchange of counts {latency:.0f} us, rows {speed:.2f} GB/s each way"
    wrong = "run `trimtab verify`: it names the first wrong value; do not train on this machine"
    busy = "the host is busy, or its ranks share cores: look at top, and at OMP_NUM_THREADS"
    slow = latency > SLOW_US or speed < SLOW_GBS
    return [
        Finding("ok", where, numbers) if right else Finding("broken", where, numbers, wrong),
        Finding("warn", where, rates, busy) if slow else Finding("ok", where, rates),
    ]


def on_rank() -> list[Loopback | str]:
    """What this rank finds over Gloo and through shared memory, or why the latter cannot be. Both ranks call."""
    group: Any = dist.group.WORLD
    # Which kernels cannot run here, and why, has its own part of the check-up.
    warnings.filterwarnings("ignore", message=r"(?s).*are used instead")
    found: list[Loopback | str] = [_through(AllToAll(group), "alltoall")]
    try:
        shared = SharedMemory(group)
        shared.meet_peers(torch.device("cpu"))
    except BackendError as error:
        return [*found, str(error)]
    return [*found, _through(shared, "shared_memory")]


def _through(transport: Transport, name: str) -> Loopback:
    """A case of the ledger, and how fast the exchange is."""
    topology = Topology(ranks=RANKS, ep=RANKS, transport=name)
    case = Case(topology=topology, pattern=pattern_named("random"), dtype="float64", seed=0)
    finding = Bench(Impl(), make_place(topology, transport.rank, torch.device("cpu"))).run(case)
    if finding.fault is not None:
        raise RuntimeError(finding.fault)
    headers = torch.zeros(RANKS, 6, dtype=torch.int64)
    rows = torch.zeros(MEGABYTES * 1024, 1024, dtype=torch.uint8)
    each = (rows.shape[0] // RANKS,) * RANKS
    splits = SplitSizes(outgoing=each, incoming=each, everyone=(each,) * RANKS)
    for _ in range(3):  # into memory that is new
        transport.combine([rows], splits, each)
    seconds = _median(lambda: transport.combine([rows], splits, each), 9)
    return Loopback(
        over="gloo" if name == "alltoall" else name,
        error=max(finding.errors.values()),
        latency_us=_median(lambda: transport.handshake(headers), 50) * 1e6,
        gigabytes_per_s=rows.numel() / RANKS / seconds / 1e9,  # what stays on the rank crosses nothing
    )


def _median(run: Callable[[], object], times: int) -> float:
    found = []
    for _ in range(times):
        start = time.perf_counter()
        run()
        found.append(time.perf_counter() - start)
    return statistics.median(found)
