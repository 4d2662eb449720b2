"""Files that a reader finds whole or not at all, on a full disk and where the writer is killed."""

from __future__ import annotations

from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write `text` in UTF-8 beside `path`, then give it that name: what was there before stays until then. Through a
    link to where it leads; a device or a pipe is written to.

    Raises:
        OSError: it cannot be written; what was written so far is removed.
    """
    path = path.resolve()
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    unfinished = path.with_name(f"{path.name}.unfinished")
    try:
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
