"""What the package measures: `make house` prints it, tests/test_house.py holds budgets against it.

Everything is read from the sources, but for what an import loads, which a fresh interpreter says.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import trimtab
from helpers.commands import run_python

PACKAGE = Path(trimtab.__file__).parent
TESTS = Path(__file__).parents[1]
ROOT = "(root)"
"""The room of the modules that lie in no folder."""
MOST_LINES = 300
"""Of one file."""
WORKSHOP = ("mutants", "fuzz", "faults")
"""Under tests/, and no tests: they were in the package, and are run by `make verify`."""


def sources() -> list[Path]:
    """The package's files, Python and C++."""
    return sorted(file for file in PACKAGE.rglob("*") if file.suffix in (".py", ".cpp", ".h", ".hpp", ".cc"))


def longest() -> dict[str, int]:
    """Lines of the files of more than `MOST_LINES`."""
    found = {str(file.relative_to(PACKAGE)): lines_of(file) for file in sources()}
    return {name: lines for name, lines in found.items() if lines > MOST_LINES}


def lines_of(file: Path) -> int:
    return len(file.read_text(encoding="utf-8").splitlines())


def rooms() -> dict[str, tuple[int, int]]:
    """(lines, files) of each folder of the package, with the folders in it."""
    found: dict[str, tuple[int, int]] = {}
    for file in sources():
        room, (lines, files) = room_of(file), found.get(room_of(file), (0, 0))
        found[room] = lines + lines_of(file), files + 1
    return found


def room_of(file: Path) -> str:
    parts = file.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else ROOT


def module_of(file: Path) -> str:
    """The dotted name under trimtab: "dispatch.plan", "" for the package itself."""
    parts = file.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_lines() -> int:
    """Lines of the tests and their helpers, without the workshop."""
    return sum(lines_of(f) for f in TESTS.rglob("*.py") if f.relative_to(TESTS).parts[0] not in WORKSHOP)


@cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def _python() -> list[Path]:
    return [file for file in sources() if file.suffix == ".py"]


@cache
def imports() -> dict[str, frozenset[str]]:
    """What of the package each module imports, wherever in it: in functions and for type checkers as well."""
    modules = {module_of(file): file for file in _python()}
    found = {}
    for name, file in modules.items():
        asked: set[str] = set()
        for node in ast.walk(tree_of(file)):
            if isinstance(node, ast.Import):
                asked |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                for alias in node.names:
                    whole = f"{node.module}.{alias.name}"
                    asked.add(whole if whole.removeprefix("trimtab.") in modules else node.module)
        inside = {one.removeprefix("trimtab.") for one in asked if one.startswith("trimtab.")}
        found[name] = frozenset((inside & modules.keys()) - {name})
    return found


def upward(floors: Sequence[Sequence[str]]) -> list[str]:
    """Imports of a room above or beside the one that imports. floors: from the top, the rooms of each; a module that
    lies in no folder is a room of its own, and one in no floor imports and is imported by anybody."""
    level = {room: i for i, rooms in enumerate(floors) for room in rooms}
    found = []
    for module, asked in imports().items():
        room = module.partition(".")[0]
        for other in sorted(asked):
            target = other.partition(".")[0]
            if room != target and room in level and target in level and level[target] <= level[room]:
                found.append(f"{module} imports {other}")
    return found


def circles() -> list[list[str]]:
    """Modules that import each other, directly or over others; a package's __init__ counts as a module."""
    graph, reached = imports(), {}
    for start in graph:
        seen: set[str] = set()
        stack = list(graph[start])
        while stack:
            module = stack.pop()
            if module not in seen:
                seen.add(module)
                stack += graph[module]
        reached[start] = seen
    groups = {frozenset(b for b in reached[a] if a in reached[b]) for a in graph if a in reached[a]}
    return sorted(sorted(group) for group in groups)


def loaded_by(module: str) -> tuple[int, int]:
    """(lines, files) of the package that importing a module loads."""
    files_of = "getattr(m, '__file__', None) or '' for name, m in sys.modules.items() if name.startswith('trimtab')"
    script = f"import sys, {module}; print(*({files_of}), sep=chr(10))"
    done = run_python("-c", script, check=True)
    files = [Path(file) for file in done.stdout.splitlines() if file]
    return sum(map(lines_of, files)), len(files)


def files_with(words: str) -> list[Path]:
    """Python files of the package in which one of the words, joined by |, stands in any case."""
    found = re.compile(words, re.IGNORECASE)
    return [file for file in _python() if found.search(file.read_text(encoding="utf-8"))]


def functions_of_a_forward() -> Counter[str]:
    """Calls of the package's functions in one `MoE.forward` after the first: 4 tokens, the C++ backend, one rank.
    "file:function" to how often; comprehensions and generators count each time that they run."""
    import torch

    from trimtab import MoEConfig, RouterConfig

    layer = MoEConfig(dim=64, hidden=32, router=RouterConfig(num_experts=8, top_k=2), kernels="cpu").build("layer")
    x, found = torch.randn(4, 64), Counter[str]()
    layer(x)

    def count(frame: FrameType, event: str, _: Any) -> None:
        file = Path(frame.f_code.co_filename)
        if event == "call" and file.is_relative_to(PACKAGE):
            found[f"{file.relative_to(PACKAGE)}:{frame.f_code.co_qualname}"] += 1

    sys.setprofile(count)
    try:
        layer(x)
    finally:
        sys.setprofile(None)
    return found


