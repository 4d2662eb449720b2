"""Which process groups, transports and kernels can run here, why the others cannot, and the kernels' self-test."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from trimtab.doctor.findings import Finding
from trimtab.errors import BackendError
from trimtab.kernels.compiled import CompiledKernels
from trimtab.kernels.compiler import blames_cxx
from trimtab.kernels.grouped import KERNELS, get_kernels
from trimtab.kernels.selftest import SelfTest, self_test
from trimtab.validation import DTYPES

NEEDED = (torch.float32, torch.bfloat16)
"""Dtypes without which the kernels that "auto" takes are of no use."""


@dataclass(frozen=True, kw_only=True)
class Groups:
    """Which backends of torch.distributed this build of torch has, and how many GPUs it sees."""

    gloo: bool
    nccl: bool
    gpus: int


@dataclass(frozen=True, kw_only=True)
class Tried:
    """Kernels tried on a device with parameters of a dtype: a self-test, or why there was none.

    chosen: what "auto" takes on the device. instructions: those that the kernels were compiled for. products: of
    bfloat16, what makes them and why it is not something faster. set_up: refused for what the user has set.
    """

    kernels: str
    device: str
    dtype: str
    chosen: bool
    milliseconds: float | None = None
    instructions: str | None = None
    products: str | None = None
    computed_in: str | None = None
    refused: str | None = None
    set_up: bool = False
    fault: str | None = None


def look() -> Groups:
    """What this build of torch has."""
    return Groups(
        gloo=dist.is_gloo_available(),
        nccl=dist.is_nccl_available(),
        gpus=torch.cuda.device_count(),
    )


def judge(g: Groups) -> list[Finding]:
    """Findings about process groups and the transports that stand on them."""
    found = [
        Finding(severity="ok", where="gloo", what="process groups of CPU tensors")
        if g.gloo
        else Finding(
            severity="broken", where="gloo", what="this torch has no Gloo, so ranks cannot exchange CPU tensors",
            do="install an official wheel of torch, or build it with USE_DISTRIBUTED=1 USE_GLOO=1",
        )
    ]  # fmt: skip
    if g.nccl and g.gpus:
        found.append(Finding(severity="ok", where="nccl", what=f"process groups of tensors on {g.gpus} GPU(s)"))
    elif g.gpus:
        found.append(
            Finding(
                severity="broken", where="nccl", what="GPUs are here, but this torch has no NCCL for them",
                do="install a CUDA wheel of torch",
            )
        )  # fmt: skip
    else:
        why = "torch sees no GPU" if g.nccl else "this torch has none, and sees no GPU"
        found.append(Finding(severity="note", where="nccl", what=f"cannot run here: {why}"))
    devices = [name for name, there in (("CPU over gloo", g.gloo), ("GPU over nccl", g.nccl and g.gpus)) if there]
    for name, how in (("alltoall", "each row to the rank that needs it"), ("allgather", "every row to every rank")):
        found.append(
            Finding(
                severity="ok" if devices else "broken",
                where=f"transport {name}",
                what=f"{how}: {', '.join(devices) or 'no process group can run here'}",
            )
        )
    return found


def devices() -> list[torch.device]:
    """The CPU and one GPU."""
    return [torch.device("cpu"), *(torch.device("cuda", 0) for _ in range(min(torch.cuda.device_count(), 1)))]


def try_kernels(where: Iterable[torch.device]) -> list[Tried]:
    """Self-test every set of kernels on every device in every dtype."""
    tried = []
    for device in where:
        chosen = get_kernels("auto", device).name
        tried += [_try(name, device, dtype, name == chosen) for name in KERNELS for dtype in DTYPES]
    return tried


def judge_kernels(tried: Iterable[Tried]) -> list[Finding]:
    """One finding for each set of kernels and device."""
    groups: dict[tuple[str, str], list[Tried]] = {}
    for one in tried:
        groups.setdefault((one.kernels, one.device), []).append(one)
    return [_judge_one(name, device, group) for (name, device), group in groups.items()]


def _judge_one(name: str, device: str, tried: list[Tried]) -> Finding:
    where = f"kernels {name}"
    on = f"{device}{', the default there' if tried[0].chosen else ''}: "
    refusals = {one.refused for one in tried}
    if None not in refusals and len(refusals) == 1:
        set_up = tried[0].set_up
        return Finding(
            severity="broken" if set_up else "note", where=where, what=f"cannot run on {device}: {refusals.pop()}",
            do="unset CXX, or let it name a C++ compiler that works; install g++ if there is none" if set_up else "",
        )  # fmt: skip
    passed = [one for one in tried if one.fault is None and one.refused is None]
    compiled = {one.instructions for one in passed if one.instructions}
    on += "".join(f"compiled for {name}; " for name in compiled)
    lines = [on + (", ".join(_passed(one) for one in passed) or "nothing passed")]
    lines += sorted({f"bfloat16 products: {one.products}" for one in passed if one.products})
    lines += [f"{one.dtype}: cannot: {one.refused}" for one in tried if one.refused]
    faults = [one for one in tried if one.fault]
    lines += [f"{one.dtype}: WRONG: {one.fault}" for one in faults]
    if not faults:
        return Finding(severity="ok", where=where, what="\n".join(lines))
    needed = tried[0].chosen and any(one.dtype in {_short(d) for d in NEEDED} for one in faults)
    return Finding(
        severity="broken" if needed else "warn",
        where=where,
        what="\n".join(lines),
        do="do not train on these kernels: name others (`kernels=`), or another torch or driver; a layer refuses them "
        "too, at its first call",
    )


def _try(name: str, device: torch.device, dtype: torch.dtype, chosen: bool) -> Tried:
    try:
        kernels = get_kernels(name, device)
        computed = kernels.compute_dtype(dtype)
        test: SelfTest = self_test(kernels, device, computed)
    except BackendError as error:
        why = str(error)
        return Tried(
            kernels=name, device=str(device), dtype=_short(dtype), chosen=chosen, refused=why, set_up=blames_cxx(why)
        )  # fmt: skip
    return Tried(
        kernels=name,
        device=str(device),
        dtype=_short(dtype),
        chosen=chosen,
        milliseconds=test.seconds * 1e3,
        instructions=getattr(kernels, "instructions", None),
        products=str(kernels.bf16) if isinstance(kernels, CompiledKernels) else None,
        computed_in=None if computed == dtype else _short(computed),
        fault=test.fault,
    )


def _passed(one: Tried) -> str:
    computed = f" in {one.computed_in}" if one.computed_in else ""
    return f"{one.dtype}{computed} {one.milliseconds or 0:.1f} ms"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
