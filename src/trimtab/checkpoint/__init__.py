"""Checkpoints of a model, its optimizer and its ranks' own state, that load at any other layout of ranks.

`save(root, model, optimizer, step=…)`, `load(folder, model, optimizer)`, `latest(root)`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trimtab.lazy_names import lazy_names

if TYPE_CHECKING:
    from trimtab.checkpoint.folder import Index as Index
    from trimtab.checkpoint.folder import latest as latest
    from trimtab.checkpoint.folder import resolve as resolve
    from trimtab.checkpoint.save_load import load as load
    from trimtab.checkpoint.save_load import save as save
    from trimtab.checkpoint.tensors import read_tensors as read_tensors
    from trimtab.checkpoint.tensors import write_tensors as write_tensors


if not TYPE_CHECKING:
    __getattr__, __dir__, __all__ = lazy_names(__name__)
