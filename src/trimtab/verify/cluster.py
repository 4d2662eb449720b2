"""A run on ranks that torchrun has started: their own devices, their own backend.

Rank 0 collects in a thread, from the store: when a case hangs, in whatever collective, the run still ends and says so.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.distributed_c10d import _get_default_store

from trimtab.verify.adapters import get_implementation
from trimtab.verify.cases import Case
from trimtab.verify.collect import Stalled, Verdict, collect, stalled_verdict
from trimtab.verify.local import START
from trimtab.verify.on_rank import run_on_rank


def run_cluster(
    cases: Sequence[Case],
    implementation: str,
    *,
    deadline: float,
    repeat: int,
    report: Callable[[Verdict], None],
    finish: Callable[[], int],
) -> int:
    """Every rank that torchrun started calls this. Returns the exit code; `report` and `finish` run on rank 0 alone."""
    judged = get_implementation(implementation)
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(hours=1))
    store: Store = PrefixStore("trimtab-verify", _get_default_store())
    mine: Store = store.clone()  # type: ignore[attr-defined]  # a client serves one thread at a time
    reasons = [judged.lacks(case.topology, case.pattern) for case in cases]
    asked = list(enumerate(case for case, reason in zip(cases, reasons, strict=True) if reason is None))
    codes: list[int] = []

    def collect_all() -> None:
        for case, reason in zip(cases, reasons, strict=True):
            if reason is not None:
                report(Verdict(case=case, status="lacking", details=[reason]))
        try:
            for _, verdict in collect(asked, mine, deadline, START, list):
                report(verdict)
        except Stalled as stalled:
            report(stalled_verdict(dict(asked)[stalled.index], stalled, deadline, "the cases behind it were not run"))
            finish()
            os._exit(1)  # this process may itself be in the collective that hangs; torchrun then ends the others
        codes.append(finish())

    collector = threading.Thread(target=collect_all, daemon=True)
    if dist.get_rank() == 0:
        collector.start()
    run_on_rank(asked, judged, store, device, repeat)
    if dist.get_rank() == 0:
        collector.join()
    dist.barrier()
    dist.destroy_process_group()
    return codes[0] if codes else 0
