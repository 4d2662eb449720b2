"""What `save_pretrained` raises where a folder cannot be written, as an error that names the folder and a full disk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trimtab.errors import InputError, full_disk


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """For what writes into `folder`, which lies in one that exists.

    Raises:
        InputError: it cannot.
    """
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        raise InputError(f"{folder}: cannot be written: {error}{full_disk(folder.parent)}") from error
