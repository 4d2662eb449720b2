"""Python's server that ranks are forked from, with its socket where a socket's path fits.

It has imported torch but never run a backward, and has tested kernels, so that ranks start in milliseconds.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import threading
from multiprocessing.context import ForkServerContext
from multiprocessing.util import get_temp_dir

LONGEST = 71
"""Bytes of a folder for temporary files. A socket's path has 104 on macOS, 108 on Linux; Python's takes 33 of them."""
SHORT = ("/tmp", "/var/tmp")
_ALONE = threading.Lock()  # what is changed for a moment is the process's
_PRELOAD = ["torch.distributed.tensor", "trimtab.moe", "trimtab.verify.tested_kernels"]


def preload(*modules: str) -> None:
    """Have the server import these, too, before it forks: call it when a module is imported, for it is of no effect
    once anything has been forked."""
    _PRELOAD.extend(module for module in modules if module not in _PRELOAD)


def forkserver() -> ForkServerContext:
    """The context that forks from a server. Where TMPDIR is too long for its socket, as job managers' may be, the
    socket alone is elsewhere: before 3.14, Python ends with "AF_UNIX path too long"."""
    folder = next(filter(os.path.isdir, SHORT), None)
    with _ALONE:
        if len(os.fsencode(tempfile.gettempdir())) > LONGEST and folder is not None:
            before = tempfile.tempdir
            tempfile.tempdir = folder
            try:
                get_temp_dir()  # made once in a process, which removes it when it ends
            finally:
                tempfile.tempdir = before
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    return context
