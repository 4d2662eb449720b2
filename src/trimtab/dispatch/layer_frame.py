"""A stack frame that bears a layer's name, so that whatever shows Python stacks shows whose exchange runs.

Flight Recorder dumps, py-spy, profilers and tracebacks know functions by the name in their code, and nothing else.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

LAYER_FILE = "<trimtab layer>"
"""A frame of this file bears the name of the layer whose exchange runs."""


def _call(fn: Callable[..., Any], *args: Any) -> Any:
    return fn(*args)


def layer_frame(layer: str) -> Callable[..., Any]:
    """A function that returns fn(*args) of its own arguments (fn, *args), through a frame called `layer`."""
    code = _call.__code__.replace(co_name=layer, co_qualname=layer, co_filename=LAYER_FILE, co_firstlineno=1)
    return types.FunctionType(code, _call.__globals__)  # torch.compile looks for the builtins in them
