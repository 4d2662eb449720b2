"""The house keeps its floors: a room imports only from rooms below it, and importing is free of side effects."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import trimtab

ROOMS = (
    "hf", "titan", "cli", "train", "doctor", "verify", "integrations", "convert", "checkpoint", "parallel", "exported",
    "moe", "experts", "dispatch", "routing", "guard", "kernels", "layout", "launched", "interrupted", "whole_files",
    "backward", "autocast", "eager", "validation", "errors",
)  # fmt: skip
"""From the top floor down. The oracle stands beside the house and imports nothing of it."""


def test_rooms_import_only_from_rooms_below() -> None:
    root = Path(trimtab.__file__).parent
    wrong = []
    for file in sorted(root.rglob("*.py")):
        room = file.relative_to(root).parts[0].removesuffix(".py")
        if room not in ROOMS:
            assert room in ("__init__", "__main__", "oracle"), f"{file.name} is in no room"
            continue
        imported = re.findall(r"^\s*(?:from|import) trimtab\.(\w+)", file.read_text(), re.MULTILINE)
        above = [other for other in imported if other != "oracle" and ROOMS.index(other) < ROOMS.index(room)]
        wrong += [f"{file.relative_to(root)} imports {other}" for other in above]
    assert not wrong


def test_importing_trimtab_imports_neither_torch_nor_transformers() -> None:
    script = "import sys, trimtab; print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_the_core_needs_torch_alone() -> None:
    block = "import sys; sys.modules['transformers'] = sys.modules['matplotlib'] = None; import trimtab; "
    script = block + "print([getattr(trimtab, n).__name__ for n in trimtab._HOMES])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert "GroupedLinear" in done.stdout


@pytest.mark.skipif("PYTEST_XDIST_WORKER" not in os.environ, reason="about several workers")
@pytest.mark.xdist_group("house")
def test_tests_of_a_group_stay_together(request: pytest.FixtureRequest) -> None:
    """Tests of many ranks would disturb each other, and an xdist that does not know its pytest says nothing."""
    assert request.node.nodeid.endswith("@house")


def test_a_star_imports_the_public_names() -> None:
    found: dict[str, object] = {}
    exec("from trimtab import *", found)
    assert set(trimtab._HOMES) <= set(found)
