"""Calls under an allocator's hook: in a fresh process, whose malloc and mmap are counted, and so are its children's."""

from __future__ import annotations

import ctypes
import gc
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from helpers.commands import run_python
from trimtab.kernels.compiler import find_compiler

HERE = Path(__file__).parent


class Heap:
    """Bytes in this process's malloc and anonymous mappings."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)
        for name in ("heap_now", "heap_most"):
            getattr(self._library, name).restype = ctypes.c_long

    def now(self) -> int:
        gc.collect()
        return int(self._library.heap_now())

    def most(self, step: Any, foreach: bool = False) -> int:
        """At once in the second of two steps of a `plan.stages.Step`, by a loop that shares no code with a plan's."""
        optimizer = step.optimizer()
        for group in optimizer.param_groups if foreach else ():
            group["foreach"] = True
        for _ in range(2):
            gc.collect()
            self._library.heap_reset()
            for _ in range(step.grad_accum):
                step.loss().backward()
            step.clip()
            optimizer.step()
            optimizer.zero_grad()
        return int(self._library.heap_most())


def compiled_hook(folder: Path) -> Path:
    hook = folder / "heap.so"
    command = [*find_compiler(), "-O2", "-shared", "-fPIC", "-o", str(hook), str(HERE / "heap.cpp"), "-ldl"]
    subprocess.run(command, check=True, timeout=120)
    return hook


def under(hook: Path, fn: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """What `fn(*args, **options)` returns, a function of a module."""
    file = hook.with_name("call.pkl")
    file.write_bytes(pickle.dumps((fn, args, options)))
    path = os.pathsep.join([str(HERE.parent), *sys.path])
    more = {"LD_PRELOAD": str(hook), "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = run_python("-m", "plan.hooked", file, env=os.environ | more, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return pickle.loads(file.read_bytes())


def main() -> None:
    import torch

    torch.set_num_threads(1)
    torch.backends.mkldnn.set_flags(False)  # oneDNN's own memory is in no tensor
    file = Path(sys.argv[1])
    fn, args, options = pickle.loads(file.read_bytes())
    file.write_bytes(pickle.dumps(fn(*args, **options)))


if __name__ == "__main__":
    main()
