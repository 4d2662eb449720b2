"""Files that a reader finds whole or not at all, on a full disk and where the writer is killed."""

from __future__ import annotations

from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write `text` in UTF-8 beside `path`, then give it that name: what was there before stays until then.

    Raises:
        OSError: it cannot be written; what was written so far is removed.
    """
    unfinished = path.with_name(f"{path.name}.unfinished")
    try:
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(path)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise
