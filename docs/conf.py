"""The site: `make docs` builds it strictly. A broken link, a reference to no name, markup that is shown and not read, a
public name that is not documented, or one without a docstring fails the build."""

from __future__ import annotations

import contextlib
import functools
import html
import importlib
import inspect
import logging
import re
import shutil
import sys
import typing
import warnings
from pathlib import Path
from typing import Any, Literal

from docutils import nodes
from sphinx.errors import SphinxError

DOCS = Path(__file__).parent
ROOT = DOCS.parent
sys.path.insert(0, str(ROOT / "src"))

# What Megatron says of TransformerEngine and Apex when it is imported is no business of a reader's.
logging.getLogger("megatron").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", message=".*(Apex|Transformer Engine)", category=UserWarning)

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
nitpick_ignore_regex = [("py:.*", r"(?!trimtab\b).*|.*\.(Port|Rule|ParallelExperts)")]  # PyTorch, Python, inner types

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


API = (DOCS / "api.md").read_text()
ITEMS = re.findall(r"auto(?:class|function|exception):: (\S+)", API)
MEMBERS = [
    f"{item}.{member.strip()}"
    for item, members in re.findall(r"autoclass:: (\S+)\n   :members: (.*)", API)
    for member in members.split(",")
]


def at(path: str) -> Any:
    """The object of a full name."""
    parts = path.split(".")
    for i in range(len(parts) - 1, 0, -1):
        with contextlib.suppress(ImportError):
            return functools.reduce(getattr, parts[i:], importlib.import_module(".".join(parts[:i])))
    raise RuntimeError(f"docs/api.md: there is no {path}")


def meant(words: str, here: str) -> str | None:
    """The full name on the page that `words`, such as `Dispatcher.dispatch`, mean in the docstring of `here`."""
    word = words.partition("(")[0]
    own = [here, here.rpartition(".")[0]]
    found = [each for each in MEMBERS if each in (f"{own[0]}.{word}", f"{own[1]}.{word}")]
    found = found or [each for each in (*ITEMS, *MEMBERS) if each == word or f".{each}".endswith(f".{word}")]
    found = [each for each in found if each in ITEMS or "." in word or each.rpartition(".")[0] in own]
    package = ".".join(here.split(".")[:3])
    near = sorted(found, key=lambda each: (not each.startswith(package), len(each)))
    return near[0] if near and near[0] != here else None


SECTION = re.compile(r"(Args|Arguments|Attributes|Example|Examples|Parameters|Raises(, .*)?|Returns|Yields):$")
ENTRY = re.compile(r"[\w.`*]+(?:, [\w.`*]+)*: \S")


ENTRIES = re.compile(r"^( *)(\w+(?:, \w+)*): as (?:in|of|for) `([\w.]+)`\.?", re.MULTILINE)


def parameters(obj: Any) -> list[str]:
    with contextlib.suppress(TypeError, ValueError):
        return [name for name in inspect.signature(obj).parameters if name != "self"]
    return []


def listed(text: str, obj: Any) -> str:
    """An entry on a line of its own for each parameter; those of a base class in its words."""
    for name in parameters(obj):
        text = re.sub(rf"^( *)(\w.*\.) {name}: ", rf"\1\2\n\1{name}: ", text, flags=re.MULTILINE)
        said = rf"^ *(?:\w+, )*{name}(?:, \w+)*: \S"
        bases = [inspect.getdoc(base) or "" for base in getattr(obj, "__mro__", ())[1:]]
        if not re.search(said, text, re.MULTILINE):
            found = [each for base in bases for each in re.findall(rf"^{name}: .*(?:\n +\S.*)*", base, re.MULTILINE)]
            text = "\n\n".join([text.rstrip(), *found[:1], ""]) if found else text
    return text


def told(text: str, here: str) -> str:
    """Entries such as "kernels: as in `ExpertMLP`" in the words of that place; the names that a table has, listed."""

    def entry(found: re.Match[str]) -> str:
        source = meant(found[3], here)
        words = told(inspect.getdoc(at(source)) or "", source) if source else ""
        lines = []
        for name in found[2].split(", "):
            said = re.search(rf"^( *){name}: (.*(?:\n\1 +\S.*)*)", words, re.MULTILINE)
            lines.append(f"{found[1]}{name}: {' '.join(said[2].split())}" if said else found[0])
        return "\n".join(lines)

    def names(found: re.Match[str]) -> str:
        return f"{found[0]}: " + ", ".join(f'"{name}"' for name in at(found[1]))

    return re.sub(r"a name (?:of|in) `(trimtab[\w.]*\.[A-Z]+)`(?!:)", names, ENTRIES.sub(entry, text))


