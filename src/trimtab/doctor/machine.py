"""Cores, threads, devices and the environment variables that steer them."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

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


@dataclass(frozen=True, kw_only=True)
class Machine:
    """cores: usable by this process. threads: torch's. devices: a line on each GPU. host_address: None if the host
    name has none. interfaces: network interfaces. environment: the variables of `PREFIXES` that are set."""

    cores: int
    threads: int
    instructions: str
    devices: tuple[str, ...]
    host: str
    host_address: str | None
    interfaces: tuple[str, ...]
    environment: Mapping[str, str]


def look() -> Machine:
    """This machine."""
    host = socket.gethostname()
    try:
        address = socket.gethostbyname(host)
    except OSError:
        address = None
    return Machine(
        cores=cores(),
        threads=torch.get_num_threads(),
        instructions=torch.backends.cpu.get_cpu_capability(),
        devices=tuple(_device(i) for i in range(torch.cuda.device_count())),
        host=host,
        host_address=address,
        interfaces=tuple(name for _, name in socket.if_nameindex()),
        environment={name: value for name, value in sorted(os.environ.items()) if name.startswith(PREFIXES)},
    )


def judge(m: Machine) -> list[Finding]:
    """Findings about the machine and its environment."""
    found = [Finding("ok", "cores", f"{m.cores} ({m.instructions}), torch uses {m.threads}")]
    if m.threads > m.cores:
        do = f"set OMP_NUM_THREADS to {m.cores} divided by the number of ranks on this host"
        found = [Finding("warn", "cores", f"torch uses {m.threads} threads on {m.cores} cores", do)]
    found += [Finding("ok", "gpu", device) for device in m.devices]
    if not m.devices:
        found.append(Finding("note", "gpu", "none that torch can use: everything runs on the CPU"))
    if m.host_address is None:
        what = f"{m.host} has no address: Gloo cannot tell peers where it is"
        do = f"add it to /etc/hosts, or set GLOO_SOCKET_IFNAME to an interface of {', '.join(m.interfaces)}"
        found.append(Finding("warn", "host name", what, do))
    if m.devices and DUMPS not in m.environment:
        found.append(_no_dumps(DUMPS))
    return found + [_variable(name, value, m) for name, value in m.environment.items()]


def _variable(name: str, value: str, m: Machine) -> Finding:
    """What one environment variable does here."""
    on = value.strip().lower() not in ("", "0", "false", "no", "n")
    shown = f"{name}={value}"
    if name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") and value:
        return _interface(name, value, m)
    if name in WHEN_ON and on:
        return Finding("warn", shown, WHEN_ON[name], "unset it unless it is there for debugging")
    if name in WHEN_OFF and not on:
        return Finding("warn", shown, *WHEN_OFF[name])
    if name == "TORCH_DISTRIBUTED_DEBUG" and value.upper() == "DETAIL":
        return Finding("warn", shown, "collectives are checked one by one, slowly", "unset it")
    if name == DUMPS and not on:
        return _no_dumps(shown)
    if name == "OMP_NUM_THREADS" and value.isdigit() and int(value) > m.cores:
        return Finding("warn", shown, f"more threads than the {m.cores} cores", f"at most {m.cores}")
    return Finding("ok", name, value or "(empty)")


def _no_dumps(shown: str) -> Finding:
    what = "off or not set: whether a NCCL time-out leaves dumps for `trimtab doctor --trace` is up to torch"
    return Finding("note", shown, what, f"set {DUMPS}=1 and TORCH_FR_BUFFER_SIZE=2000")


def _interface(name: str, value: str, m: Machine) -> Finding:
    """Gloo takes names; NCCL prefixes too, `=name` for an exact one and `^name` for any other."""
    wanted = [part.strip() for part in value.lstrip("^=").split(",")]
    exact = name.startswith("GLOO") or value.startswith("=")
    there = [i for w in wanted for i in m.interfaces if i == w or (not exact and i.startswith(w))]
    if there or value.startswith("^"):
        return Finding("ok", name, value)
    do = f"name one of {', '.join(m.interfaces)}, or unset it"
    return Finding("broken", f"{name}={value}", "no such network interface on this host", do)


def _device(index: int) -> str:
    p = torch.cuda.get_device_properties(index)
    return f"cuda:{index} {p.name}, compute capability {p.major}.{p.minor}, {p.total_memory / 2**30:.0f} GiB"
