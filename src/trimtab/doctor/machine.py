"""Findings about versions, cores, devices, environment variables, and the ranks of this host."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import re
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from trimtab import __version__
from trimtab.doctor import Finding
from trimtab.errors import first_line
from trimtab.extras import install
from trimtab.guard.peers import process_state, start_of
from trimtab.guard.record import Place
from trimtab.processes import cores

TORCH = (2, 11)
"""The oldest torch."""
TRANSFORMERS = (5, 23)
"""The oldest transformers; the next major version is not known to work."""
OPTIONAL = {
    "transformers": "MoE families of transformers (trimtab.integrations.transformers)",
    "accelerate": "loading transformers models with a distributed config",
    "torchtitan": "trimtab's exchange and experts in torchtitan's MoE (trimtab.integrations.torchtitan)",
    "triton": "Triton kernels on a GPU",
}
PREFIXES = (
    "OMP_", "MKL_NUM", "KMP_", "GLOO_", "NCCL_", "TORCH_NCCL_", "TORCH_FR_", "TORCH_DISTRIBUTED_", "TORCH_GLOO_",
    "MALLOC_", "LD_PRELOAD", "CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING", "RANK", "LOCAL_RANK", "WORLD_SIZE",
    "MASTER_", "LOCAL_WORLD_SIZE", "GLIBC_TUNABLES",
)  # fmt: skip
"""Environment variables that are shown."""
DUMPS = "TORCH_NCCL_DUMP_ON_TIMEOUT"


def _on(value: str) -> bool:
    return value.strip().lower() not in ("", "0", "false", "no", "n")


def _off(value: str) -> bool:
    return not _on(value)


DEBUGGING = "unset it unless it is there for debugging"
NO_TRACE = (_off, "the Flight Recorder is off: a hang leaves no trace", "unset it, or set it to 2000")
COSTLY: dict[str, tuple[Callable[[str], bool], str, str]] = {
    "NCCL_P2P_DISABLE": (_on, "GPUs of one host do not talk directly", DEBUGGING),
    "NCCL_SHM_DISABLE": (_on, "processes of one host do not share memory", DEBUGGING),
    "NCCL_IB_DISABLE": (_on, "hosts do not talk over InfiniBand or RoCE", DEBUGGING),
    "CUDA_LAUNCH_BLOCKING": (_on, "every kernel is waited for", DEBUGGING),
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": (_off, "a NCCL collective whose peer is gone waits for ever", "unset it"),
    "TORCH_FR_BUFFER_SIZE": NO_TRACE,
    "TORCH_NCCL_TRACE_BUFFER_SIZE": NO_TRACE,
    "TORCH_DISTRIBUTED_DEBUG": (lambda v: v.upper() == "DETAIL", "each collective is checked, slowly", "unset it"),
}
"""Variables: when one costs something, what, and what to do."""


def versions() -> list[Finding]:
    """Findings about this machine's versions."""
    system = f"Python {platform.python_version()}, {platform.system()} {platform.release()} {platform.machine()}"
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else "none"  # type: ignore[no-untyped-call]
    built = f"CUDA {torch.version.cuda or getattr(torch.version, 'hip', None) or 'none'}, NCCL {nccl}"
    own = Finding("ok", "trimtab", f"{__version__}, {system}")
    return [own, judge_torch(torch.__version__, built), *(judge_package(name, _installed(name)) for name in OPTIONAL)]


def judge_torch(version: str, built: str) -> Finding:
    """The finding about torch of that version, built with CUDA and NCCL of those."""
    what = f"{version}, {built}"
    if _numbers(version) >= TORCH:
        return Finding("ok", "torch", what)
    return Finding("broken", "torch", what, f"install torch {TORCH[0]}.{TORCH[1]} or newer")


def judge_package(name: str, version: str | None) -> Finding:
    """The finding about an optional package; None: not installed."""
    if version is None:
        how = f" ({install(name)})" if install(name) else ""
        return Finding("note", name, f"not installed: needed for {OPTIONAL[name]}{how}")
    if name != "transformers":
        return Finding("ok", name, version)
    oldest, next_major = TRANSFORMERS, TRANSFORMERS[0] + 1
    if not oldest <= _numbers(version) < (next_major,):
        do = f"install transformers {oldest[0]}.{oldest[1]} or newer, below {next_major}"
        return Finding("warn", name, f"{version} is outside of what trimtab is made for", do)
    try:
        importlib.import_module(name)
    except Exception as error:  # a package that is half there raises anything
        what = f"{version} is installed and cannot be imported: {first_line(error, typed=True)}"
        return Finding("warn", name, what, "install it anew")
    return Finding("ok", name, version)


