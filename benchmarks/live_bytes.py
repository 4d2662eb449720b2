"""How many bytes of tensor memory are alive, and the most that ever were: counted by storage, as they come and go."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trimtab.operators import KERNELS


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts storages that operators return while the mode is on. Those that were there before count nothing."""

    def __init__(self, *before: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._known = {t.untyped_storage()._cdata for t in before}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        lent = func is torch.ops.aten.resize_.default  # memory of a `HostBufferPool`, on its way out
        for given in tree_leaves((args, kwargs)):
            if isinstance(given, Tensor):
                self._meet(given, new=lent)
        if func in KERNELS:
            with self:  # what it makes inside
                result = KERNELS[func](*args, **(kwargs or {}))
        else:
            result = func(*args, **(kwargs or {}))
        for made in tree_leaves(result):
            if isinstance(made, Tensor):
                self._meet(made, new=True)
        self.peak = max(self.peak, self.now)
        return result

    def _meet(self, tensor: Tensor, new: bool) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes() if new and not tensor.is_meta else 0
        if key in self._known:
            return
        self._known.add(key)
        self.now += size
        weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size
