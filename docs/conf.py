"""The site: `make docs` builds it strictly. A broken link, a reference to no name, markup that is shown and not read, a
public name that is not documented, or one without a docstring fails the build."""

from __future__ import annotations

import html
import importlib
import logging
import re
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.errors import SphinxError

DOCS = Path(__file__).parent
ROOT = DOCS.parent
sys.path[:0] = [str(ROOT / "src"), str(DOCS)]

# What Megatron says of TransformerEngine and Apex when it is imported is no business of a reader's.
logging.getLogger("megatron").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", message=".*(Apex|Transformer Engine)", category=UserWarning)

from docstrings import by_last_name, plain, spelled_out  # noqa: E402

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
smartquotes_action = "qe"  # options keep their two dashes
html_show_sphinx = False
autodoc_member_order = "bysource"
python_maximum_signature_line_length = 80
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
suppress_warnings = ["config.cache"]
nitpicky = True
nitpick_ignore_regex = [("py:.*", r"(?!trimtab\b).*|.*\.(Port|Rule|Found|ParallelExperts)")]  # others, inner types

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


def undocumented(app: Any, env: Any) -> None:
    """Fail where a public name is on no page, or says nothing of itself."""
    known = env.domaindata["py"]["objects"]
    for module, names in PUBLIC.items():
        for name in names:
            if f"{module}.{name}" not in known:
                raise RuntimeError(f"{module}.{name} is public and on no page: add it to docs/api.md")
            if not getattr(getattr(importlib.import_module(module), name), "__doc__", None):
                raise RuntimeError(f"{module}.{name} is public and has no docstring")


def for_a_phone(app: Any, doctree: Any, page: str) -> None:
    """Where there is no room tables of words become a card a row, and code wraps but what is printed in columns;
    commands in a text, and numbers, keep to one line."""
    for block in doctree.findall(nodes.literal_block):
        if block.get("language", "default") in ("default", "none") and re.search(r"\S {2,}[^\s#]", block.astext()):
            block["classes"].append("columns")
    for literal in doctree.findall(nodes.literal):
        if re.search(r"(^| )-", literal.astext()) and len(literal.astext()) <= 40:
            literal["classes"].append("whole")
    for table in doctree.findall(nodes.table):
        heads = [entry.astext() for head in table.findall(nodes.thead) for entry in head.findall(nodes.entry)]
        rows = [
            list(row.findall(nodes.entry)) for body in table.findall(nodes.tbody) for row in body.findall(nodes.row)
        ]
        for entry in [entry for row in rows for entry in row if len(entry.astext()) <= 12]:
            entry["classes"].append("whole")
        letters = sum(len(entry.astext()) for row in rows for entry in row)
        if len(heads) > 4 or letters <= 20 * len(heads) * len(rows):
            continue
        table["classes"].append("words")
        for row in rows if len(heads) > 2 else []:
            for head, entry in zip(heads[1:], row[1:], strict=True):
                if head and entry.children:
                    entry[0].insert(0, nodes.inline(text=f"{head}: ", classes=["head"]))


UNREAD = re.compile(
    r"`|\]\(|\w\([\w/.#-]+\.md\)|\{(?:py:)?\w+\}`|:\w+:`|(?<!\w)\*\*\w|\w\*\*(?!\w)|^ *\|.*\|$", re.MULTILINE
)
SHOWN_AS_IT_IS = re.compile(r"<(pre|code|script|style|dt)\b.*?</\1>", re.DOTALL)


def unread(app: Any, failed: Exception | None) -> None:
    """Fail where a page shows markup: a backtick, half of a link, a row of a table."""
    seen = []
    for page in [] if failed or app.builder.format != "html" else sorted(Path(app.outdir).rglob("*.html")):
        body = page.read_text().partition("<article")[2].partition("</article>")[0]
        text = html.unescape(re.sub(r"<[^>]+>", "", SHOWN_AS_IT_IS.sub("", body)))
        near = (text[max(0, found.start() - 30) : found.end() + 30] for found in UNREAD.finditer(text))
        seen += [f"{page.relative_to(app.outdir)}: {' '.join(words.split())}" for words in near]
    if seen:
        raise SphinxError("markup that is shown, not read:\n  " + "\n  ".join(seen))


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", plain, priority=100)
    app.connect("autodoc-process-signature", spelled_out)
    app.connect("missing-reference", by_last_name)
    app.connect("env-check-consistency", undocumented)
    app.connect("doctree-resolved", for_a_phone)
    app.connect("build-finished", unread)
