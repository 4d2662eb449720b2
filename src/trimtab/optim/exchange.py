"""Whole matrices from what ranks hold of them: dealt out over the ranks that share them, worked on, and brought home.

    cut in the last dims    Shard(1), Shard(2) of a stack, either dim of a plain matrix; strided; uneven shares
    whole on its rank       Shard(0) of a stack, strided too, no shard at all, plain tensors: nothing is sent

One all-to-all for each mesh dim that cuts: of N matrices every rank of that dim sends its share of each, and gets about
N / ranks of them whole; one more brings the shares home. Ranks that have the same do the same work, on the same bits.

Legend: N matrices, or stacks of one expert; m, n their dims.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from trimtab.errors import ConfigError, InputError
from trimtab.kernels.tensor_checks import in_clean_thread, no_values
from trimtab.optim.layout import Layout
from trimtab.parallel.meshes import check_meshes, local_part


class Cut(NamedTuple):
    """One mesh dim that shares a dim of matrices out.

    dim: of the parameter. sizes: of each rank's share, along `dim`. pieces: `dim` is so many equal runs, each of them
    shared out, so that rank r has the r-th part of every run; 1 for Shard.
    """

    group: dist.ProcessGroup
    dim: int
    sizes: tuple[int, ...]
    pieces: int

    @property
    def runs(self) -> list[int]:
        """What each rank has of one run."""
        return [size // self.pieces for size in self.sizes]


def local_gradient(name: str, param: Tensor) -> Tensor:
    """This rank's part of a parameter's gradient, placed as the parameter is: a Partial one is summed.

    Raises:
        InputError: it is on another mesh, or another part than the parameter's.
    """
    grad = param.grad
    assert grad is not None
    placed, own = (t.placements if isinstance(t, DTensor) else None for t in (grad, param))
    if placed == own or (own is not None and placed is None and grad.shape == local_part(param).shape):
        return local_part(grad)
    if not (isinstance(grad, DTensor) and isinstance(param, DTensor) and grad.device_mesh == param.device_mesh):
        raise InputError(f"the gradient of {name} is {placed}, the parameter {own}: place it alike before the step")
    # Such as Partial, of norms under sequence parallel.
    return local_part(grad.redistribute(placements=param.placements))


def cuts_of(name: str, param: Tensor) -> list[Cut]:
    """The mesh dims that cut matrices of a parameter, from the first to the last.

    Raises:
        ConfigError: placements that are not known, or shares that lie apart and are not equal, or are shared out once
            more: FSDP2 on the dim of a packed projection under TP, where a DTensor says another order than it has. Or
            a plain tensor that spmd_types says is a share.
    """
    if not isinstance(param, DTensor):
        types: Any = sys.modules.get("spmd_types.runtime")
        if types and not {*map(str, types.get_local_type(param).values())} <= {"R", "I"}:
            raise ConfigError(f"{name} is a share, by spmd_types, and no DTensor: take spmd_backend='partial_dtensor'")
        return []
    mesh, place = param.device_mesh, param.device_mesh.get_coordinate()
    sizes, found = list(param.shape), list[Cut]()
    for at, placement in enumerate(param.placements):
        if placement.is_replicate() or place is None:
            continue
        pieces = int(getattr(placement, "split_factor", placement.is_shard()))  # a strided shard's class is private
        if not pieces:
            raise ConfigError(f"{name} is {placement} over {mesh}: Muon takes what is sharded or whole")
        dim, ranks = placement.dim % param.ndim, mesh.size(at)  # type: ignore[attr-defined]
        whole = not dim and param.ndim > 2  # of a stack
        again = ranks > 1 and any(cut.dim == dim for cut in found)
        if pieces > 1 and (sizes[dim] % (pieces * ranks) or again) and not whole:
            raise ConfigError(
                f"{name} {tuple(param.shape)} is {param.placements} over {mesh}: {placement} must cut equally, and "
                "no mesh dim before may share that dim out"
            )
        each = -(-sizes[dim] // ranks)
        shares = tuple(max(0, min(each, sizes[dim] - each * rank)) for rank in range(ranks))
        sizes[dim] = shares[place[at]]
        if ranks > 1 and not whole:
            found.append(Cut(mesh.get_group(at), dim, shares, pieces))
    if found and not no_values(param.device):  # else nobody can read the mesh
        check_meshes(**{f"the mesh of {name}": mesh})
    return found


def check_gradients(params: Sequence[tuple[str, Tensor, Sequence[Cut]]]) -> None:
    """One all-reduce in each group that shares matrices. params: names, parameters, and their cuts.

    Raises:
        InputError: on all ranks of a group, one of which has no gradient of what others have one of. They would
            exchange other matrices than the rest.
    """
    groups: dict[dist.ProcessGroup, list[int]] = {}
    for i, (_, _, cuts) in enumerate(params):
        for cut in cuts:
            groups.setdefault(cut.group, []).append(i)
    rows = [[param.grad is not None, param.grad is None] for _, param, _ in params] if groups else []
    seen = torch.tensor(rows, dtype=torch.uint8, device=params[0][1].device if rows else None)
    for group, shared in groups.items():
        told = seen.amin(1, keepdim=True).repeat(1, 2)  # an earlier group's mismatch is told to this one
        told[shared] = seen[shared]
        dist.all_reduce(told, dist.ReduceOp.MAX, group)
        seen = seen.maximum(told)
    if no_values(seen.device):
        return
    if names := [params[i][0] for i, (has, lacks) in enumerate(seen.tolist()) if has and lacks]:
        raise InputError(
            f"{names[0]} has a gradient on some of the ranks that share it, and none on others: give it zeros"
        )


def largest_part(param: Tensor, cuts: Sequence[Cut]) -> int:
    """Elements of the largest of a parameter's parts along `cuts`: the same on all of their ranks."""
    shape = list(local_part(param).shape)
    for cut in reversed(cuts):
        shape[cut.dim] = cut.sizes[0]
    return math.prod(shape)


