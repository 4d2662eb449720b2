"""A way out of a graph of `torch.compile`. Imported while one is traced and at no other time: it loads the compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from trimtab.errors import InputError

WHY = (
    "rows are exchanged over ranks, an option has state, an activation, norm or kernels are of one's own, or values "
    "may have tangents"
)


@torch.compiler.disable(reason=f"trimtab: {WHY}: this part runs eagerly")  # type: ignore[no-untyped-call, untyped-decorator]
def eagerly(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """fn(*args, **kwargs) between two graphs. With fullgraph=True the compiler refuses, naming this reason. Raises
    InputError under `torch.export`, which has one graph."""
    if torch.compiler.is_exporting():
        raise InputError(f"this part cannot be exported: {WHY}. Export a layer on one rank, with none of these")
    return fn(*args, **kwargs)
