"""Which boxes of a global tensor this rank holds, for torch.distributed.checkpoint.

torch describes a DTensor by one box, which is wrong where a rank holds several stretches of a dim: under expert
tensor parallelism `up` [E, 2F, D] is cut in its gate half and in its up half alike. Here every stretch is a box of its
own, so that a checkpoint holds plain global tensors and any layout reads what it needs from any other's.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from trimtab.errors import InputError
from trimtab.parallel.meshes import local_part

Run = tuple[int, int, int]
"""Consecutive indices of a dim: where they begin in the global tensor, where in this rank's, and how many."""


class Pieces:
    """A tensor as the boxes that this rank holds, under torch's `_Checkpointable` protocol.

    Args:
        name: for errors.
        tensor: a DTensor of any placements but Partial, or a plain tensor that every rank holds whole.

    Raises:
        InputError: a Partial DTensor, or one whose local part is not what its placements say.
    """

    def __init__(self, name: str, tensor: Tensor) -> None:
        self.global_size, self.dtype = tensor.size(), tensor.dtype
        local = local_part(tensor)
        self.local = local.detach()
        self.boxes: dict[torch.Size, Tensor] = {}
        held = _held(name, tensor)
        if held is None:
            return
        if tuple(map(len, held)) != tuple(local.shape):
            raise InputError(
                f"{name}: this rank holds {tuple(local.shape)}, its placements say {[len(i) for i in held]}"
            )
        for runs in product(*(list(_runs(index, n)) for index, n in zip(held, self.global_size, strict=True))):
            view = self.local
            for dim, (_, start, length) in enumerate(runs):
                view = view.narrow(dim, start, length)
            self.boxes[torch.Size([first for first, _, _ in runs])] = view

    def size(self) -> torch.Size:
        return self.global_size

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.local)
        return [
            WriteItem(
                index=MetadataIndex(fqn, offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(offsets=offsets, sizes=view.size()),
                    properties=properties,
                    size=self.global_size,
                ),
            )
            for offsets, view in self.boxes.items()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offsets=offsets, sizes=view.size()) for offsets, view in self.boxes.items()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self.boxes[index.offset]


def _held(name: str, tensor: Tensor) -> list[Tensor] | None:
    """Per dim, the global indices that this rank holds, in its order; None outside of the tensor's mesh."""
    held = [torch.arange(n, device="cpu") for n in tensor.shape]
    if not isinstance(tensor, DTensor):
        return held
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return None
    for mesh_dim, placement in enumerate(tensor.placements):
        if isinstance(placement, Replicate):
            continue
        cut: Shard | _StridedShard
        if isinstance(placement, _StridedShard):
            cut = _StridedShard(0, split_factor=placement.split_factor)
        elif type(placement) is Shard:
            cut = Shard(0)
        else:
            raise InputError(f"{name}: a DTensor with the placement {placement} cannot be saved; reduce it first")
        index = held[placement.dim]
        parts, _ = cut._split_tensor(index, mesh.size(mesh_dim), with_padding=False, contiguous=False)
        held[placement.dim] = parts[coordinate[mesh_dim]]
    return held


def _runs(index: Tensor, size: int) -> Iterator[Run]:
    """The stretches of consecutive indices; one of no length, at the end of the dim, where there are none."""
    cuts = (index.diff() != 1).nonzero().flatten() + 1
    bounds = [0, *cuts.tolist(), len(index)]
    first = [*index.tolist(), size]
    for start, end in zip(bounds, bounds[1:], strict=False):
        yield first[start], start, end - start
