"""What writing safetensors and configurations raises, as an error that names the place and a full disk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trimtab.errors import InputError, full_disk


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """For what writes `path`, a file or a folder, which lies in a folder that exists.

    Raises:
        InputError: it cannot.
    """
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path}: cannot be written: {error}{full_disk(path.parent)}") from error
