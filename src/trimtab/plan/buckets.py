"""DistributedDataParallel without values: its own reducer, on tensors without any, whose buckets count as gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trimtab.plan.ledger import Ledger
from trimtab.plan.without_values import World

OPTIONS: dict[str, Any] = dict.fromkeys(("init_sync", "find_unused_parameters", "static_graph"), False)
OPTIONS |= dict.fromkeys(("device_ids", "output_device"))
"""By which DDP reads no values, and is on the CPU: buckets are as large with others."""


@contextmanager
def ddp_without_values(world: World, ledger: Ledger) -> Iterator[None]:
    """Have models that go into DDP inside be filled before, and its buckets known as gradients. Runs no comm hooks."""
    own, hook = DistributedDataParallel.__init__, DistributedDataParallel.register_comm_hook

    def reduced(group: dist.ProcessGroup, bucket: Tensor) -> Any:
        ledger.know([bucket], "gradients")
        return dist.all_reduce(bucket, group=group, async_op=True).get_future().then(lambda _: bucket)

    @wraps(own)
    def made(wrapped: DistributedDataParallel, module: nn.Module, *_devices: Any, **options: Any) -> None:
        world.fill(module)
        with world.mode:
            own(wrapped, module, **options | OPTIONS)
        hook(wrapped, wrapped.process_group, lambda group, bucket: reduced(group, bucket.buffer()))

    as_made = patch.object(dist.Reducer, "_rebuild_buckets", lambda _: False)  # in another order, no larger
    with as_made, patch.multiple(DistributedDataParallel, __init__=made, register_comm_hook=lambda *_: None):
        yield
