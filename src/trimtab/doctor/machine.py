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
    found = [Finding(severity="ok", where="cores", what=f"{m.cores} ({m.instructions}), torch uses {m.threads}")]
    if m.threads > m.cores:
        found[0] = Finding(
            severity="warn", where="cores", what=f"torch uses {m.threads} threads on {m.cores} cores",
            do=f"set OMP_NUM_THREADS to {m.cores} divided by the number of ranks on this host",
        )  # fmt: skip
    found += [Finding(severity="ok", where="gpu", what=device) for device in m.devices]
    if not m.devices:
        found.append(Finding(severity="note", where="gpu", what="none that torch can use: everything runs on the CPU"))
    if m.host_address is None:
        found.append(
            Finding(
                severity="warn", where="host name", what=f"{m.host} has no address: Gloo cannot tell peers where it is",
                do="add it to /etc/hosts, or set GLOO_SOCKET_IFNAME to an interface of " + ", ".join(m.interfaces),
            )
        )  # fmt: skip
    variables = dict.fromkeys((*m.environment, *("TORCH_NCCL_DUMP_ON_TIMEOUT" for _ in m.devices[:1])))
    found += [_variable(name, m.environment.get(name), m) for name in variables]
    return found


def _variable(name: str, value: str | None, m: Machine) -> Finding:
    """What one environment variable does here."""
    on = value is not None and value.strip().lower() not in ("", "0", "false", "no", "n")
    shown = f"{name}={value}"
    if name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") and value:
        return _interface(name, value, m)
    slow = {
        "NCCL_P2P_DISABLE": "GPUs of one host do not talk directly",
        "NCCL_SHM_DISABLE": "processes of one host do not share memory",
        "NCCL_IB_DISABLE": "hosts do not talk over InfiniBand or RoCE",
        "CUDA_LAUNCH_BLOCKING": "every kernel is waited for",
    }
    if name in slow and on:
        return Finding(severity="warn", where=shown, what=slow[name], do="unset it unless it is there for debugging")
    if name == "TORCH_DISTRIBUTED_DEBUG" and (value or "").upper() == "DETAIL":
        return Finding(severity="warn", where=shown, what="collectives are checked one by one, slowly", do="unset it")
    if name == "TORCH_NCCL_ASYNC_ERROR_HANDLING" and not on:
        return Finding(
            severity="warn", where=shown, what="a NCCL collective whose peer is gone waits for ever", do="unset it"
        )
    if name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE") and not on:
        return Finding(
            severity="warn", where=shown, what="the Flight Recorder is off: a hang leaves no trace",
            do="unset it, or set it to 2000",
        )  # fmt: skip
    if name == "TORCH_NCCL_DUMP_ON_TIMEOUT" and not on:
        return Finding(
            severity="note", where=shown if value is not None else name,
            what="off or not set: whether a NCCL time-out leaves dumps for `trimtab doctor --trace` is up to torch",
            do="set TORCH_NCCL_DUMP_ON_TIMEOUT=1 and TORCH_FR_BUFFER_SIZE=2000",
        )  # fmt: skip
    if name == "OMP_NUM_THREADS" and value and value.isdigit() and int(value) > m.cores:
        return Finding(
            severity="warn", where=shown, what=f"more threads than the {m.cores} cores", do=f"at most {m.cores}"
        )
    return Finding(severity="ok", where=name, what=value or "(empty)")


def _interface(name: str, value: str, m: Machine) -> Finding:
    """Gloo takes names; NCCL prefixes too, `=name` for an exact one and `^name` for any other."""
    wanted = [part.strip() for part in value.lstrip("^=").split(",")]
    exact = name.startswith("GLOO") or value.startswith("=")
    there = [i for w in wanted for i in m.interfaces if i == w or (not exact and i.startswith(w))]
    if there or value.startswith("^"):
        return Finding(severity="ok", where=name, what=value)
    return Finding(
        severity="broken", where=f"{name}={value}", what="no such network interface on this host",
        do="name one of " + ", ".join(m.interfaces) + ", or unset it",
    )  # fmt: skip


def _device(index: int) -> str:
    p = torch.cuda.get_device_properties(index)
    return f"cuda:{index} {p.name}, compute capability {p.major}.{p.minor}, {p.total_memory / 2**30:.0f} GiB"