def escaped(line: str, here: str = "") -> str:
    """Names in single backticks are code, or links where the page has them; nothing else is markup."""
    made = ""
    for piece in re.split(r"(`[^`]+`)", line):
        if piece.startswith("`"):
            full = meant(piece.strip("`"), here)
            made += f":py:obj:`{piece[1:-1]} <{full}>`" if full else f"`{piece}`"
        else:
            glued = made.endswith("`") and piece[:1].isalnum()  # the plural of a name
            made += ("\\ " if glued else "") + re.sub(r"([*|]|(?<=\w)_(?!\w))", r"\\\1", piece)
    return made


def plain(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Docstrings are written to be read in the source. Indented blocks are literal, "name: words" is an entry of a
    list, with its next lines indented or not; sections as Args are left to napoleon."""
    text = re.sub(
        r"`([^`]+)`", lambda found: "`" + " ".join(found[1].split()) + "`", told(listed("\n".join(lines), obj), name)
    )
    made: list[str] = []
    where, before = "body", ""
    for line in text.split("\n"):
        deep = line.startswith(" ")
        if SECTION.match(line):
            where = "section"
            first, _, more = line.rstrip(":").partition(", ")
            made += ["", f"Errors are raised {more}."] if more else []
            made += ["", f"{first}:"]
        elif where == "section" and (deep or not line.strip()):
            made.append(escaped(line, name))
        elif not line.strip():
            where = "literal" if where == "literal" else "body"
            made.append("")
        elif deep and (where == "literal" or not before.strip()):
            made += [line] if where == "literal" else ["::", "", line]
            where = "literal"
        elif ENTRY.match(line):
            entry, _, words = line.partition(": ")
            known = set(entry.split(", ")) <= {*parameters(obj)}
            made += ["", f"* **{entry}** \N{EN DASH} {escaped(words, name)}" if known else f"* {escaped(line, name)}"]
            where = "entry"
        else:
            if where not in ("entry", "body"):
                made.append("")
                where = "body"
            made.append(("  " if where == "entry" else "") + escaped(line.strip(), name))
        before = line
    lines[:] = made


def spelled_out(app: Any, what: str, name: str, obj: Any, options: Any, signature: str, returns: str) -> Any:
    """Values in the place of the name of a type that lists them."""
    known = vars(importlib.import_module(obj.__module__)) if signature else {}
    names = {
        word for word in re.findall(r"\b[A-Z]\w+", signature or "") if typing.get_origin(known.get(word)) is Literal
    }
    for word in names:
        values = ", ".join(map(repr, typing.get_args(known[word])))
        signature = re.sub(rf"\b{word}\b", f"Literal[{values}]", signature)
    return signature, returns


def by_last_name(app: Any, env: Any, node: Any, shown: Any) -> Any:
    """A type in a signature is where the page has it, from whatever module it comes."""
    full = (
        meant(node["reftarget"].rpartition(".")[2], node.get("py:class") or "")
        if node.get("refdomain") == "py"
        else None
    )
    if full is None:
        return None
    return env.domains["py"].resolve_xref(env, node["refdoc"], app.builder, "obj", full, node, shown)


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
    """Tables of words become a card a row where there is no room; commands in a text keep to one line."""
    for literal in doctree.findall(nodes.literal):
        if " -" in literal.astext() and len(literal.astext()) <= 40:
            literal["classes"].append("whole")
    for table in doctree.findall(nodes.table):
        heads = [entry.astext() for head in table.findall(nodes.thead) for entry in head.findall(nodes.entry)]
        rows = [
            list(row.findall(nodes.entry)) for body in table.findall(nodes.tbody) for row in body.findall(nodes.row)
        ]
        letters = sum(len(entry.astext()) for row in rows for entry in row)
        if len(heads) > 4 or letters <= 22 * len(heads) * len(rows):
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
