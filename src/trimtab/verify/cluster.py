"""A run on ranks that torchrun has started: their own devices, their own backend.

Rank 0 collects in a thread, from the store: when a case hangs, in whatever collective, the run still ends and says so.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from threading import Thread

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store

from trimtab.launched import leave_group
from trimtab.verify.adapters import get_implementation
from trimtab.verify.cases import Case
from trimtab.verify.collect import Verdict, collect
from trimtab.verify.local import START
from trimtab.verify.on_rank import COLLECTORS, run_on_rank


def run_cluster(
    cases: Sequence[Case],
    implementation: str,
    *,
    deadline: float,
    repeat: int,
    report: Callable[[Verdict], None],
    finish: Callable[[], int],
) -> int:
    """Every rank that torchrun started calls this. Returns the exit code; `report` and `finish` run on rank 0 alone,
    which raises what they raise."""
    judged = get_implementation(implementation)
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    store, rank, ranks = next(dist.rendezvous("env://", timeout=COLLECTORS))
    made = PrefixStore("ranks", store)
    dist.init_process_group("nccl" if cuda else "gloo", store=made, rank=rank, world_size=ranks, timeout=COLLECTORS)
    store = PrefixStore("trimtab-verify", store)
    reasons = [judged.lacks(case.topology, case.pattern) for case in cases]
    asked = [(index, case) for index, case in enumerate(cases) if reasons[index] is None]
    code: Future[int] = Future()

    def collect_all(mine: Store) -> int:
        for case, reason in zip(cases, reasons, strict=True):
            if reason is not None:
                report(Verdict(case=case, status="lacking", details=[reason]))
        for verdict in collect(asked, mine, deadline, START, said=lambda _: "the cases behind it were not run"):
            report(verdict)
            if verdict.stalled:
                try:
                    finish()
                except Exception as error:
                    print(f"trimtab: {error}", file=sys.stderr, flush=True)
                os._exit(1)  # this process may itself be in the collective that hangs; torchrun then ends the others
        return finish()

    def settle() -> None:
        """An exception would end with its thread."""
        try:
            code.set_result(collect_all(store.clone()))  # type: ignore[attr-defined]  # a client serves one thread at a time
        except BaseException as error:
            code.set_exception(error)

    if rank == 0:
        Thread(target=settle, daemon=True).start()
    run_on_rank(asked, judged, store, device, repeat)
    if rank == 0:
        code.exception()  # waits
    dist.barrier()
    leave_group()
    return code.result() if rank == 0 else 0
