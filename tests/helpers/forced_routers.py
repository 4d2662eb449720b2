"""A second truth for replayed decisions: a family's own router code, its top-k answered with what was given.

Nothing of trimtab is in it: the values that a top-k returns are gathered from what it was to sort, and all that a
family does with them follows. A group limit that zeroes the scores themselves has to be switched off by whoever asks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


class Forced(TorchFunctionMode):
    """Within, a top-k over E experts gives `ids_TK`, and its own picks where those are -1."""

    def __init__(self, ids_TK: Tensor, experts: int) -> None:
        super().__init__()
        self.ids, self.experts, self.calls = ids_TK, experts, 0

    def _for(self, live: Tensor) -> Tensor:
        ids = self.ids.view_as(live)
        return torch.where(ids < 0, live, ids)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        T, K = self.ids.shape
        if name == "topk" and args[0].shape[-1] == self.experts and out[1].numel() == T * K:
            ids = self._for(out[1])
            return torch.return_types.topk((args[0].gather(-1, ids), ids))
        if name == "__getitem__" and out.dtype == torch.long and out.shape == (T, K):  # deepseek_v4's table
            return self._for(out)
        return out


class ForcedMixer(Forced):
    """phimoe's SparseMixer in inference, which takes maxima one after the other; a pick is never too far away."""

    def _pick(self, n: int, live: Tensor) -> Tensor:
        pick = self.ids[:, n : n + 1]
        return torch.where(pick < 0, live, pick)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name == "masked_fill":
            args = (args[0], args[1].scatter(-1, self.picked, False), *args[2:])
        out = func(*args, **kwargs)
        if name == "max" and kwargs.get("keepdim"):
            self.picked = self._pick(self.calls, out.indices)
            self.calls += 1
            return torch.return_types.max((out.values, self.picked))
        return out


@contextmanager
def forced(routers: dict[str, nn.Module], ids: dict[str, list[Tensor]], experts: int) -> Iterator[None]:
    """Within, each router takes its ids [T, K], one tensor for each of its calls in a forward."""
    calls = dict.fromkeys(routers, 0)

    def wrapper(name: str, forward: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            given = ids[name][calls[name] % len(ids[name])]
            calls[name] += 1
            mode = ForcedMixer if type(routers[name]).__name__ == "PhimoeTopKRouter" else Forced
            with mode(given, experts):
                return forward(*args, **kwargs)

        return run

    for name, router in routers.items():
        router.forward = wrapper(name, router.forward)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for router in routers.values():
            del router.forward
