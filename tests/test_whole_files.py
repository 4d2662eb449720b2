"""A file that cannot be written whole: the one before it stays, and nothing is left beside it."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch

from trimtab.atomic_write import write_whole
from trimtab.routing.replay import Decisions

resource = pytest.importorskip("resource", reason="limits of a process's files are POSIX's")


def test_what_was_there_stays_where_the_disk_is_full(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    write_whole(path, "é\n")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(OSError, match="too large") as caught:
            write_whole(path, "x" * 10_000)
        ids = torch.zeros(1, 9000, 1, 2, dtype=torch.int64)
        with pytest.raises((OSError, RuntimeError)):  # torch says of no room what it says of a damaged file
            Decisions(ids=ids, num_experts=4, layers=("moe",)).save(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caught.value.errno == errno.EFBIG
    assert path.read_bytes() == "é\n".encode()
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_leads_to_what_is_written(tmp_path: Path) -> None:
    there, link = tmp_path / "there.md", tmp_path / "link.md"
    there.write_text("before")
    link.symlink_to(there)
    write_whole(link, "after")
    assert link.is_symlink()
    assert there.read_text() == "after"
    write_whole(Path("/dev/null"), "gone")
    assert Path("/dev/null").is_char_device()
