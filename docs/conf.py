"""The site: `make docs` builds it strictly. A broken link, a public name that is not documented, or one without a
docstring fails the build."""

from __future__ import annotations

import importlib
import re
import shutil
import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
ROOT = DOCS.parent
sys.path.insert(0, str(ROOT / "src"))

import trimtab  # noqa: E402

project = "trimtab"
author = "the trimtab authors"
copyright = author
version = release = trimtab.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["colon_fence", "attrs_block"]
myst_heading_anchors = 3
exclude_patterns = ["build"]
html_theme = "furo"
html_title = f"trimtab {version}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
suppress_warnings = ["config.cache"]

# The pages of the benchmarks lie beside what measures them.
shutil.copytree(ROOT / "benchmarks" / "results", DOCS / "results", dirs_exist_ok=True)


def options_table() -> str:
    """The options of `trimtab train`, from the table that the command has them from."""
    from trimtab.train.config import OPTIONS, flag_of

    rows = (f"| `{flag_of(o.name)} {o.metadata['shown'].replace('|', '/')}` | {o.metadata['help']} |" for o in OPTIONS)
    return "\n".join(["| option | |", "|---|---|", *rows]) + "\n"


(DOCS / "results" / "options.txt").write_text(options_table())

PUBLIC = {
    "trimtab": list(trimtab.__all__),
    "trimtab.integrations.transformers": ["register"],
    "trimtab.checkpoint": list(importlib.import_module("trimtab.checkpoint").__all__),
    "trimtab.experts.recipes": list(importlib.import_module("trimtab.experts.recipes").__all__),
}


SECTION = re.compile(r"(Args|Arguments|Attributes|Example|Examples|Parameters|Raises|Returns|Yields):$")
ENTRY = re.compile(r"[\w.`*]+(?:, [\w.`*]+)*: \S")


def escaped(line: str) -> str:
    """Names in single backticks are code, and nothing else is markup."""
    made = ""
    for piece in re.split(r"(`[^`]+`)", line):
        if piece.startswith("`"):
            made += f"`{piece}`"
        else:
            glued = made.endswith("`") and piece[:1].isalnum()  # the plural of a name
            made += ("\\ " if glued else "") + re.sub(r"([*|]|(?<=\w)_(?!\w))", r"\\\1", piece)
    return made


def plain(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Docstrings are written to be read in the source. Indented blocks are literal, "name: words" is an entry of a
    list, with its next lines indented or not; sections as Args are left to napoleon."""
    text = re.sub(r"`([^`]+)`", lambda found: "`" + " ".join(found[1].split()) + "`", "\n".join(lines))
    made: list[str] = []
    where, before = "body", ""
    for line in text.split("\n"):
        deep = line.startswith(" ")
        if SECTION.match(line):
            where = "section"
            made += ["", line]
        elif where == "section" and (deep or not line.strip()):
            made.append(escaped(line))
        elif not line.strip():
            where = "literal" if where == "literal" else "body"
            made.append("")
        elif deep and (where == "literal" or not before.strip()):
            made += [line] if where == "literal" else ["::", "", line]
            where = "literal"
        elif ENTRY.match(line):
            made += ["", f"* {escaped(line)}"]
            where = "entry"
        else:
            if where not in ("entry", "body"):
                made.append("")
                where = "body"
            made.append(("  " if where == "entry" else "") + escaped(line.strip()))
        before = line
    lines[:] = made


def undocumented(app: Any, env: Any) -> None:
    """Fail where a public name is on no page, or says nothing of itself."""
    known = env.domaindata["py"]["objects"]
    for module, names in PUBLIC.items():
        for name in names:
            if f"{module}.{name}" not in known:
                raise RuntimeError(f"{module}.{name} is public and on no page: add it to docs/api.md")
            if not getattr(getattr(importlib.import_module(module), name), "__doc__", None):
                raise RuntimeError(f"{module}.{name} is public and has no docstring")


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", plain, priority=100)
    app.connect("env-check-consistency", undocumented)