def parts_of_rows(layout: Layout, param: Tensor, cuts: Sequence[Cut]) -> list[Tensor]:
    """For each part of the layout, where its rows are along the outputs of what this rank has of the parameter."""
    if no_values(param.device):  # and yet as many rows
        return in_clean_thread(param.device, lambda: parts_of_rows(layout, param, cuts))
    table = torch.cat([torch.full((size,), part) for part, size in enumerate(layout.sizes)]).repeat(layout.repeats)
    dim = param.ndim + layout.axis
    table = table.repeat(layout.stacks) if layout.axis == -2 else table
    for cut in cuts:
        if cut.dim == dim:
            runs = torch.split(torch.unflatten(table, 0, (cut.pieces, -1)), cut.runs, 1)
            table = runs[dist.get_rank(cut.group)].flatten()
    return [(table == part).nonzero().flatten().to(param.device) for part in range(len(layout.sizes))]


def add_parts(t: Tensor, update: Tensor, alphas: Sequence[float], rows: Sequence[Tensor] | None, axis: int) -> None:
    """Add alpha times the update, of each part with its alpha; where `rows` are not told, all have one."""
    if rows is None:
        t.add_(update, alpha=alphas[0])
        return
    for alpha, here in zip(alphas, rows, strict=True):
        t.index_copy_(
            axis, here, t.index_select(axis, here).add_(update.to(t.dtype).index_select(axis, here), alpha=alpha)
        )


@contextmanager
def whole_matrices(updates: list[Tensor], cuts: Sequence[Cut]) -> Iterator[list[Tensor]]:
    """Tensors of whole matrices, to be worked on in place; at the end `updates` have what became of them.

    Args:
        updates: what this rank has of parameters that are alike, contiguous.
        cuts: of each, from `cuts_of`. Every rank of their groups must come with as many updates.
    """
    if not cuts:
        yield updates
        return
    stacked = updates[0].ndim > 2
    t = (torch.cat if stacked else torch.stack)(updates)  # [N, ..., m, n]
    steps = []
    for cut in reversed(cuts):
        dim, ranks = cut.dim + (not stacked), len(cut.sizes)
        dealt = [len(t) // ranks + (rank < len(t) % ranks) for rank in range(ranks)]  # matrices of each rank
        steps.append((cut, dim, dealt))
        runs = torch.unflatten(t, dim, (cut.pieces, -1))
        t = _swap(runs, 0, dealt, dim + 1, cut.runs, cut.group).flatten(dim, dim + 1)
    yield [t]
    for cut, dim, dealt in reversed(steps):
        runs = torch.unflatten(t, dim, (cut.pieces, -1))
        t = _swap(runs, dim + 1, cut.runs, 0, dealt, cut.group).flatten(dim, dim + 1)
    for update, own in zip(updates, t.chunk(len(updates)) if stacked else t, strict=True):
        update.copy_(own)


def _swap(
    t: Tensor, whole: int, sizes: Sequence[int], cut: int, shares: Sequence[int], group: dist.ProcessGroup
) -> Tensor:
    """One all-to-all. `t` is whole in the dim `whole` and this rank's of `shares` in the dim `cut`; what is returned is
    whole in `cut` and this rank's of `sizes` in `whole`."""
    mine = sizes[dist.get_rank(group)]
    shapes = [[{whole: mine, cut: share}.get(dim, size) for dim, size in enumerate(t.shape)] for share in shares]
    sent, got = torch.split(t, list(sizes), whole), [math.prod(shape) for shape in shapes]
    flat = t.new_empty(sum(got))
    packed = torch.cat([part.flatten() for part in sent])
    dist.all_to_all_single(flat, packed, got, [part.numel() for part in sent], group=group)
    return torch.cat([part.view(shape) for part, shape in zip(torch.split(flat, got), shapes, strict=True)], cut)
