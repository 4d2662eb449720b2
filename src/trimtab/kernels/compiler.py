"""C++ sources to a library, compiled once for a machine and kept in the user's cache folder. And facts of the machine.

The library's name is a hash of the sources, the compiler, its flags and the CPU's own. Beside it lies the hash of its
bytes: one that is not whole is made again. Ranks that start together wait for the one that compiles.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import logging
import os
import platform
import re
import shlex
import shutil
import stat
import subprocess
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import torch

from trimtab.errors import BackendError, full_disk, is_full

FLAGS = ("-std=c++17", "-O2", "-ffp-contract=fast", "-fno-math-errno", "-fopenmp", "-fPIC", "-fvisibility=hidden")
"""Hidden, what a library does not offer is its own: of two in a process none takes the other's templates."""
LIMIT = 300  # seconds for a compiler that should take some
PATIENCE = 2 * LIMIT + 30  # for another process, which compiles and links
SILENT = 10  # seconds of waiting for another process before a word about it
_log = logging.getLogger(__name__)
_failed: dict[tuple[str | None, ...], str] = {}
"""Reasons for which this process has no library: it is not tried again, for each layer would wait for the compiler."""


def processor_facts() -> dict[str, str]:
    """Facts of the first core by Linux's names ("vendor_id", "model name", "flags"); none on other systems."""
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    except OSError:
        return {}
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in first.splitlines())}


def processor_name() -> str:
    """The maker's or the system's name, with family and model: virtual machines' generations often share a name."""
    facts = processor_facts()
    named = facts.get("model name") or platform.processor() or platform.machine()
    kind = facts.get("cpu family"), facts.get("model")
    return named if None in kind else f"{named} (family {kind[0]}, model {kind[1]})"


def multiplies_bf16() -> bool:
    """True if the processor has instructions for products of bfloat16."""
    has = torch.cpu.get_capabilities()
    return bool(has.get("avx512_bf16") or has.get("amx_bf16"))


def find_compiler() -> list[str]:
    """The C++ compiler that CXX names, with its options there, else the first of the usual ones.

    Raises:
        BackendError: there is none.
    """
    named = os.environ.get("CXX")
    try:
        commands = [shlex.split(named)] if named else [["c++"], ["g++"], ["clang++"]]
    except ValueError:  # a quote without its end
        commands = []
    for command in commands:
        if command and (found := shutil.which(command[0])):
            return [found, *command[1:]]
    raise BackendError(
        f"CXX={named!r} is no program" if named else "no C++ compiler: none of c++, g++, clang++ is installed"
    )


