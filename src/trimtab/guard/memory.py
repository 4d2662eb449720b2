"""Shared memory without a file name: what one process creates and others of its host map.

Nothing is left in the file system, whatever ends the processes: the memory is gone with the last that has it mapped.

Python's own `mmap` keeps a file descriptor for each mapping; a rank that watches all its peers in every layer would run
out of them. Here only the owner keeps one.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from typing import Any

SIZE = 1 << 16
"""Bytes of a guard's record: whole pages, which take memory where they are written."""


def create(name: str) -> tuple[Any, int]:
    """Zeros, as a writable buffer, and the descriptor by which others find them (-1: they cannot)."""
    fd = reserve(name, SIZE)
    if fd < 0:
        return mmap.mmap(-1, SIZE), -1
    return map_range(fd, SIZE), fd


def reserve(name: str, size: int) -> int:
    """The descriptor of `size` bytes that take no memory until they are written; -1 where the system has none.

    OSError if the process may not have a file of that size (`ulimit -f`).
    """
    if not hasattr(os, "memfd_create"):
        return -1
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, size)
    except OSError:
        os.close(fd)
        raise
    return fd


def open_readonly(path: str) -> Any:
    """The record behind a path, as a buffer. It stays readable when its owner dies. OSError if it cannot be read."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if os.fstat(fd).st_size != SIZE:
            raise OSError(f"{path} does not hold a record of {SIZE} bytes")
        return map_range(fd, SIZE, writable=False)
    finally:
        os.close(fd)


def map_range(fd: int, size: int, offset: int = 0, *, writable: bool = True) -> Any:
    """`size` bytes from `offset` (a multiple of the page size), as a buffer; unmapped when nobody holds it any more."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64
    )  # fmt: skip
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    address = libc.mmap(None, size, protection, mmap.MAP_SHARED, fd, offset)
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), f"mmap of {size} bytes: {os.strerror(ctypes.get_errno())}")
    memory = (ctypes.c_char * size).from_address(address)
    weakref.finalize(memory, libc.munmap, address, size).atexit = False
    return memory
