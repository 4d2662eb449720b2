"""A world without values: ranks that are not there, and models on fake tensors, built as the run builds them.

    with World(ranks=64) as world:
        model = build_model(...)        # on the meta device; so are meshes, `parallelize`, `fully_shard`
        world.fill(model)
        with world.running(), Ledger() as ledger:
            ...

The group is of torch's "fake" backend: every collective returns at once and moves nothing.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from trimtab.errors import ConfigError

GROUPED_MM = torch.ops.aten._grouped_mm.default


class WithoutValues(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Fake tensors that PyTorch's grouped GEMM takes in every dtype that it computes in, as it does with values."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not GROUPED_MM:
            return super().__torch_dispatch__(func, types, args, kwargs)
        a, b, *more = args
        ends = more[0] if more else kwargs["offs"]
        rows = a.shape[:1] if a.ndim == 2 and b.ndim == 3 else (ends.shape[0], a.shape[0])
        with self:
            return torch.empty(*rows, b.shape[-1], dtype=a.dtype, device=a.device)


class World:
    """As many ranks as asked for, of which this process is one. One world at a time, and no other process group.

    Raises:
        ConfigError: there is a process group.
    """

    def __init__(self, ranks: int, rank: int = 0) -> None:
        self.ranks, self.rank = ranks, rank
        self.mode = WithoutValues()

    def __enter__(self) -> World:
        if dist.is_initialized():
            raise ConfigError("a plan makes a process group of its own: destroy the one that there is")
        if self.ranks > 1:
            dist.init_process_group("fake", store=FakeStore(), rank=self.rank, world_size=self.ranks)
        return self

    def __exit__(self, *raised: object) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    def running(self) -> WithoutValues:
        """The mode, a context manager in which tensors that are made have no values."""
        return self.mode

    def fill(self, model: nn.Module) -> None:
        """Put fake tensors in the place of all parameters and buffers of a model, also of what FSDP2 has sharded."""
        fake: dict[Tensor, Any] = {}  # by identity, so that shared ones stay so
        for module in model.modules():
            held: dict[str, Any]
            for held in (module._parameters, module._buffers):
                for name, tensor in held.items():
                    if tensor is not None and tensor not in fake:
                        fake[tensor] = self._fake(tensor)
                    held[name] = None if tensor is None else fake[tensor]
        for module in model.modules():
            group = module._get_fsdp_state()._fsdp_param_group if isinstance(module, FSDPModule) else None
            with self.mode:
                for param in group.fsdp_params if group is not None else ():
                    param.reset_sharded_param()  # type: ignore[no-untyped-call]

    def _fake(self, t: Tensor) -> Tensor:
        local = t.to_local() if isinstance(t, DTensor) else t
        with self.mode:
            made: Any = torch.empty_strided(local.shape, local.stride(), dtype=local.dtype, device="cpu")
            if isinstance(t, DTensor):
                made = DTensor.from_local(
                    made, t.device_mesh, t.placements, run_check=False, shape=t.shape, stride=t.stride()
                )
            return nn.Parameter(made, t.requires_grad) if isinstance(t, nn.Parameter) else made
