"""One step of a layer on each backend under torch's profiler: a total without parts is a number without a reason."""

from __future__ import annotations

import traceback
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.child import Measuring
from benchmarks.gpu.layers import BACKENDS, PEER, cases, contestant
from benchmarks.layer_case import LayerData, expert_weights
from benchmarks.subject import BOTH
from trimtab.errors import first_line

LAUNCHES = (
    "cudaLaunchKernel",
    "cuLaunchKernel",
    "hipLaunchKernel",
    "hipModuleLaunchKernel",
    "hipExtModuleLaunchKernel",
)
WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "hipStreamSynchronize", "hipEventSynchronize")
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
    events = seen.key_averages()
    print(
        events.table(
            sort_by="cuda_time_total" if run.on_cuda else "cpu_time_total", row_limit=40, max_name_column_width=90
        )
    )
    if run.on_cuda:
        kernels = [
            (e.key, e.count, e.self_device_time_total / 1e3)
            for e in events
            if e.device_type != torch.autograd.DeviceType.CPU
        ]
    else:  # operators stand for kernels
        kernels = [(e.key, e.count, e.self_cpu_time_total / 1e3) for e in events]
    kernels.sort(key=lambda kernel: -kernel[2])
    return {
        "launches": sum(e.count for e in events if e.key.startswith(LAUNCHES)),
        "waits": sum(e.count for e in events if e.key.startswith(WAITS)),
        "ms": sum(ms for _, _, ms in kernels),
        "kernels": [[name[:80], count, ms] for name, count, ms in kernels[:MOST]],
    }
