"""C++ sources to a library that is loaded, compiled once for a machine and kept in the user's cache folder.

The name of the library is a hash of the sources, the compiler, its flags and the CPU's own flags, so a library is
never loaded that was made from others or for another CPU. Ranks that start together wait for the one that compiles.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from trimtab.errors import BackendError
from trimtab.kernels import processor

FLAGS = ("-std=c++17", "-O2", "-ffp-contract=fast", "-fno-math-errno", "-fopenmp", "-fPIC", "-fvisibility=hidden")
"""Hidden, what a library does not offer is its own: of two in a process none takes the other's templates."""
LIMIT = 300  # seconds for a compiler that should take some


def find_compiler() -> str:
    """The C++ compiler that CXX names, else the first of the usual ones.

    Raises:
        BackendError: there is none.
    """
    named = os.environ.get("CXX")
    for name in (named,) if named else ("c++", "g++", "clang++"):
        if found := shutil.which(name):
            return os.path.realpath(found) if named is None else found
    raise BackendError(
        f"CXX={named!r} is no program" if named else "no C++ compiler: none of c++, g++, clang++ is installed"
    )


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/trimtab, else ~/.cache/trimtab."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "trimtab"


def load(main: Path, sources: Sequence[Path], defines: Sequence[str] = ()) -> ctypes.CDLL:
    """The library of `main`, for this machine; the arguments and errors of `made`."""
    library = made(main, sources, defines)
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise BackendError(f"the compiled kernels cannot be loaded from {library.parent}: {error}") from error


def made(main: Path, sources: Sequence[Path], defines: Sequence[str] = (), march: str = "native") -> Path:
    """Where the library of `main` lies, which includes the other `sources`; compiled if the cache does not have it.

    defines: macros, as in `NAME` or `NAME=value`. march: the machine that it is for.

    Raises:
        BackendError: no compiler, or it fails, or the cache folder cannot be written.
    """
    compiler = find_compiler()
    flags = (*FLAGS, f"-march={march}", *(f"-D{define}" for define in defines))
    target = cache_folder() / f"{main.stem}-{_key(compiler, flags, sources)}.so"
    try:
        if not target.exists():
            target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with open(target.with_suffix(".lock"), "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # given back when the file is closed, or the process ends
                if not target.exists():
                    _compile(compiler, flags, main, target)
    except OSError as error:
        raise BackendError(f"the compiled kernels cannot be kept in {target.parent}: {error}") from error
    return target


def _key(compiler: str, flags: Sequence[str], sources: Sequence[Path]) -> str:
    found = hashlib.sha256()
    stat = os.stat(compiler)
    for part in (compiler, stat.st_size, stat.st_mtime_ns, *flags, _openmp(), _cpu()):
        found.update(f"{part}\n".encode())
    for source in sorted(sources):
        found.update(source.read_bytes())
    return found.hexdigest()[:16]


def _cpu() -> str:
    """What -march=native looks at."""
    facts = processor.told() or {"model name": processor.name()}
    wanted = ("flags", "Features", "model", "vendor", "CPU")
    return "\n".join(f"{name}: {value}" for name, value in facts.items() if name.startswith(wanted))


def _openmp() -> str:
    """The OpenMP runtime that torch brings: with two of them, twice as many threads would compete."""
    found = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    return str(found[0]) if found else "-fopenmp"


def _compile(compiler: str, flags: Sequence[str], main: Path, target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made, library = os.path.join(folder, "made.o"), os.path.join(folder, "made.so")
        _run([compiler, *flags, "-c", str(main), "-o", made])
        _run([compiler, "-shared", made, _openmp(), "-o", library])
        os.replace(library, target)


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
    except subprocess.TimeoutExpired as error:
        raise BackendError(f"the C++ compiler took more than {LIMIT} s: {' '.join(command)}") from error
    if done.returncode:
        raise BackendError(f"the C++ compiler failed: {' '.join(command)}\n{done.stderr.strip()[-2000:]}")