def environment() -> list[Finding]:
    """Findings about this machine and its environment."""
    interfaces = [name for _, name in socket.if_nameindex()]
    found = [judge_cores(cores(), torch.get_num_threads())]
    found += [Finding("ok", "gpu", _device(i)) for i in range(torch.cuda.device_count())]
    if not torch.cuda.device_count():
        found.append(Finding("note", "gpu", "none that torch can use: everything runs on the CPU"))
    elif _off(os.environ.get(DUMPS, "")):
        what = "off or not set: whether a NCCL time-out leaves dumps for `trimtab doctor --trace` is up to torch"
        found.append(Finding("note", DUMPS, what, f"set {DUMPS}=1 and TORCH_FR_BUFFER_SIZE=2000"))
    host = socket.gethostname()
    try:
        socket.gethostbyname(host)
    except OSError:
        what = f"{host} has no address: Gloo cannot tell peers where it is"
        do = f"add it to /etc/hosts, or set GLOO_SOCKET_IFNAME to an interface of {', '.join(interfaces)}"
        found.append(Finding("warn", "host name", what, do))
    return found + judge_environment(os.environ, interfaces)


def judge_cores(usable: int, threads: int) -> Finding:
    """The finding about torch's threads on the cores that this process may use."""
    if threads > usable:
        do = f"set OMP_NUM_THREADS to {usable} divided by the number of ranks on this host"
        return Finding("warn", "cores", f"torch uses {threads} threads on {usable} cores", do)
    return Finding("ok", "cores", f"{usable} ({torch.backends.cpu.get_cpu_capability()}), torch uses {threads}")


def judge_environment(variables: Mapping[str, str], interfaces: Sequence[str]) -> list[Finding]:
    """Findings about the variables of `PREFIXES`, on a host of these network interfaces."""
    found = []
    for name, value in sorted(variables.items()):
        own_interface = name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") and value
        if own_interface and not _is_interface(name, value, interfaces):
            do = f"name one of {', '.join(interfaces)}, or unset it"
            found.append(Finding("broken", f"{name}={value}", "no such network interface on this host", do))
        elif name in COSTLY and COSTLY[name][0](value):
            found.append(Finding("warn", f"{name}={value}", *COSTLY[name][1:]))
        elif name.startswith(PREFIXES):
            found.append(Finding("ok", name, value or "(empty)"))
    return found


def _is_interface(name: str, value: str, interfaces: Sequence[str]) -> bool:
    """Gloo takes names; NCCL prefixes too, `=name` for an exact one and `^name` for any other."""
    wanted = [part.strip() for part in value.lstrip("=").split(",")]
    if name.startswith("GLOO") or value.startswith("="):
        return not set(wanted).isdisjoint(interfaces)
    return value.startswith("^") or any(i.startswith(w) for w in wanted for i in interfaces)


def judge_places(places: Iterable[tuple[int, int, Place]]) -> list[Finding]:
    """Findings about what `trimtab.guard.record.places_here` read from outside; the ranks need not answer."""
    found = []
    for pid, rank, place in places:
        stopped = process_state(pid, start_of(pid)) == "stopped"
        what = f"{place}, for {place.seconds:.0f} s" + stopped * ": the process is stopped (SIGSTOP or a debugger)"
        where, do = f"pid {pid}, rank {rank} of its group", "continue it (kill -CONT) or end it" * stopped
        found.append(Finding("broken" if stopped else "ok", where, what, do))
    what = "no process that may be read here is in a guarded layer, or has been in one"
    do = "run this on the hosts of the job, as its user or as root; in a container, inside of it"
    return found or [Finding("note", "this host", what, do)]


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: (2, 13) of 2.13.0+cpu."""
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:2])


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _device(index: int) -> str:
    p = torch.cuda.get_device_properties(index)
    return f"cuda:{index} {p.name}, compute capability {p.major}.{p.minor}, {p.total_memory / 2**30:.0f} GiB"