def statements_of(module: str, owner: str, function: str) -> int:
    """Statements in the body of a method, without its docstring, those in blocks included."""
    tree = tree_of(PACKAGE / f"{module.replace('.', '/')}.py")
    (found,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == owner)
    (method,) = (node for node in found.body if isinstance(node, ast.FunctionDef) and node.name == function)
    every = [node for part in method.body for node in ast.walk(part) if isinstance(node, ast.stmt)]
    return len(every) - (ast.get_docstring(method) is not None)


def asks(names: tuple[str, ...]) -> dict[str, int]:
    """Calls of functions of these names, by file."""
    found: dict[str, int] = defaultdict(int)
    for file in _python():
        for node in ast.walk(tree_of(file)):
            if isinstance(node, ast.Call) and _last(node.func) in names:
                found[str(file.relative_to(PACKAGE))] += 1
    return dict(found)


def _last(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


_PRIVATE = re.compile(r"_[A-Za-z]\w*")
_PYTHON = {"os", "sys", "threading", "ctypes", "multiprocessing"}
_TUPLES = {"_asdict", "_replace", "_fields", "_make"}
_TRANSFORMERS = {
    "_apply_gate", "_experts_implementation", "_from_config", "_is_expert_parallel", "_keep_in_fp32_modules",
    "_keys_to_ignore_on_load_unexpected", "_mesh_manager", "_n_gpu", "_original_source_patterns",
    "_original_target_patterns", "_is_hf_initialized", "_weight_conversions", "_model_mapping", "_clip_grad_norm",
    "_mixed_mesh_grads", "_hf_peft_config_loaded", "_hf_hook",
}  # fmt: skip
_PEFT = {"_activate_lora", "_check_merge_allowed", "_did_swap_in_out_features"}
_NOT_TORCH = _TUPLES | _TRANSFORMERS | _PEFT


def private_lines() -> dict[str, str]:
    """Lines that touch a private name of torch, as "file:line", and the name.

    An import of one; an attribute, or a name in getattr, hasattr, setattr or delattr, that begins with one underscore
    and that the package itself defines nowhere. What is private to Python or to another package is not counted.
    """
    own = _defined()
    return {
        f"{file.relative_to(PACKAGE)}:{line}": name
        for file in _python()
        for line, name in sorted(_private_in(tree_of(file), own))
    }


def _defined() -> set[str]:
    """Private names that the package defines: functions, classes, variables, parameters, attributes of its objects."""
    found: set[str] = set()
    for file in _python():
        for node in ast.walk(tree_of(file)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _last(node.value) == "self":
                found.add(node.attr)
            elif isinstance(node, ast.Call) and _last(node.func) == "__setattr__" and len(node.args) > 1:
                found |= {part.value for part in node.args[1:2] if isinstance(part, ast.Constant)}
    return found


def _private_in(tree: ast.Module, own: set[str]) -> Iterator[tuple[int, str]]:
    """(line, name)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names if _torch_private(alias.name))
        elif isinstance(node, ast.ImportFrom):
            whole = ((alias.lineno, f"{node.module}.{alias.name}") for alias in node.names)
            yield from ((line, name) for line, name in whole if _torch_private(name))
        elif isinstance(node, ast.Attribute):
            root = ast.unparse(node).partition(".")[0]
            public = root in _PYTHON or node.attr in _NOT_TORCH
            if _PRIVATE.fullmatch(node.attr) and not public and (node.attr not in own or root in ("torch", "dist")):
                yield node.end_lineno or node.lineno, node.attr
        elif isinstance(node, ast.Call) and _last(node.func) in ("getattr", "hasattr", "setattr", "delattr"):
            name = node.args[1] if len(node.args) > 1 else None
            said = str(name.value) if isinstance(name, ast.Constant) else ""
            if _PRIVATE.fullmatch(said) and said not in own | _NOT_TORCH:
                yield node.lineno, said


def _torch_private(name: str) -> bool:
    first, *rest = name.split(".")
    return first == "torch" and any(_PRIVATE.fullmatch(part) for part in rest)


def main() -> None:
    """Print everything."""
    for room, (lines, files) in sorted(rooms().items()):
        print(f"{room:14} {lines:6} lines {files:4} files")
    print(f"{'together':14} {sum(map(lines_of, sources())):6} lines {len(sources()):4} files")
    print(f"{'tests':14} {test_lines():6} lines, without {', '.join(WORKSHOP)}")
    print("import trimtab.moe loads {} lines in {} files".format(*loaded_by("trimtab.moe")))
    calls = functions_of_a_forward()
    print(f"MoE.forward calls {calls.total()} functions in {len({name.partition(':')[0] for name in calls})} files")
    print(f"MoE.forward: {statements_of('moe', 'MoE', 'forward')} statements")
    private = private_lines()
    print(f"private names of torch: {len(private)} lines")
    for place, touched in private.items():
        print(f"    {place}: {touched}")
    print(f"is_compiling, is_exporting: {asks(('is_compiling', 'is_exporting'))}")
    for name, lines in longest().items():
        print(f"{name}: {lines} lines")
    for circle in circles():
        print(f"circle: {', '.join(circle)}")


if __name__ == "__main__":
    main()
