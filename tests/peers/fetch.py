"""Bring what is judged into `.peers`, each at its own version: `python -m peers --fetch`."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from peers.registry import SOURCES, Source

ROOT = Path(__file__).parents[2] / ".peers"


def fetch_all() -> int:
    """All that isn't there. Nothing that they depend on comes with them: PyTorch is that which is installed."""
    for source in SOURCES.values():
        place = ROOT / source.folder
        if not place.exists():
            print(f"{source.name}: {' '.join(source.pip) or ' at '.join(source.git)}", flush=True)
            part = place.with_name(f"{place.name}.part")  # what was broken off is not taken for whole
            shutil.rmtree(part, ignore_errors=True)
            _fetch(source, part)
            part.rename(place)
    return 0


def _fetch(source: Source, place: Path) -> None:
    if source.git[0]:
        url, commit = source.git
        subprocess.run(["git", "clone", "--quiet", url, str(place)], check=True)
        subprocess.run(["git", "-C", str(place), "checkout", "--quiet", commit], check=True)
        return
    work = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    if source.python:
        work += ["--python-version", source.python, "--ignore-requires-python", "--only-binary", ":all:"]
    subprocess.run([*work, "--target", str(place), *source.pip], check=True)
