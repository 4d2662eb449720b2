"""torchtitan's type checking of sharded values (`debug.spmd_typechecking`): ours run unchecked, their results typed.

A value that differs between the ranks of a mesh axis is "varying" on it. Rows that came through an exchange vary on
every axis of the experts' mesh, and sums that came home vary on every axis of the tokens' mesh.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from torch import Tensor

_spmd: Any = import_module("spmd_types")
_titan: Any = import_module("torchtitan.distributed.spmd_types")


def unchecked() -> Any:
    """A context in which nothing is checked, where anything is."""
    return _spmd.no_typecheck()


def vary(*tensors: Tensor, experts: bool) -> None:
    """Say, where checking is on, that these vary on every axis: of the experts' mesh, or of the tokens'."""
    if not _spmd.is_type_checking():
        return
    if experts:
        with _titan.maybe_set_sparse_mesh():
            vary(*tensors, experts=False)
        return
    for tensor in tensors:
        _spmd.assert_type(tensor, dict.fromkeys(_titan.current_spmd_mesh().mesh_dim_names, _spmd.V))


def like(tensor: Tensor, source: Tensor) -> None:
    """Say, where checking is on, that `tensor` has the type of `source`."""
    if _spmd.is_type_checking():
        _spmd.assert_type_like(tensor, source)
