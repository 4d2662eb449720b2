"""A layer over two real processes of this host: right numbers forward and backward, latency and bandwidth.

Legend: T tokens of a rank, K experts per token, E experts, D model dim, F expert hidden dim.
"""

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
WHERE = "2 ranks, "
SLOW_US, SLOW_GBS = 5000.0, 0.05


@dataclass(frozen=True, kw_only=True)
class Loopback:
    """What carries the rows, the largest relative difference from the oracle, forward and all gradients, the median of
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
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return [judge_failure("; ".join(dict.fromkeys(line for line in lines if _telling(line))) or repr(error))]
    found = []
    for one, other in zip(*answers, strict=True):
        if isinstance(one, str):  # on both ranks
            found.append(Finding("note", WHERE + "shared_memory", f"cannot run here, so 'auto' is alltoall: {one}"))
        else:
            found += judge(one, other)
    return found


def judge_failure(failed: str) -> Finding:
    """The finding where the ranks did not come through. failed: the errors of both."""
    do = (
        "the layer itself failed: install trimtab and torch afresh, in versions that fit; if it stays, report it with "
        "what stands above"
    )
    if re.search(r"no answer|onnect|gloo|socket|address|interface", failed):
        do = (
            "a host name or interface that Gloo cannot use is the usual cause: set GLOO_SOCKET_IFNAME=lo and run this "
            "again; a firewall on the host's own address is another"
        )
    return Finding("broken", WHERE + "gloo", f"two ranks on this host did not come through: {failed}", do)


def judge(*ranks: Loopback) -> list[Finding]:
    """Findings about what all ranks measured: the worst counts."""
    where = WHERE + ranks[0].over
    right = all(rank.error <= BOUND for rank in ranks)  # NaN is not
    error, latency = max(rank.error for rank in ranks), max(rank.latency_us for rank in ranks)
    speed = min(rank.gigabytes_per_s for rank in ranks)
    numbers = f"one layer forward and backward: {error:.1e} from the oracle (bound {BOUND:.0e})"
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
    found: list[Loopback | str] = [_through(AllToAll(group), "gloo")]
    try:
        shared = SharedMemory(group)
        shared.meet_peers(torch.device("cpu"))
    except BackendError as error:
        return [*found, str(error)]
    return [*found, _through(shared, "shared_memory")]


def _through(transport: Transport, name: str) -> Loopback:
    error, latency, speed = _error(transport), _latency(transport), _bandwidth(transport)
    return Loopback(over=name, error=error, latency_us=latency, gigabytes_per_s=speed)


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
        experts.gate_up.copy_(up[held].view(e, 2, F, D))
        experts.down.copy_(down[held])
    local_x, local_w = (t[mine].detach().requires_grad_() for t in (x, w))
    dispatcher = Dispatcher(E, transport, layer="doctor")
    rows = dispatcher.dispatch(local_x, ids[mine], local_w)
    out = dispatcher.combine(experts(rows.x_MD, rows.ids_MK, rows.weights_MK, num_slots=rows.num_slots), rows)
    grads = torch.autograd.grad(out, (local_x, local_w, experts.gate_up, experts.down), dy[mine])
    ours = [out.detach(), grads[0], grads[1], grads[2].flatten(1, 2), grads[3]]
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
