"""A way out of a graph of `torch.compile`. Imported while one is traced and at no other time: it loads the compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


@torch.compiler.disable(  # type: ignore[no-untyped-call, untyped-decorator]
    reason="trimtab: rows are exchanged over ranks, an option has state, or an activation, norm or kernels are of "
    "one's own: this part runs eagerly"
)
def eagerly(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """fn(*args, **kwargs) between two graphs. With fullgraph=True the compiler refuses, naming this reason."""
    return fn(*args, **kwargs)
