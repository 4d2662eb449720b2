"""The machine of a run, and the rates that nothing on it exceeds: a copy, and one large product of bfloat16."""

from __future__ import annotations

import shutil
import subprocess

import torch

from benchmarks.gpu.child import Measuring
from benchmarks.machine import describe, machine_words

SMI = ("nvidia-smi", "--query-gpu=driver_version,power.limit,clocks.max.sm,clocks.max.mem", "--format=csv,noheader")


def measure(run: Measuring) -> str:
    """Verdict: what the device reaches."""
    words = describe()
    run.save(machine=words, words=machine_words(words), device=_device(run))
    size, moved = (8192, 2**30) if run.on_cuda else (128, 2**20)
    a, b = (torch.randn(size, size, device=run.device).bfloat16() for _ in range(2))
    source = torch.ones(moved, dtype=torch.uint8, device=run.device)
    target = torch.empty_like(source)
    ms = run.turns({"product": lambda: a @ b, "copy": lambda: target.copy_(source)})
    teraflops, terabytes = 2 * size**3 / ms["product"] / 1e9, 2 * moved / ms["copy"] / 1e9
    run.save(teraflops=teraflops, terabytes=terabytes)
    return f"{size}^3 in bfloat16 {teraflops:.0f} TFLOP/s, a copy {terabytes:.2f} TB/s"


def _device(run: Measuring) -> str:
    if not run.on_cuda:
        return "the CPU: a rehearsal, whose numbers mean nothing"
    p = torch.cuda.get_device_properties(0)
    smi = ""
    if shutil.which(SMI[0]):
        smi = subprocess.run(SMI, capture_output=True, text=True, check=False).stdout.strip().replace("\n", "; ")
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"HIP {torch.version.hip}"
    return (
        f"{p.name}, capability {p.major}.{p.minor}, {p.multi_processor_count} multiprocessors, "
        f"{p.total_memory / 2**30:.0f} GiB, {built}{f'; driver, power, clocks: {smi}' if smi else ''}"
    )
