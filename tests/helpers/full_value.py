"""The whole value of a tensor that ranks share, by torch alone."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def full_value(tensor: Tensor) -> Tensor:
    """As `full_tensor`. Every rank of the tensor's mesh calls.

    torch 2.11 refuses a gate and an up half that are cut alike, before it sends anything. There each placement is
    undone by itself, the last mesh dim's first.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    try:
        return tensor.full_tensor()
    except ValueError as error:
        if "unable to be interpreted into a corresponding shard_order" not in str(error):
            raise
    mesh, placements, local = tensor.device_mesh, tensor.placements, tensor.to_local()
    for dim in reversed(range(mesh.ndim)):
        if not placements[dim].is_replicate():
            before = [*placements[:dim], *[Replicate()] * (mesh.ndim - dim)]
            shape, _ = compute_local_shape_and_global_offset(tensor.shape, mesh, before)
            local = placements[dim]._to_replicate_tensor(local, mesh, dim, list(shape))  # type: ignore[attr-defined]
    return local
