"""One step of a layer on each backend under torch's profiler: a total without parts is a number without a reason."""

from __future__ import annotations

import re
import traceback
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.child import Measuring
from benchmarks.gpu.layers import BACKENDS, PEER, cases, contestant
from benchmarks.layer_case import LayerData, expert_weights
from benchmarks.subject import BOTH
from trimtab.errors import first_line

CALLS = {"launches": r"(cuda|cu|hip\w*)LaunchKernel", "waits": r"(cuda|hip)(Stream|Event)Synchronize"}
MOST = 12
"""Kernels that are kept of each backend."""


def measure(run: Measuring) -> str:
    """Of each backend: launches, waits of the host, milliseconds of its kernels and the longest of them."""
    shape, case = cases(run.device)[0]
    weights, data = expert_weights(case), LayerData.of(case, 0)
    found: dict[str, Any] = {}
    for name in (*(f"trimtab {backend}" for backend in BACKENDS[run.device]), PEER):
        try:
            step = contestant(name, case, data, weights).modes[BOTH]
            for _ in range(3):
                step()
            found[name] = _profiled(run, step)
        except Exception as error:
            traceback.print_exc()
            found[name] = {"failed": first_line(error, typed=True)[:200]}
        run.save(shape=shape, tokens=case.tokens, backends=found)
    good = {name: one for name, one in found.items() if "launches" in one}
    if not good:
        raise RuntimeError("nothing was profiled")
    return "; ".join(f"{name}: {one['launches']} launches, {one['waits']} waits" for name, one in good.items())


def _profiled(run: Measuring, step: Any) -> dict[str, Any]:
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if run.on_cuda else [])]
    run.synchronize()
    with profile(activities=activities) as seen:
        step()
        run.synchronize()
    events, kind = seen.key_averages(), "device" if run.on_cuda else "cpu"  # of a CPU operators stand for kernels
    print(events.table(sort_by=f"self_{kind}_time_total", row_limit=40, max_name_column_width=90))
    ours = [e for e in events if (e.device_type != torch.autograd.DeviceType.CPU) == run.on_cuda]
    kernels = [(e.key[:80], e.count, getattr(e, f"self_{kind}_time_total") / 1e3) for e in ours]
    kernels.sort(key=lambda kernel: -kernel[2])
    called = {what: sum(e.count for e in events if re.match(names, e.key)) for what, names in CALLS.items()}
    return {**called, "ms": sum(ms for _, _, ms in kernels), "kernels": kernels[:MOST]}
