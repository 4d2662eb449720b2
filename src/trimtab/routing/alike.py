"""Numbers that ranks must have alike, compared before there moves what hangs on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from trimtab.errors import DesyncError
from trimtab.kernels.memory import no_values
from trimtab.routing.recompute import unseen


def check_alike(
    numbers: Mapping[str, int], groups: Sequence[dist.ProcessGroup], rule: str, *, device: torch.device, layer: str
) -> None:
    """One all-reduce of two numbers each over one group after another, which every rank of them must call. A graph of
    `torch.compile` does not compare, and nothing is compared where tensors have no values.

    rule: who must have the same of what, for the message.

    Raises:
        DesyncError: some differ, on every rank; on a device other than the CPU that is asserted there, without a wait.
    """
    if not groups or torch.compiler.is_compiling() or no_values(device):
        return
    with unseen():
        most = torch.tensor([[n, -n] for n in numbers.values()], device=device)
        for group in groups:
            dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    if device.type != "cpu":
        torch._assert_async((most.sum(1) == 0).all(), f"trimtab: {DesyncError(rule, layer=layer, phase='route')}")
        return
    spread = zip(numbers.items(), most.tolist(), strict=True)
    if differ := [f"{-least} to {top} {what}, {here} here" for (what, here), (top, least) in spread if top != -least]:
        raise DesyncError(f"{rule}. They have {'; '.join(differ)}", layer=layer, phase="route")
