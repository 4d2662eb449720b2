"""Cores, threads, devices and the environment variables that steer them."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence

import torch

from trimtab.doctor.findings import Finding
from trimtab.launched import cores

PREFIXES = (
    "OMP_", "MKL_NUM", "KMP_", "GLOO_", "NCCL_", "TORCH_NCCL_", "TORCH_FR_", "TORCH_DISTRIBUTED_", "TORCH_GLOO_",
    "MALLOC_", "LD_PRELOAD", "CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING", "RANK", "LOCAL_RANK", "WORLD_SIZE",
    "MASTER_", "LOCAL_WORLD_SIZE", "GLIBC_TUNABLES",
)  # fmt: skip
"""Environment variables that are shown."""
WHEN_ON = {
    "NCCL_P2P_DISABLE": "GPUs of one host do not talk directly",
    "NCCL_SHM_DISABLE": "processes of one host do not share memory",
    "NCCL_IB_DISABLE": "hosts do not talk over InfiniBand or RoCE",
    "CUDA_LAUNCH_BLOCKING": "every kernel is waited for",
}
"""What a variable costs where it is set."""
NO_TRACE = ("the Flight Recorder is off: a hang leaves no trace", "unset it, or set it to 2000")
WHEN_OFF = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": ("a NCCL collective whose peer is gone waits for ever", "unset it"),
    "TORCH_FR_BUFFER_SIZE": NO_TRACE,
    "TORCH_NCCL_TRACE_BUFFER_SIZE": NO_TRACE,
}
"""What a variable costs where it is 0, and what to do."""
DUMPS = "TORCH_NCCL_DUMP_ON_TIMEOUT"


def look() -> list[Finding]:
    """Findings about this machine and its environment."""
    interfaces = [name for _, name in socket.if_nameindex()]
    found = judge_cores(cores(), torch.get_num_threads())
    found += [Finding("ok", "gpu", _device(i)) for i in range(torch.cuda.device_count())]
    if not torch.cuda.device_count():
        found.append(Finding("note", "gpu", "none that torch can use: everything runs on the CPU"))
    elif DUMPS not in os.environ:
        found.append(_no_dumps(DUMPS))
    host = socket.gethostname()
    try:
        socket.gethostbyname(host)
    except OSError:
        what = f"{host} has no address: Gloo cannot tell peers where it is"
        do = f"add it to /etc/hosts, or set GLOO_SOCKET_IFNAME to an interface of {', '.join(interfaces)}"
        found.append(Finding("warn", "host name", what, do))
    return found + judge_environment(os.environ, cores(), interfaces)


def judge_cores(usable: int, threads: int) -> list[Finding]:
    """The finding about torch's threads on the cores that this process may use."""
    if threads > usable:
        do = f"set OMP_NUM_THREADS to {usable} divided by the number of ranks on this host"
        return [Finding("warn", "cores", f"torch uses {threads} threads on {usable} cores", do)]
    return [Finding("ok", "cores", f"{usable} ({torch.backends.cpu.get_cpu_capability()}), torch uses {threads}")]


def judge_environment(environment: Mapping[str, str], usable: int, interfaces: Sequence[str]) -> list[Finding]:
    """Findings about the variables of `PREFIXES`, on a host of so many cores and these network interfaces."""
    shown = [(name, value) for name, value in sorted(environment.items()) if name.startswith(PREFIXES)]
    return [_variable(name, value, usable, interfaces) for name, value in shown]


def _variable(name: str, value: str, usable: int, interfaces: Sequence[str]) -> Finding:
    on = value.strip().lower() not in ("", "0", "false", "no", "n")
    shown = f"{name}={value}"
    if name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") and value:
        return _interface(name, value, interfaces)
    if name in WHEN_ON and on:
        return Finding("warn", shown, WHEN_ON[name], "unset it unless it is there for debugging")
    if name in WHEN_OFF and not on:
        return Finding("warn", shown, *WHEN_OFF[name])
    if name == "TORCH_DISTRIBUTED_DEBUG" and value.upper() == "DETAIL":
        return Finding("warn", shown, "collectives are checked one by one, slowly", "unset it")
    if name == DUMPS and not on:
        return _no_dumps(shown)
    if name == "OMP_NUM_THREADS" and value.isdigit() and int(value) > usable:
        return Finding("warn", shown, f"more threads than the {usable} cores", f"at most {usable}")
    return Finding("ok", name, value or "(empty)")


def _no_dumps(shown: str) -> Finding:
    what = "off or not set: whether a NCCL time-out leaves dumps for `trimtab doctor --trace` is up to torch"
    return Finding("note", shown, what, f"set {DUMPS}=1 and TORCH_FR_BUFFER_SIZE=2000")


def _interface(name: str, value: str, interfaces: Sequence[str]) -> Finding:
    """Gloo takes names; NCCL prefixes too, `=name` for an exact one and `^name` for any other."""
    wanted = [part.strip() for part in value.lstrip("^=").split(",")]
    exact = name.startswith("GLOO") or value.startswith("=")
    there = [i for w in wanted for i in interfaces if i == w or (not exact and i.startswith(w))]
    if there or value.startswith("^"):
        return Finding("ok", name, value)
    do = f"name one of {', '.join(interfaces)}, or unset it"
    return Finding("broken", f"{name}={value}", "no such network interface on this host", do)


def _device(index: int) -> str:
    p = torch.cuda.get_device_properties(index)
    return f"cuda:{index} {p.name}, compute capability {p.major}.{p.minor}, {p.total_memory / 2**30:.0f} GiB"
