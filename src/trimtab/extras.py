"""Packages that an extra of trimtab brings, and the words for one that is missing. The core needs torch alone."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from trimtab.errors import ConfigError

_HF = ("transformers", "accelerate", "jinja2", "yaml")
_TRAIN = (*_HF, "datasets", "pyarrow", "zstandard", "tensorboard")
EXTRAS = {
    "hf": _HF,
    "peft": (*_HF, "peft"),
    "train": _TRAIN,
    "trl": (*_TRAIN, "peft", "trl"),
    "megatron": ("megatron",),
    "plot": ("matplotlib",),
}
"""The modules that each brings. Of several, the first that has a module is the one to name."""


def install(module: str, extra: str | None = None) -> str:
    """The command that installs the module's extra, this or the first; "" for a module of none.

    pip takes the trimtab that is installed, from wherever it came, and adds what is missing.
    """
    known = [name for name, modules in EXTRAS.items() if module in modules]
    return f"pip install 'trimtab[{extra if extra in known else known[0]}]'" if known else ""


def required(module: str, who: str, extra: str | None = None) -> ModuleType:
    """Import a module that `who` needs. Raises ConfigError, with the command that installs it, where it is missing."""
    try:
        return import_module(module)
    except ImportError as error:
        raise ConfigError(f"{who} needs {module} ({install(module, extra)}): {error}") from error


def lacking(error: BaseException) -> str:
    """Words to add to the message of an error: the command that installs the module that it says is missing, if any."""
    name = error.name if isinstance(error, ModuleNotFoundError) else None
    command = install((name or "").partition(".")[0])
    return command and f": {command}"
