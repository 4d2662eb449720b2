"""Counts launches and waits of paths on fake CUDA tensors, for test_fake_cuda.py; prints a JSON object by case.

    python -m gpu_evidence [--no-triton] CASE...

A process of its own: guard.cpp must be loaded before PyTorch.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path


def load_guard() -> None:
    """Raises CalledProcessError: the compiler refuses it."""
    found = importlib.util.find_spec("torch")
    assert found is not None
    torch = Path(str(found.origin)).parent
    lib = torch / "lib"
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "guard.so"
        command = ["g++", "-shared", "-fPIC", "-O0", "-std=c++20", f"-I{torch}/include", f"-L{lib}", "-o", library]
        subprocess.run([*command, Path(__file__).with_name("guard.cpp"), "-lc10", "-ltorch_cpu"], check=True)
        for path in (lib / "libc10.so", lib / "libtorch_cpu.so", library):
            ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


def main() -> None:
    load_guard()
    if "--no-triton" in sys.argv:
        sys.modules["triton"] = None  # type: ignore[assignment]
    from gpu_evidence.fake_cuda import counted

    print(json.dumps({case: counted(case) for case in sys.argv[1:] if not case.startswith("-")}), flush=True)
    os._exit(0)  # the threads of autograd's engine would wait for a device


if __name__ == "__main__":
    main()
