"""Which experts classes of the installed transformers go through its experts registry, read from their source."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_DECORATED = re.compile(r"^@use_experts_implementation\b.*?^class (\w+)", re.MULTILINE | re.DOTALL)
_CLASS = re.compile(r"^class (\w+)\(", re.MULTILINE)
_NOT_TEXT = re.compile(r"Vision|Audio|Code2Wav|CodePredictor|Resampler|PreTrained")


@dataclass(frozen=True, kw_only=True)
class Family:
    """One experts class: where it lives and the classes of its file that may hold it, best first."""

    name: str
    module: str
    experts_class: str
    model_classes: tuple[str, ...]


def _rank(model_class: str, experts_class: str) -> tuple[int, int, int]:
    """Language models first, then text towers, then whole multimodal models; the experts' own prefix wins."""
    prefix = re.sub(r"(Text)?Experts$", "", experts_class)
    kind = ("ForCausalLM", "TextModel", "ForTokenClassification", "Model", "ForConditionalGeneration")
    place = next(i for i, ending in enumerate(kind) if model_class.endswith(ending))
    return (not model_class.startswith(prefix), place, len(model_class))


def _model_classes(source: str, experts_class: str) -> tuple[str, ...]:
    ending = re.compile(r"(ForCausalLM|ForTokenClassification|Model|ForConditionalGeneration)$")
    found = [c for c in _CLASS.findall(source) if ending.search(c) and not _NOT_TEXT.search(c)]
    return tuple(sorted(found, key=lambda c: _rank(c, experts_class)))


@cache
def families() -> dict[str, Family]:
    """Every registered experts class by name: its model folder, plus the class where a folder has several."""
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("transformers is not installed")
    found: dict[str, Family] = {}
    for path in sorted((Path(spec.origin).parent / "models").glob("*/modeling_*.py")):
        raw = path.read_bytes()
        if b"@use_experts_implementation" not in raw:
            continue
        source = raw.decode("utf-8")
        experts_classes = _DECORATED.findall(source)
        for experts_class in experts_classes:
            folder = path.parent.name
            name = folder if len(experts_classes) == 1 else f"{folder}.{experts_class}"
            found[name] = Family(
                name=name,
                module=f"transformers.models.{folder}.{path.stem}",
                experts_class=experts_class,
                model_classes=_model_classes(source, experts_class),
            )
    return found
