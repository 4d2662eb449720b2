"""DistributedDataParallel without values: its own reducer, on tensors without any, whose buckets count as gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from inspect import signature
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from trimtab.errors import ConfigError
from trimtab.plan.ledger import Ledger
from trimtab.plan.without_values import World

OPTIONS: dict[str, Any] = dict.fromkeys(("init_sync", "find_unused_parameters", "static_graph"), False)
OPTIONS |= dict.fromkeys(("device_ids", "output_device"))
"""By which DDP reads no values, and is on the CPU: buckets are as large with others."""


@contextmanager
def ddp_without_values(world: World, ledger: Ledger) -> Iterator[None]:
    """Have models that go into DDP inside be filled before, and its buckets known as gradients. Comm hooks
    of one's own, which would wait for values, raise ConfigError."""
    own, hook = DistributedDataParallel.__init__, DistributedDataParallel.register_comm_hook

    def reduced(group: dist.ProcessGroup, bucket: Tensor) -> Any:
        ledger.know([bucket], "gradients")
        return dist.all_reduce(bucket, group=group, async_op=True).get_future().then(lambda _: bucket)

    @wraps(own)
    def made(*given: Any, **options: Any) -> None:
        told = signature(own).bind(*given, **options).arguments
        world.fill(told["module"])
        with world.mode:
            own(**told | OPTIONS)
        hook(told["self"], told["self"].process_group, lambda group, bucket: reduced(group, bucket.buffer()))

    def refused(*_: Any, **__: Any) -> None:
        raise ConfigError("DDP's comm hooks cannot be planned: plan without them, or with FSDP2")

    as_made = patch.object(dist.Reducer, "_rebuild_buckets", lambda _: False)  # in another order, no larger
    with as_made, patch.multiple(DistributedDataParallel, __init__=made, register_comm_hook=refused):
        yield
