"""Shared memory without a file name: what one process creates and others of its host map.

It is gone with the last process that has it mapped, whatever ends them. Python's `mmap` would keep a file descriptor
for each mapping, and a rank maps its peers' records in every layer.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from typing import Any


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


def map_range(fd: int, size: int, offset: int = 0, *, writable: bool = True) -> Any:
    """`size` bytes from `offset` (a multiple of the page size), as a buffer; unmapped when nobody holds it any more."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_int64)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    address = libc.mmap(None, size, protection, mmap.MAP_SHARED, fd, offset)
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), f"mmap of {size} bytes: {os.strerror(ctypes.get_errno())}")
    memory = (ctypes.c_char * size).from_address(address)
    weakref.finalize(memory, libc.munmap, address, size).atexit = False
    return memory
