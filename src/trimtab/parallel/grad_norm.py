"""The norm of all gradients on all ranks: what a single process would clip by."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from trimtab.errors import ConfigError, InputError
from trimtab.parallel.meshes import check_meshes, groups_of, local_part
from trimtab.validation import check_flags


@torch.no_grad()
def clip_grad_norm_(
    parameters: Iterable[Tensor] | Tensor | nn.Module, max_norm: float, *, norm_type: float = 2.0,
    error_if_nonfinite: bool = False, pp_mesh: DeviceMesh | None = None,
) -> Tensor:  # fmt: skip
    """Scale gradients in place so that their global norm is at most `max_norm`; returns the norm before, float32.

    Shards of a DTensor are summed over its mesh, of replicas one counts. Call it after gradients are reduced, with all
    parameters of the model, on every rank that holds any: the collectives follow from the parameters, and a missing
    gradient counts as zeros. A parameter with `grad_added_to_main_grad` counts by its `main_grad`.

    Args:
        parameters: all of the model, or the model itself.
        max_norm: the largest norm that gradients keep.
        norm_type: 2, another power above 0, or inf.
        error_if_nonfinite: whether a norm that is not finite raises.
        pp_mesh: pipeline stages, whose parameters are summed up too.

    Raises:
        ConfigError: `error_if_nonfinite` is neither True nor False, a power that is not above 0, or no mesh.
        InputError: a gradient whose parts are not summed yet (Partial), one on another mesh than its parameter, or a
            norm that is not finite where asked for.
    """
    check_flags(error_if_nonfinite=error_if_nonfinite)
    if not isinstance(norm_type, (int, float)) or not norm_type > 0:
        raise ConfigError(f"norm_type={norm_type!r} must be a number above 0")
    if pp_mesh is not None:
        check_meshes(pp_mesh=pp_mesh)
    if isinstance(parameters, nn.Module):
        parameters = parameters.parameters()
    params: list[Tensor] = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    largest, device = math.isinf(norm_type), next((local_part(p).device for p in params), torch.device("cpu"))
    powers: dict[DeviceMesh | None, list[Tensor]] = {None: []}
    for param in params:
        grad = _gradient(param)
        found = powers.setdefault(param.device_mesh if isinstance(param, DTensor) else None, [])
        if grad is not None and _counts_here(grad, param):
            found.append(_power(local_part(grad), norm_type))

    def joined(parts: list[Tensor], *meshes: DeviceMesh | None) -> Tensor:
        each = torch.stack([torch.zeros((), dtype=torch.float64, device=device), *parts])
        whole = each.max() if largest else each.sum()
        for group in (group for mesh in meshes for group in groups_of(mesh)):
            dist.all_reduce(whole, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=group)
        return whole

    total = joined([joined(found, mesh) for mesh, found in powers.items()], pp_mesh)
    norm = total if largest else total ** (1 / norm_type)
    if error_if_nonfinite and not bool(norm.isfinite()):
        raise InputError(f"the gradients' norm is {float(norm)}: look for the first layer whose output is not finite")
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for grad in map(_gradient, params):
        if grad is not None:
            _scale(local_part(grad), factor)
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


def _scale(t: Tensor, factor: Tensor) -> None:
    """t *= factor, rounded once: a scalar on a GPU would itself be rounded to t's dtype, and to 0 where that is float16
    and the norm was huge."""
    wide = factor.to(torch.promote_types(t.dtype, torch.float32))
    # By another tensor the CPU takes 30 times as long where t is bfloat16.
    t.mul_(wide if t.device.type == "cpu" else wide.expand_as(t))


def _counts_here(grad: Tensor, param: Tensor) -> bool:
    """True on the first of the ranks that hold the same part of a gradient."""
    placed = grad if isinstance(grad, DTensor) else param  # `main_grad` is plain
    if not isinstance(placed, DTensor):
        return True
    if any(isinstance(p, Partial) for p in placed.placements):
        raise InputError(f"a gradient {tuple(grad.shape)} is Partial over {placed.device_mesh}: reduce it first")
    if not isinstance(param, DTensor) or placed.device_mesh != param.device_mesh:
        raise InputError(f"a gradient {tuple(grad.shape)} is on {placed.device_mesh}, its parameter is not")
    where = param.device_mesh.get_coordinate()
    copies = [d for d, placement in enumerate(placed.placements) if isinstance(placement, Replicate)]
    return where is not None and all(where[d] == 0 for d in copies)
