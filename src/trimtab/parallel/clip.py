"""The norm of all gradients, wherever they lie: what a single process would clip by."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from trimtab.errors import InputError

_Place = tuple[DeviceMesh, tuple[int, ...]]
"""A mesh and those of its dims over which parameters are sharded."""


@torch.no_grad()
def clip_grad_norm_(
    parameters: Iterable[Tensor] | Tensor | nn.Module,
    max_norm: float,
    *,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    pp_mesh: DeviceMesh | None = None,
) -> Tensor:
    """Scale gradients in place so that their global norm is at most `max_norm`; returns the norm before, float32.

    A parameter counts once: shards of a DTensor are summed over the mesh dims that shard it (ep, etp, fsdp, efsdp),
    replicas are not. Call it after gradients are reduced, with all parameters of the model, on every rank that holds
    any: the collectives follow from the parameters, so a missing gradient counts as zeros and hangs nobody. Where a
    gradient went into `main_grad` (the parameter says so with `grad_added_to_main_grad`), that is what counts.

    Args:
        norm_type: 2, another power, or inf.
        pp_mesh: pipeline stages, whose parameters are summed up too.

    Raises:
        InputError: a gradient whose parts are not summed yet (Partial), or a norm that is not finite where asked for.
    """
    params: list[Tensor]
    if isinstance(parameters, nn.Module):
        params = list(parameters.parameters())
    else:
        params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    powers: dict[_Place | None, list[Tensor]] = {}
    device = next((_local(p).device for p in params), torch.device("cpu"))
    for param in params:
        grad, place = _gradient(param), _place_of(param)
        found = powers.setdefault(place, [])
        if grad is not None:
            if isinstance(grad, DTensor) and any(isinstance(p, Partial) for p in grad.placements):
                raise InputError(f"a gradient {tuple(grad.shape)} is Partial over {grad.device_mesh}: reduce it first")
            found.append(_power(_local(grad), norm_type))
    total = torch.zeros((), dtype=torch.float64, device=device)
    for place, found in powers.items():
        zero = total.new_zeros(1)
        part = torch.stack([*found, zero[0]])
        part = part.max() if math.isinf(norm_type) else part.sum()
        mesh, dims = (None, ()) if place is None else place
        for dim in dims:
            assert mesh is not None
            _join(part, norm_type, mesh.get_group(dim))
        total = torch.maximum(total, part) if math.isinf(norm_type) else total + part
    if pp_mesh is not None:
        _join(total, norm_type, pp_mesh.get_group())
    norm = total if math.isinf(norm_type) else total ** (1 / norm_type)
    if error_if_nonfinite and not bool(norm.isfinite()):
        raise InputError(f"the gradients' norm is {float(norm)}: look for the first layer whose output is not finite")
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for param in params:
        found_grad = _gradient(param)
        if found_grad is not None:
            local = _local(found_grad)
            local.mul_(factor.to(local.dtype))
    return norm.float()


def _gradient(param: Tensor) -> Tensor | None:
    fused: Tensor | None = getattr(param, "main_grad", None)
    return fused if getattr(param, "grad_added_to_main_grad", False) else param.grad


def _power(t: Tensor, norm_type: float) -> Tensor:
    """norm ** norm_type, or the norm itself for inf; 0 for no elements."""
    dtype = torch.promote_types(t.dtype, torch.float32)
    if math.isinf(norm_type):  # which torch refuses for no elements
        largest: Tensor = torch.linalg.vector_norm(nn.functional.pad(t.reshape(-1), (0, 1)), norm_type, dtype=dtype)
        return largest.double()
    norm: Tensor = torch.linalg.vector_norm(t, norm_type, dtype=dtype)
    return norm.double().pow(norm_type)


def _join(part: Tensor, norm_type: float, group: dist.ProcessGroup) -> None:
    dist.all_reduce(part, dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM, group=group)


def _place_of(param: Tensor) -> _Place | None:
    if not isinstance(param, DTensor):
        return None
    dims = tuple(d for d, placement in enumerate(param.placements) if not isinstance(placement, Replicate))
    return param.device_mesh, dims


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
