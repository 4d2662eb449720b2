"""Docstrings, written to be read in the source, as the API page has them: an entry for each parameter, values spelled
out, names that lead to where the page has them."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import re
import typing
from pathlib import Path
from typing import Any, Literal

API = (Path(__file__).parent / "api.md").read_text()
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
