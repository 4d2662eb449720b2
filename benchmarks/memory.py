"""Memory of one step, counted twice: by PyTorch's storages, and by the pages that the process holds.

Pages see what no operator returns (workspaces of kernels, of libraries); storages see less noise.
"""

from __future__ import annotations

import ctypes
import gc
import re
from pathlib import Path

from benchmarks.subject import Subject

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


def step_bytes(subject: Subject, mode: str) -> dict[str, int]:
    """Peak bytes beyond what was there before one step of `mode`, gradients included.

    resident: growth of the process's peak resident set (Linux; absent elsewhere). Wants malloc "strict".
    tensors: most bytes alive in storages that operators made.
    gradients: what of either the step leaves behind.
    """
    gc.collect()
    found = {"gradients": subject.held}
    from trimtab.plan.ledger import Ledger

    if _CLEAR.exists():
        _trim()
        before = status("VmRSS")
        forget_peak()
        subject.modes[mode]()
        found["resident"] = status("VmHWM") - before
    with Ledger() as live:
        subject.modes[mode]()
    found["tensors"], _ = live.peak()
    return found


def forget_peak() -> None:
    """The peak is from now on what is held now (Linux)."""
    if _CLEAR.exists():
        _CLEAR.write_text("5")


def peak() -> int:
    """The most bytes held since `forget_peak`; 0 where nothing tells."""
    return status("VmHWM") if _STATUS.exists() else 0


def _trim() -> None:
    """Give free memory back, where the C library can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def status(name: str) -> int:
    """Bytes of this process by a name of /proc/self/status (Linux)."""
    found = re.search(rf"^{name}:\s+(\d+) kB", _STATUS.read_text(), re.MULTILINE)
    assert found is not None, f"{_STATUS} has no {name}"
    return int(found[1]) * 1024
