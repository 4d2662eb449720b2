"""Findings about process groups, sets of kernels, and a layer over two processes."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from trimtab.doctor import Finding
from trimtab.errors import BackendError
from trimtab.kernels.choose import BACKENDS, KernelChoice, get_backend, names_for
from trimtab.kernels.compiled import CompiledKernels
from trimtab.kernels.compiler import blames_cxx
from trimtab.kernels.selftest import self_test
from trimtab.validation import DTYPES
from trimtab.verify.cases import plan_cases
from trimtab.verify.collect import Verdict
from trimtab.verify.run import run_local

NEEDED = ("float32", "bfloat16")
"""Dtypes without which the kernels that "auto" takes are of no use."""
COMPILER = "install a C++ compiler, such as g++: kernels in C++ take about half the time"
CXX = "unset CXX, or let it name a C++ compiler that works; install g++ if there is none"
WRONG = (
    "do not train on these kernels: name others (`kernels=`), or another torch or driver; a layer refuses them too, at "
    "its first call"
)
LAYER = ("2r-ep2/random/float64", "2r-ep2-sharedmemory/random/float64")
NETWORK = (
    "a host name or interface that Gloo cannot use is the usual cause: set GLOO_SOCKET_IFNAME=lo and run this again; a "
    "firewall on the host's own address is another"
)
OWN = "the layer itself failed: install trimtab and torch afresh; if it stays, report it with what stands above"


@dataclass(frozen=True, kw_only=True)
class Tried:
    """Kernels tried with one dtype: how they passed, or why they were refused, or what is wrong.

    chosen: "auto" takes them on this device, or would before others. about: what they were built for, in lines.
    """

    dtype: str
    chosen: bool
    passed: str = ""
    about: tuple[str, ...] = ()
    refused: str = ""
    fault: str | None = None


def process_groups() -> list[Finding]:
    """Findings about this build's process groups, on this host's GPUs."""
    found, gpus = [Finding("ok", "gloo", "process groups of CPU tensors")], torch.cuda.device_count()
    if not dist.is_gloo_available():
        what = "this torch has no Gloo, so ranks cannot exchange CPU tensors"
        do = "install an official wheel of torch, or build it with USE_DISTRIBUTED=1 USE_GLOO=1"
        found = [Finding("broken", "gloo", what, do)]
    if not gpus:
        return [*found, Finding("note", "nccl", "cannot run here: torch sees no GPU")]
    if dist.is_nccl_available():
        return [*found, Finding("ok", "nccl", f"process groups of tensors on {gpus} GPU(s)")]
    what = "GPUs are here, but this torch has no NCCL for them"
    return [*found, Finding("broken", "nccl", what, "install a CUDA wheel of torch")]


def kernels() -> list[Finding]:
    """On the CPU and on one GPU: what "auto" takes and why, and each set of kernels, self-tested in every dtype."""
    found = []
    for device in [torch.device("cpu"), torch.device("cuda", 0)][: 1 + torch.cuda.is_available()]:
        taken: dict[tuple[str, str], list[str]] = {}
        for dtype in DTYPES:
            taken.setdefault(_taken(device, dtype), []).append(_short(dtype))
        said = "\n".join(f"{device}, {', '.join(dtypes)}: {name}: {why}" for (name, why), dtypes in taken.items())
        auto = {names_for("auto", device)[0], *(name for name, _ in taken)}
        found.append(Finding("broken" if "none" in auto else "ok", "kernels auto", said))
        tried = {name: [_try(name, device, dtype, name in auto) for dtype in DTYPES] for name in BACKENDS}
        found += [judge_kernels(name, device, each) for name, each in tried.items()]
    return found


def _taken(device: torch.device, dtype: torch.dtype) -> tuple[str, str]:
    """What "auto" takes, and why."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            name = KernelChoice("auto").on(device, dtype).name
        except BackendError as error:
            return "none", str(error)
    order = names_for("auto", device)
    if name != order[0]:
        return name, f"what comes before it in the order {', '.join(order)} cannot run or is wrong, see below"
    return name, "; ".join([f"self-tested; first of {', '.join(order)}", *(str(one.message) for one in said)])


def judge_kernels(name: str, device: torch.device, tried: Sequence[Tried]) -> Finding:
    """The finding about one set of kernels. `tried`: in each dtype."""
    where = f"kernels {name}"
    if all(one.refused for one in tried) and len({one.refused for one in tried}) == 1:
        why = tried[0].refused
        what = f"cannot run on {device}: {why}"
        if blames_cxx(why):
            return Finding("broken", where, what, CXX)
        return Finding("note", where, what, COMPILER * why.startswith("no C++ compiler"))
    passed = ", ".join(one.passed for one in tried if one.passed) or "nothing passed"
    lines = [f"{device}: {passed}"]
    lines += dict.fromkeys(line for one in tried for line in one.about)
    lines += [f"{one.dtype}: cannot: {one.refused}" for one in tried if one.refused]
    faults = [one for one in tried if one.fault]
    lines += [f"{one.dtype}: WRONG: {one.fault}" for one in faults]
    if not faults:
        return Finding("ok", where, "\n".join(lines))
    needed = any(one.chosen and one.dtype in NEEDED for one in faults)
    return Finding("broken" if needed else "warn", where, "\n".join(lines), WRONG)


def _try(name: str, device: torch.device, dtype: torch.dtype, chosen: bool) -> Tried:
    short = _short(dtype)
    try:
        kernels = get_backend(name, device)
        computed = kernels.compute_dtype(dtype)
        test = self_test(kernels, device, computed)
    except BackendError as error:
        return Tried(dtype=short, chosen=chosen, refused=str(error))
    how = "" if computed == dtype else f" in {_short(computed)}"
    passed = "" if test.fault else f"{short}{how}"
    about: tuple[str, ...] = ()
    if isinstance(kernels, CompiledKernels):
        about = (f"compiled for {kernels.instructions}", f"bfloat16 products: {kernels.bf16}")
    return Tried(dtype=short, chosen=chosen, passed=passed, about=about, fault=test.fault)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def layer() -> Iterator[Finding]:
    """Findings about a layer over two processes, which it starts, through Gloo and through shared memory."""
    for verdict in run_local(plan_cases("full", 2, only=LAYER), "trimtab", deadline=60.0):
        finding = judge_layer(verdict)
        yield finding
        if finding.severity == "broken":
            return


def judge_layer(verdict: Verdict) -> Finding:
    """The finding about a case of the ledger on two ranks."""
    said = "; ".join(verdict.details)
    carrier = verdict.case.topology.transport.replace("alltoall", "gloo")
    where = f"2 ranks, {carrier}"
    if verdict.status == "ok":
        error = max(verdict.errors.values())
        return Finding("ok", where, f"one layer forward and backward: {error:.1e} from the truth")
    if verdict.status == "lacking" or (carrier != "gloo" and "BackendError" in said):
        return Finding("note", where, f"cannot run here, so 'auto' is alltoall: {said}")
    if verdict.status == "mismatch":
        do = "run `trimtab verify`: it names the first wrong value; do not train on this machine"
        return Finding("broken", where, f"one layer forward and backward: {said}", do)
    do = NETWORK if re.search(r"no answer|onnect|gloo|socket|address|interface", said) else OWN
    return Finding("broken", where, f"two ranks on this host did not come through: {said}", do)
