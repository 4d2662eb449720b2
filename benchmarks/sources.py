"""Which sources were raced: a digest that changes with what they do, and with nothing else.

Comments and docstrings do not count, nor do modules that no contestant runs: wording throws no measurement away.
"""

from __future__ import annotations

import ast
import hashlib
from pathlib import Path

import trimtab

UNRACED = {
    "cli", "verify", "titan", "checkpoint", "oracle.py", "kernels/triton", "kernels/measured.py", "bench/bars.py",
    "bench/campaign.py", "bench/chart.py", "bench/choose.py", "bench/finding.py", "bench/gpu.py", "bench/gpu_case.py",
    "bench/gpu_launches.py", "bench/gpu_race.py", "bench/gpu_tables.py", "bench/grid.py", "bench/judged.py",
    "bench/machine.py", "bench/page.py", "bench/result.py", "bench/sources.py", "bench/store.py", "bench/table.py",
    "bench/words.py",
}  # fmt: skip
ONLY_IN_TRAINING = {"train", "parallel"}


def source_digest(part: str, root: Path | None = None) -> str:
    """Of what `trimtab bench PART` races. root: the package's folder, this one's by default."""
    root = root or Path(trimtab.__file__).parent
    left_out = UNRACED | (set() if part == "train" else ONLY_IN_TRAINING)
    total = hashlib.sha256()
    for path in sorted(p for p in root.rglob("*") if p.suffix in (".py", ".h", ".cpp")):
        place = path.relative_to(root)
        if not left_out & {each.as_posix() for each in (place, *place.parents)}:
            text = path.read_text(encoding="utf-8")
            total.update(f"{place.as_posix()}\n{_acting(text) if path.suffix == '.py' else text}\n".encode())
    return total.hexdigest()[:12]


def _acting(text: str) -> str:
    """A module without its comments, layout and docstrings."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            body[:] = [s for s in body if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))]
    return ast.dump(tree)