def blames_cxx(reason: str) -> bool:
    """True if this reason for a lack of kernels is the compiler that CXX names."""
    return bool(os.environ.get("CXX")) and reason.startswith(("CXX=", "the C++ compiler"))


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/trimtab, else ~/.cache/trimtab. A relative one is none, as its specification has it. Raises
    OSError where there is no home, as of a user that the system does not know."""
    home = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        return (home if home.is_absolute() else Path.home() / ".cache") / "trimtab"
    except RuntimeError as error:
        raise FileNotFoundError("this user has no home folder") from error


def spare_folder() -> Path:
    """For where `cache_folder` cannot be written: one for this user among the temporary files. Raises OSError."""
    return Path(tempfile.gettempdir()) / f"trimtab-{os.getuid()}"


def load(main: Path, sources: Sequence[Path], defines: Sequence[str] = ()) -> ctypes.CDLL:
    """The library of `main`, for this machine; the arguments and errors of `made`."""
    library = made(main, sources, defines)
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise BackendError(f"the compiled kernels cannot be loaded from {library.parent}: {error}") from error


def made(main: Path, sources: Sequence[Path], defines: Sequence[str] = (), march: str = "native") -> Path:
    """The path of the library of `main`, which includes the other `sources`; compiled if the cache does not have it.

    defines: macros, as in `NAME` or `NAME=value`. march: the machine that it is for. Where the cache folder cannot be
    written it is kept among the temporary files, with a warning.

    Raises:
        BackendError: no compiler, or it fails, or another process has not done with it in time, or neither folder can
            be written.
    """
    compiler, flags, name = _wanted(main, sources, defines, march)
    tried = name, os.environ.get("XDG_CACHE_HOME"), os.environ.get("HOME"), os.environ.get("TMPDIR")
    if tried in _failed and _found(name) is None:
        raise BackendError(_failed[tried])
    refused: list[str] = []
    for folder_of in (cache_folder, spare_folder):
        try:
            folder = folder_of()
            if refused:
                _own(folder)
            _make(compiler, flags, main, folder / name)
        except OSError as error:
            refused.append(str(error))
            continue
        except BackendError as error:
            _failed[tried] = str(error)
            raise
        if refused:
            warnings.warn(
                f"the compiled kernels are kept in {folder}, because the cache folder cannot be used ({refused[0]}): "
                "set XDG_CACHE_HOME to a folder that can be written and stays",
                stacklevel=2,
            )
        return folder / name
    _failed[tried] = f"the compiled kernels cannot be kept anywhere: {'; '.join(refused)}; set XDG_CACHE_HOME"
    raise BackendError(_failed[tried])


def is_made(main: Path, sources: Sequence[Path]) -> bool:
    """True if one of the folders has it, so that `load` has nothing to compile; the errors of `made`."""
    return _found(_wanted(main, sources, (), "native")[2]) is not None


def _found(name: str) -> Path | None:
    """Where a library of this name lies whole."""
    for folder_of in (cache_folder, spare_folder):
        with contextlib.suppress(OSError):
            folder = folder_of()
            if _whole(folder / name):
                if folder_of is spare_folder:
                    _own(folder)
                return folder / name
    return None


def _own(folder: Path) -> None:
    """Make a folder where all may write, or take it if it is there and nobody else could put a library into it."""
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode) or found.st_mode & 0o022:
        raise PermissionError(f"{folder}: others may write there")
    above = folder.parent.stat()
    if above.st_uid not in (0, os.getuid()) or (above.st_mode & 0o022 and not above.st_mode & stat.S_ISVTX):
        raise PermissionError(f"{folder.parent}: others may rename what is there")


def _make(compiler: Sequence[str], flags: Sequence[str], main: Path, target: Path) -> None:
    """Compile `target`, unless it is there, by this process alone. Raises OSError where its folder does not take it."""
    folder = target.parent
    try:
        if not _whole(target):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with open(target.with_suffix(".lock"), "w") as lock:
                _take(lock)
                if not _whole(target):
                    _compile(compiler, flags, main, target)
        _tidy(folder)
    except OSError as error:
        raise OSError(f"{folder}: {error.strerror or error}{full_disk(folder)}") from error


def _take(lock: IO[str]) -> None:
    """Wait for the lock, which is given back when the file is closed, or the process ends."""
    start, told = time.monotonic(), False
    while True:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        waited = time.monotonic() - start
        if waited > PATIENCE:
            raise BackendError(
                f"another process has held {lock.name} for more than {PATIENCE} s, to compile the kernels: "
                "if it is stopped, end it, and start this one again"
            )
        if waited > SILENT and not told:
            told = True
            _log.warning("trimtab: waiting for the process that compiles kernels and holds %s", lock.name)
        time.sleep(0.05)


def _tidy(cache: Path) -> None:
    """Remove leftovers of processes killed while they compiled, on this host or on one that sees no lock."""
    for left in cache.glob("*.making-*"):
        with contextlib.suppress(OSError):  # as where another process removes it, too
            if time.time() - left.stat().st_mtime > 2 * LIMIT:
                shutil.rmtree(left, ignore_errors=True)


def _whole(library: Path) -> bool:
    try:
        return library.with_suffix(".sha256").read_bytes() == hashlib.sha256(library.read_bytes()).hexdigest().encode()
    except OSError:
        return False


def _wanted(
    main: Path, sources: Sequence[Path], defines: Sequence[str], march: str
) -> tuple[list[str], tuple[str, ...], str]:
    """Compiler, flags, and the name of the library's file."""
    compiler = find_compiler()
    flags = (*FLAGS, f"-march={march}", *(f"-D{define}" for define in defines))
    found = hashlib.sha256()
    program, *options = compiler
    real = os.path.realpath(program)  # the compiler itself, or what runs it by the name of its link, as ccache does
    about = os.stat(real)
    for part in (program, real, about.st_size, about.st_mtime_ns, *options, *flags, _openmp(), _cpu()):
        found.update(f"{part}\n".encode())
    for source in sorted(sources):
        found.update(source.read_bytes())
    return compiler, flags, f"{main.stem}-{found.hexdigest()[:16]}.so"


def _cpu() -> str:
    """The facts that -march=native looks at."""
    facts = processor_facts() or {"model name": processor_name()}
    wanted = ("flags", "Features", "model", "vendor", "CPU")
    return "\n".join(f"{name}: {value}" for name, value in facts.items() if name.startswith(wanted))


def _openmp() -> str:
    """The OpenMP runtime that torch brings: with two of them, twice as many threads would compete."""
    found = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    return str(found[0]) if found else "-fopenmp"


def _compile(compiler: Sequence[str], flags: Sequence[str], main: Path, target: Path) -> None:
    _log.warning("trimtab: compiling kernels for this CPU, once, about 15 s; kept in %s", target.parent)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f"{target.stem}.making-") as made_in:
        folder = Path(made_in)
        made, library, digest = (folder / name for name in ("made.o", "made.so", "digest"))
        _run([*compiler, *flags, "-c", str(main), "-o", str(made)], folder)
        _run([*compiler, "-shared", str(made), _openmp(), "-o", str(library)], folder)
        digest.write_text(hashlib.sha256(library.read_bytes()).hexdigest())
        library.replace(target)
        digest.replace(target.with_suffix(".sha256"))


def _run(command: list[str], folder: Path) -> None:
    """Raises BackendError where the compiler fails, OSError where that is for want of room in `folder`."""
    said = f"the C++ compiler failed: {shlex.join(command)}"
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=LIMIT, check=False,
            env={**os.environ, "TMPDIR": str(folder), "LC_ALL": "C"},
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise BackendError(f"the C++ compiler took more than {LIMIT} s: {shlex.join(command)}") from error
    except OSError as error:
        raise BackendError(f"{said}\n{error}") from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        told = [line for line in lines if "error" in line.lower()][:3] or lines[-3:]
        if done.returncode < 0:
            told += [f"it was ended by signal {-done.returncode}; 9 often means that memory ran out"]
        text = "\n".join([said, *(told or [f"exit code {done.returncode}, and not a word"])])
        no_room = re.search("No space left|quota exceeded|File too large", done.stderr) or is_full(folder)
        raise OSError(text.rpartition("\n")[2]) if no_room else BackendError(text)
    if not Path(command[-1]).is_file():
        raise BackendError(f"{said}\nit ended well and did not write {command[-1]}")
