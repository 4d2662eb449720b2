"""Files that a reader finds whole or not at all, on a full disk and where the writer is killed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A path beside `path` to write to, which is given that name at the end: what was there before stays until then.
    Through a link to where it leads; of a device or a pipe it is the path itself.

    Raises:
        OSError: it cannot be written; what was written so far is removed.
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
    """Write `text` in UTF-8 as `written_whole` says."""
    with written_whole(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8")
