"""A world without values: ranks that are not there, and models on fake tensors, built as the run builds them: on the
meta device, with meshes and `parallelize` or `fully_shard`, before `World.fill`. Collectives return at once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode, is_fake
from torch.testing._internal.distributed.fake_pg import FakeStore

from trimtab.errors import ConfigError


class WithoutValues(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Fake tensors that PyTorch's grouped GEMM takes in every dtype that it computes in, as it does with values."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten._grouped_mm.default:
            return super().__torch_dispatch__(func, types, args, kwargs)
        a, b, *more = args
        ends = more[0] if more else kwargs["offs"]
        rows = a.shape[:1] if a.ndim == 2 and b.ndim == 3 else (ends.shape[0], a.shape[0])
        with self:
            return torch.empty(*rows, b.shape[-1], dtype=a.dtype, device=a.device)


@dataclass
class World:
    """As many ranks as asked for, of which this process is one. mode: tensors that are made in it have no values.

    Raises:
        ConfigError: there is a process group, or another world.
    """

    ranks: int
    rank: int = 0
    mode: WithoutValues = field(default_factory=WithoutValues, init=False)

    def __enter__(self) -> World:
        if dist.is_initialized():
            raise ConfigError("a plan makes a process group of its own: destroy the one that there is")
        if self.ranks > 1:
            dist.init_process_group("fake", store=FakeStore(), rank=self.rank, world_size=self.ranks)
        return self

    def __exit__(self, *raised: object) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    def fill(self, model: nn.Module) -> None:
        """Turn all parameters and buffers of a model into fake tensors, also those that FSDP2 has sharded."""
        if any(map(is_fake, model.parameters())):
            return  # and others have them, as DDP's reducer
        first: dict[nn.Parameter, str] = {}
        shared = {name: first.setdefault(p, name) for name, p in model.named_parameters(remove_duplicate=False)}
        with self.mode:
            model.to_empty(device="cpu")
        for name, own in shared.items():
            if name != own:
                module, _, leaf = name.rpartition(".")
                setattr(model.get_submodule(module), leaf, model.get_parameter(own))
