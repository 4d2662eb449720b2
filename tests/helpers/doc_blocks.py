"""The code blocks of README.md and docs/: found, sorted by how they run, and run from top to bottom of their page.

What a page's `pip install` lines name, and what that needs, is all that its blocks can import; no such line: the core.
Comments that nobody sees say what else there is to know of the block that follows:

    <!-- run: gpu -->         REASONS not to run it here; it must compile
    <!-- run: tests/a.py -->  that test, or page, runs it or its program
    <!-- hang.py -->          it is the file of that name, which a later block starts
    <!-- printed -->          an output: each line is printed by the blocks above it

and anywhere in a page `<!-- ranks: 4 -->`: its Python is one script, which torchrun starts so often.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from markdown_it import MarkdownIt
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from helpers.commands import DEADLINE

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs/howto").glob("*.md"))]
REASONS = ("minutes", "gpu", "network", "clone", "elsewhere")
"""Why a block is compiled only. minutes: `make docs-check` runs it; clone: it measures long or writes into the clone;
elsewhere: it needs a program, a model or a data set that no extra brings."""
SITE = ("{toctree}", "{eval-rst}", "{include}", "{literalinclude}")
FIRST = "trimtab train --model mixtral --max-steps 20 --out runs/first"
"""The command by which pages make the checkpoint that they work on: run once, and copied for each of them."""
INSTALLS = re.compile(r"^(pip install|make (?!train\b)).*", re.MULTILINE)
"""Lines of a shell that change the environment; what is left of a block runs."""
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
    """One code block. kind: "python", "sh", "file", "output", "site"; why: a mark that keeps it from running."""

    page: str
    line: int
    kind: str
    text: str
    why: str = ""
    name: str = ""

    def compiles(self) -> None:
        """Raise SyntaxError or CalledProcessError if it is no program at all."""
        if self.kind in ("python", "file"):
            compile(self.text, f"{self.page}:{self.line}", "exec")
        elif self.kind == "sh":
            subprocess.run(["bash", "-n", "-c", self.text], check=True)


def blocks_of(page: Path) -> list[Block]:
    """Every code block of a page. Raises AssertionError for a block or mark of no known kind, and for indented code."""
    found, mark, where = [], "", page.relative_to(ROOT).as_posix()
    for token in MarkdownIt("commonmark").parse(page.read_text(encoding="utf-8")):
        if token.type == "html_block":
            mark = token.content.strip().removeprefix("<!--").removesuffix("-->").strip()
        elif token.type in ("fence", "code_block"):
            line = (token.map or [0])[0] + 2
            assert token.type == "fence", f"{where}:{line}: code without a fence"
            found.append(_block(where, line, token.info.split(" ")[0], token.content, mark))
            mark = ""
        else:
            mark = ""
    return found


def _block(page: str, line: int, language: str, text: str, mark: str) -> Block:
    place = f"{page}:{line}: {mark or language}"
    if language.startswith("{"):
        assert language in SITE, place
        return Block(page, line, "site", text)
    if language in ("", "text"):
        return Block(page, line, "output", text, name=mark if mark == "printed" else "")
    assert language in ("python", "sh"), place
    if mark.startswith("run: "):
        why = mark.removeprefix("run: ")
        names = [page, *re.findall(r"\S+\.py", text)]
        assert why in REASONS or any(Path(name).name in (ROOT / why).read_text() for name in names), place
        return Block(page, line, language, text, why)
    if mark and not mark.startswith("ranks: "):
        assert mark.endswith(".py"), place
        return Block(page, line, "file", text, name=mark)
    installs = language == "sh" and not INSTALLS.sub("", re.sub(" *#.*", "", text)).strip()
    return Block(page, line, language, text, "installs" if installs else "")


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
        needed = map(Requirement, _requirements(name, wanted))
        asked = [r for r in needed if not r.marker or any(r.marker.evaluate({"extra": e}) for e in wanted | {""})]
        todo += [(canonicalize_name(r.name), frozenset(r.extras)) for r in asked]
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
    """Run blocks in a folder that has the examples, with the install line's packages; what they printed.

    first: a copy of what FIRST makes. Raises AssertionError with the end of what they said if one fails, or at the
    deadline.
    """
    _hide(folder / "hidden", installed_by(extras_of(page)))
    (folder / "examples").symlink_to(ROOT / "examples")
    steps = [vars(block) | {"text": _prepared(block, first)} for block in blocks]
    (folder / "blocks.json").write_text(json.dumps(steps))
    ranks = re.search(r"<!-- ranks: (\d) -->", page.read_text(encoding="utf-8"))
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks[1]] if ranks else []
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])
    own = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(folder / "hidden"), "PATH": path}
    command = [sys.executable, *launcher, str(Path(__file__).with_name("doc_page.py")), "blocks.json"]
    with (folder / "said").open("w+") as said:
        process = subprocess.Popen(
            command, cwd=folder, env=os.environ | own, stdout=said, stderr=said, start_new_session=True
        )
        try:
            code = process.wait(DEADLINE)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # also what a block has left behind
        text = (folder / "said").read_text()
    assert code == 0, text[-4000:]
    return text


def _hide(place: Path, allowed: set[str]) -> None:
    """A folder that, first on the path, leaves `allowed` of the distributions to be found."""
    tops = metadata.packages_distributions().items()
    modules = {module for module, names in tops if not {*map(canonicalize_name, names)} & allowed}
    names = {canonicalize_name(d.name) for d in metadata.distributions()} - allowed
    place.mkdir()
    (place / "sitecustomize.py").write_text(HIDING.format(modules=modules, distributions=names))


def _prepared(block: Block, first: Path | None) -> str:
    """A shell block without what installs, and with the checkpoint that is there in the place of what makes it."""
    if block.kind != "sh" or first is None:
        return block.text
    copied = f"mkdir -p runs; cp -r {first} runs/first"
    return INSTALLS.sub("", re.sub(rf"^({re.escape(FIRST)}(?= |$)|make train\b).*", copied, block.text, flags=re.M))
