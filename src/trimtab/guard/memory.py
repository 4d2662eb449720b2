"""Shared memory without a file name: one page that its process writes and others read.

Python's own `mmap` keeps a file descriptor for each mapping; a rank that watches all its peers in every layer would run
out of them. Here only the owner keeps one.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from typing import Any

SIZE = 4096


def create(name: str) -> tuple[Any, int]:
    """A fresh page of zeros, as a writable buffer, and the descriptor by which others find it (-1: they cannot)."""
    if not hasattr(os, "memfd_create"):
        return mmap.mmap(-1, SIZE), -1
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    os.ftruncate(fd, SIZE)
    return _map(fd, mmap.PROT_READ | mmap.PROT_WRITE), fd


def open_readonly(path: str) -> Any:
    """The page behind a path, as a buffer. It stays readable when its owner dies. OSError if it cannot be read."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if os.fstat(fd).st_size != SIZE:
            raise OSError(f"{path} does not hold one page of {SIZE} bytes")
        return _map(fd, mmap.PROT_READ)
    finally:
        os.close(fd)


def _map(fd: int, protection: int) -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64
    )  # fmt: skip
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    address = libc.mmap(None, SIZE, protection, mmap.MAP_SHARED, fd, 0)
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), "mmap")
    page = (ctypes.c_char * SIZE).from_address(address)
    weakref.finalize(page, libc.munmap, address, SIZE).atexit = False
    return page
