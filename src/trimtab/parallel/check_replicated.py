"""Checks that ranks hold the same values where they should: the router above all, which drifts unnoticed."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from trimtab.errors import DesyncError
from trimtab.parallel.meshes import local_part

CHUNK = 1 << 20

Key = tuple[str, tuple[tuple[int, int], ...]]
"""A name, and which shard of it: (ranks, coordinate) for each mesh dim that shards it."""


@torch.no_grad()
def check_replicated(
    model: nn.Module, *, group: dist.ProcessGroup | None = None, buffers: Sequence[str] = ("*.expert_bias",)
) -> None:
    """Raise on every rank if two ranks hold different bits of the same parameter, or of the same shard of one.

    Plain parameters are compared between all ranks, shards of DTensors between the ranks that hold the same shard.
    Reads every parameter once and exchanges a few numbers for each; meant for every hundredth step or so.

    Args:
        group: who compares; all ranks if not given. Each must call. Names that only some have (pipeline stages) are
            compared between those.
        buffers: patterns of buffer names that are compared too.

    Raises:
        DesyncError: names each parameter, and which ranks hold what.
    """
    kept = {name: buffer for name, buffer in model.named_buffers() if any(fnmatchcase(name, b) for b in buffers)}
    mine = {_key(name, t): _digest(t) for name, t in [*model.named_parameters(), *kept.items()]}
    everyone: list[dict[Key, tuple[int, float]]] = [{} for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(everyone, mine, group=group)
    problems, guilty = [], set()
    for key in sorted({key for found in everyone for key in found}):
        holders: dict[int, tuple[float, list[int]]] = {}  # by checksum alone: a norm of NaN equals no other
        for rank, found in enumerate(everyone):
            if key in found:
                checksum, norm = found[key]
                holders.setdefault(checksum, (norm, []))[1].append(rank)
        if len(holders) > 1:
            values = "; ".join(f"rank(s) {ranks}: norm {norm:.9g}" for norm, ranks in holders.values())
            problems.append(f"{key[0]} ({values})")
            largest = max((ranks for _, ranks in holders.values()), key=len)
            guilty |= {rank for _, ranks in holders.values() if ranks is not largest for rank in ranks}
    if problems:
        raise DesyncError(
            f"parameters that should be the same have drifted apart: {'; '.join(problems)}. Their gradients were not "
            "reduced over all ranks that hold them, or the ranks started from different values",
            ranks=tuple(sorted(guilty)),
        )


def _key(name: str, tensor: Tensor) -> Key:
    if not isinstance(tensor, DTensor):
        return name, ()
    mesh = tensor.device_mesh
    coordinate: list[int] = list(tensor.device_mesh.get_coordinate() or ())
    cut = [d for d, placement in enumerate(tensor.placements) if not isinstance(placement, Replicate)]
    return name, tuple((mesh.size(d), coordinate[d]) for d in cut)


def _digest(tensor: Tensor) -> tuple[int, float]:
    """(a checksum of the bits that minds their order, the norm)."""
    local = local_part(tensor).detach().contiguous()
    widths = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = local.view(-1).view(widths[local.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=local.device)
    for part in torch.split(bits, CHUNK):
        odd = 2 * torch.arange(part.shape[0], device=part.device) + 1
        total = total * 1000003 + (part.to(torch.int64) * odd * 0x9E3779B1).sum()
    return int(total), float(torch.linalg.vector_norm(local.double()))
