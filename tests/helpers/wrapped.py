"""Tensors that wrap others and have no memory of their own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Outside(Tensor):
    """As any wrapper may be: what is done to it is done to the tensor inside."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Outside:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]
        made.inner = inner
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].inner)
        plain = torch.utils._pytree.tree_map_only(cls, lambda t: t.inner, (args, kwargs or {}))
        return func(*plain[0], **plain[1])


class Quantised(Outside):
    """As torchao's are: `torch.compile` takes it apart, parts of it are of its kind, products ignore `out=`."""

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], *_: Any) -> Quantised:
        return cls(inner["inner"])  # type: ignore[return-value]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = super().__torch_dispatch__(func, types, args, {k: v for k, v in (kwargs or {}).items() if k != "out"})
        product = func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.bmm)
        return found if product else torch.utils._pytree.tree_map_only(Tensor, cls, found)
