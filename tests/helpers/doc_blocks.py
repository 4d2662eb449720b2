"""The code blocks of README.md and docs/: found, sorted by how they run, and run from top to bottom of their page.

A page says how by comments that nobody sees. Before a block:

    <!-- run: gpu -->      needs what a test has not (REASONS), or minutes: `make docs-check` runs those
    <!-- hang.py -->       is the file of that name, which a later block starts
    <!-- printed -->       of an output: each of its lines is printed by the blocks above it

and anywhere in a page `<!-- ranks: 4 -->`: its Python is one script, which torchrun starts so often.

What the page's `pip install` lines name, and what that needs, is all that its blocks can import.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from markdown_it import MarkdownIt
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from helpers.commands import DEADLINE

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs/howto").glob("*.md"))]
REASONS = ("gpu", "network", "minutes", "elsewhere")
"""Why a block is compiled only. elsewhere: in a program that no extra brings, or in a state that a page cannot make."""
SITE = ("{toctree}", "{eval-rst}", "{include}", "{literalinclude}")
FIRST = "trimtab train --model mixtral --max-steps 20 --out runs/first"
"""The command by which pages make the checkpoint that they work on: run once, and copied for each of them."""
HIDING = '''
import sys
from importlib.machinery import PathFinder

class Installed(PathFinder):
    """Finds what a page's install line brings."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in {modules!r} else super().find_spec(name, path, target)

    @classmethod
    def find_distributions(cls, *args, **options):
        found = PathFinder.find_distributions(*args, **options)
        return (d for d in found if (d.name or "").lower().replace("_", "-") not in {distributions!r})

sys.meta_path[:] = [Installed if finder is PathFinder else finder for finder in sys.meta_path]
'''


@dataclass(frozen=True)
class Block:
    """One code block. kind: "python", "sh", "file", "output", "site"; why: one of REASONS, or "" if it runs."""

    page: str
    line: int
    kind: str
    text: str
    why: str = ""
    name: str = ""

    def compiles(self) -> None:
        """Raise SyntaxError or CalledProcessError if it is not a program at all."""
        if self.kind in ("python", "file"):
            compile(self.text, f"{self.page}:{self.line}", "exec")
        elif self.kind == "sh":
            subprocess.run(["bash", "-n", "-c", self.text], check=True)


def blocks_of(page: Path) -> list[Block]:
    """Every code block of a page. Raises AssertionError for a block or a mark of no known kind, and indented code."""
    found, mark, where = [], "", page.relative_to(ROOT).as_posix()
    for token in MarkdownIt("commonmark").parse(page.read_text(encoding="utf-8")):
        if token.type == "html_block":
            mark = token.content.strip().removeprefix("<!--").removesuffix("-->").strip()
        elif token.type in ("fence", "code_block"):
            line = (token.map or [0])[0] + 2
            found.append(_block(where, line, token.info.split(" ")[0], token.content, mark))
            mark = ""
        elif token.type not in ("list_item_open", "bullet_list_open"):
            mark = ""
    return found


def _block(page: str, line: int, language: str, text: str, mark: str) -> Block:
    place = f"{page}:{line}: {mark or language}"
    why = mark.removeprefix("run: ") if mark.startswith("run: ") else ""
    assert why in ("", *REASONS), place
    if language.startswith("{"):
        assert language in SITE, place
        return Block(page, line, "site", text)
    if language in ("", "text"):
        return Block(page, line, "output", text, name=mark if mark == "printed" else "")
    assert language in ("python", "sh"), place
    if mark.endswith(".py"):
        return Block(page, line, "file", text, name=mark)
    assert why or not mark, place
    return Block(page, line, language, text, why)


def extras_of(page: Path) -> set[str]:
    """What the page's install lines name. Raises AssertionError for an extra that there is not."""
    lines = re.findall(r"pip install [^\n`]*?(?:\.|trimtab[\w.-]*)\[([\w,]+)\]", page.read_text(encoding="utf-8"))
    extras = {extra for line in lines for extra in line.split(",")}
    assert extras <= _project()["optional-dependencies"].keys(), (page, extras)
    return extras


def _project() -> dict[str, dict[str, list[str]]]:
    found: dict[str, dict[str, list[str]]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return found


def installed_by(extras: set[str]) -> set[str]:
    """The distributions that come with trimtab and these extras."""
    todo = [("trimtab", frozenset(extras))]
    seen = set()
    while todo:
        name, wanted = todo.pop()
        if (name, wanted) in seen:
            continue
        seen.add((name, wanted))
        for requirement in map(Requirement, _requirements(name, wanted)):
            if requirement.marker is None or any(requirement.marker.evaluate({"extra": e}) for e in wanted | {""}):
                todo.append((canonicalize_name(requirement.name), frozenset(requirement.extras)))
    return {name for name, _ in seen}


def _requirements(name: str, extras: frozenset[str]) -> Iterator[str]:
    if name == "trimtab":  # as it is now, whatever it was when it was installed
        yield from _project()["dependencies"]  # type: ignore[misc]
        for extra in extras:
            yield from _project()["optional-dependencies"][extra]
        return
    try:
        yield from metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        return


def run_page(page: Path, folder: Path, blocks: list[Block], first: Path | None = None) -> str:
    """Run blocks in a folder that has the examples and the install line's packages; what they printed.

    Raises AssertionError with the end of what they said if one fails, or at the deadline.
    """
    allowed = installed_by(extras_of(page))
    modules = {m for m, names in metadata.packages_distributions().items() if not {*map(canonicalize_name, names)} & allowed}
    names = {canonicalize_name(d.name) for d in metadata.distributions()} - allowed
    (folder / "hidden").mkdir()
    (folder / "hidden/sitecustomize.py").write_text(HIDING.format(modules=modules, distributions=names))
    for name in ("examples", "docs"):
        (folder / name).symlink_to(ROOT / name)
    steps = [vars(block) | {"text": _prepared(block, first)} for block in blocks]
    (folder / "blocks.json").write_text(json.dumps(steps))
    ranks = re.search(r"<!-- ranks: (\d) -->", page.read_text(encoding="utf-8"))
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks[1]] if ranks else []
    script = Path(__file__).with_name("doc_page.py")
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])
    own = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(folder / "hidden"), "PATH": path}
    done = subprocess.run(
        [sys.executable, *launcher, script, "blocks.json"],
        cwd=folder, env=os.environ | own, capture_output=True, text=True, timeout=DEADLINE, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-3500:]
    return done.stdout + done.stderr


def _prepared(block: Block, first: Path | None) -> str:
    """A shell block with the checkpoint that is there already in the place of the command that makes it."""
    if block.kind != "sh" or first is None:
        return block.text
    return re.sub(rf"^{re.escape(FIRST)}(?= |$).*", f"mkdir -p runs; cp -r {first} runs/first", block.text, flags=re.M)
