"""Files that a reader finds whole or not at all, on a full disk and where the writer is killed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Yields a file beside `path` to write to. It takes the name of `path` at the end: until then the old file stays.
    Follows links. A device or a pipe is yielded itself.

    Raises:
        OSError: it cannot be written; what was written so far is removed, as after any other error.
    """
    path = path.resolve()
    if path.exists() and not path.is_file():
        yield path
        return
    unfinished = path.with_name(f"{path.name}.unfinished")
    try:
        yield unfinished
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def write_whole(path: Path, text: str) -> None:
    """Write `text` in UTF-8, as `whole` does. Raises OSError where it cannot be written."""
    with whole(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8")
