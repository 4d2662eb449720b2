"""A layer over two real processes of this host: right numbers forward and backward, latency and bandwidth.

Legend: T tokens of a rank, K experts per token, E experts, D model dim, F expert hidden dim.
"""

from __future__ import annotations

import re
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trimtab import oracle
from trimtab.dispatch.all_to_all import AllToAll
from trimtab.dispatch.dispatcher import Dispatcher
from trimtab.dispatch.shared_memory import SharedMemory
from trimtab.dispatch.transport import SplitSizes, Transport
from trimtab.doctor.findings import Finding
from trimtab.errors import BackendError
from trimtab.experts.module import ExpertMLP
from trimtab.verify.ranks import run_ranks

RANKS, T, K, E, D, F = 2, 7, 2, 4, 8, 16
BOUND = 1e-12
"""Largest relative difference from the oracle in float64."""
MEGABYTES = 8
SLOW_US, SLOW_GBS = 5000.0, 0.05


@dataclass(frozen=True, kw_only=True)
class Loopback:
    """error: largest relative difference from the oracle, forward and all gradients, over both ranks.

    latency_us: exchange of counts, median. gigabytes_per_s: rows sent by one rank, while it receives as many.
    failed: what went wrong, if the ranks did not come through. over: what carries the rows. lacks: why that cannot be.
    """

    over: str = "gloo"
    lacks: str | None = None
    error: float = 0.0
    latency_us: float = 0.0
    gigabytes_per_s: float = 0.0
    failed: str | None = None


def look() -> list[Loopback]:
    """Start two ranks and run them, over Gloo and through shared memory."""
    try:
        answers = run_ranks(on_rank, RANKS, deadline=60.0)
    except (AssertionError, OSError) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return [Loopback(failed="; ".join(dict.fromkeys(line for line in lines if _telling(line))) or repr(error))]
    return [_of_both(*found) for found in zip(*answers, strict=True)]


def _of_both(*found: Loopback) -> Loopback:
    return replace(
        found[0],
        error=max(one.error for one in found),
        latency_us=max(one.latency_us for one in found),
        gigabytes_per_s=min(one.gigabytes_per_s for one in found),
    )


def judge(found: Loopback) -> list[Finding]:
    """Findings about the loopback."""
    where = f"2 ranks, {found.over}"
    if found.lacks is not None:
        return [Finding(severity="note", where=where, what=f"cannot run here, so 'auto' is alltoall: {found.lacks}")]
    if found.failed is not None:
        network = re.search(r"no answer|onnect|gloo|socket|address|interface", found.failed) is not None
        return [
            Finding(
                severity="broken",
                where=where,
                what=f"two ranks on this host did not come through: {found.failed}",
                do="a host name or interface that Gloo cannot use is the usual cause: set GLOO_SOCKET_IFNAME=lo and "
                "run this again; a firewall on the host's own address is another"
                if network
                else "the layer itself failed: install trimtab and torch afresh, in versions that fit; if it stays, "
                "report it with what stands above",
            )
        ]
    right = found.error <= BOUND
    numbers = Finding(
        severity="ok" if right else "broken",
        where=where,
        what=f"one layer forward and backward: {found.error:.1e} from the oracle (bound {BOUND:.0e})",
        do="" if right else "run `trimtab verify`: it names the first wrong value; do not train on this machine",
    )
    slow = found.latency_us > SLOW_US or found.gigabytes_per_s < SLOW_GBS
    speed = Finding(
        severity="warn" if slow else "ok",
        where=where,
        what=f"exchange of counts {found.latency_us:.0f} us, rows {found.gigabytes_per_s:.2f} GB/s each way",
        do="the host is busy, or its ranks share cores: look at top, and at OMP_NUM_THREADS" if slow else "",
    )
    return [numbers, speed]


def on_rank() -> list[Loopback]:
    """What this rank finds. Both ranks call."""
    group: Any = dist.group.WORLD
    # Which kernels cannot run here, and why, has its own part of the check-up.
    warnings.filterwarnings("ignore", message=r"(?s).*are used instead")
    found = [_through(AllToAll(group), "gloo")]
    try:
        shared = SharedMemory(group)
        shared.meet_peers(torch.device("cpu"))
    except BackendError as error:  # on both ranks
        return [*found, Loopback(over="shared_memory", lacks=str(error))]
    return [*found, _through(shared, "shared_memory")]


def _through(transport: Transport, name: str) -> Loopback:
    return Loopback(
        over=name,
        error=_error(transport),
        latency_us=_latency(transport),
        gigabytes_per_s=_bandwidth(transport),
    )


def _error(transport: Transport) -> float:
    """The layer on this rank's tokens against the oracle on everyone's."""
    g = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64).requires_grad_()

    x, w, dy = draw(RANKS * T, D), draw(RANKS * T, K), draw(RANKS * T, D).detach()
    up, down = draw(E, 2 * F, D), draw(E, D, F)
    ids = torch.randint(-1, E, (RANKS * T, K), generator=g)
    y = oracle.moe(x, ids, w, up, down)
    truth = [y, *torch.autograd.grad(y, (x, w, up, down), dy)]

    mine, e = slice(transport.rank * T, (transport.rank + 1) * T), E // RANKS
    held = slice(transport.rank * e, (transport.rank + 1) * e)
    experts = ExpertMLP(e, D, F, dtype=torch.float64)
    with torch.no_grad():
        experts.up.copy_(up[held])
        experts.down.copy_(down[held])
    local_x, local_w = (t[mine].detach().requires_grad_() for t in (x, w))
    dispatcher = Dispatcher(E, transport, layer="doctor")
    rows = dispatcher.dispatch(local_x, ids[mine], local_w)
    out = dispatcher.combine(experts(rows.x_MD, rows.ids_MK, rows.weights_MK, num_slots=rows.num_slots), rows)
    ours = [out.detach(), *torch.autograd.grad(out, (local_x, local_w, experts.up, experts.down), dy[mine])]
    parts = [truth[0][mine].detach(), truth[1][mine], truth[2][mine], truth[3][held], truth[4][held]]
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(ours, parts, strict=True))


def _latency(transport: Transport) -> float:
    headers = torch.zeros(RANKS, 6, dtype=torch.int64)
    return statistics.median(_timed(lambda: transport.handshake(headers)) for _ in range(50)) * 1e6


def _bandwidth(transport: Transport) -> float:
    rows = torch.zeros(MEGABYTES * 1024, 1024, dtype=torch.uint8)
    half = rows.shape[0] // RANKS
    each = (half,) * RANKS
    splits = SplitSizes(outgoing=each, incoming=each, everyone=(each,) * RANKS)
    for _ in range(3):  # into memory that is new
        transport.combine([rows], splits, each)
    seconds = statistics.median(_timed(lambda: transport.combine([rows], splits, each)) for _ in range(9))
    return rows.numel() / RANKS / seconds / 1e9  # what stays on the rank crosses nothing


def _timed(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _telling(line: str) -> bool:
    """Whether a line of a traceback says what happened rather than where."""
    return "Error" in line or "no answer" in line or "died" in line
