"""Bugs of what is handed to the compiled experts, and of what they leave: between the layer and the kernels.

The kernels' own self-test calls them directly, so it sees nothing of these. Where nothing was compiled the experts run
another way: there these bugs are in no code that runs, and survive.

Legend: R expert rows, E experts, D model dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mutants.patching import Mutant, Patches
from trimtab.experts import on_cpu

Fields = dict[str, Any]
Change = Callable[[str, Fields], Fields]
NAN = float("nan")


class _Between:
    """The kernels of a call, whose fields are changed before they see them and results before others do."""

    def __init__(self, kernels: Any, before: Change, after: Change) -> None:
        self._kernels, self._before, self._after = kernels, before, after

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)

    def _run(self, name: str, fields: Fields) -> None:
        given = self._before(name, dict(fields))
        getattr(self._kernels, name)(given)
        self._after(name, given)

    def forward(self, fields: Fields) -> None:
        self._run("forward", fields)

    def backward(self, fields: Fields) -> None:
        self._run("backward", fields)

    def weight_gradients(self, fields: Fields) -> None:
        self._run("weight_gradients", fields)


def _as_is(name: str, fields: Fields) -> Fields:
    return fields


def _put(p: Patches, before: Change = _as_is, after: Change = _as_is) -> None:
    p.wrap(on_cpu, "_kernels", lambda taken: lambda call: _Between(taken(call), before, after))


def _offsets(p: Patches) -> None:
    def change(name: str, fields: Fields) -> Fields:
        offsets = fields["offsets"].clone()
        offsets[1:-1] = (offsets[1:-1] - 1).clamp(min=0)
        return fields | {"offsets": offsets}

    _put(p, change)


def _slots(p: Patches) -> None:
    _put(p, lambda name, f: f if name == "forward" else f | {"slot_R": f["slot_R"].roll(1)})


def _rows(p: Patches) -> None:
    _put(p, lambda name, f: f if name == "forward" else f | {"row_R": f["row_R"].roll(1)})


def _stale_pre(p: Patches) -> None:
    kept: dict[tuple[torch.Size, torch.dtype], Tensor] = {}

    def before(name: str, fields: Fields) -> Fields:
        pre = fields["pre"]
        return fields if name == "forward" else fields | {"pre": kept[pre.shape, pre.dtype]}

    def after(name: str, fields: Fields) -> Fields:
        if name == "forward" and (pre := fields["pre"]) is not None:
            kept[pre.shape, pre.dtype] = pre.detach().clone()
        return fields

    _put(p, before, after)


def _added(p: Patches) -> None:
    def change(name: str, fields: Fields) -> Fields:
        for weight in ("up", "down"):
            if fields.get(f"d_{weight}") is not None and not fields[f"add_{weight}"]:
                fields[f"d_{weight}"].fill_(NAN)
                fields[f"add_{weight}"] = 1
        return fields

    _put(p, change)


def _empty(p: Patches) -> None:
    def drop(name: str, fields: Fields) -> Fields:
        without = fields["offsets"][1:] == fields["offsets"][:-1]
        if fields.get("d_up") is not None:
            fields["d_up"][without] = NAN
        return fields

    _put(p, after=drop)


def _row_ends(p: Patches) -> None:
    def leave(name: str, fields: Fields) -> Fields:
        if name == "forward":
            fields["y"][:, fields["D"] // 8 * 8 :] = 0
        return fields

    _put(p, after=leave)


MUTANTS = (
    Mutant(name="compiled_offsets_off_by_one", patch=_offsets, look="1r-local/random/float32",
           says="the last row of each expert's segment goes through the next expert"),
    Mutant(name="compiled_slots_of_others", patch=_slots, look="1r-local/random/float32",
           says="the backward takes each row's weight, and puts its gradient, at another row's slot"),
    Mutant(name="compiled_rows_of_others", patch=_rows, look="1r-local/random/float32",
           says="the backward gathers another token's row of dy"),
    Mutant(name="compiled_pre_of_last_call", patch=_stale_pre, look="1r-local/alternating/float32",
           says="pre-activations kept with the kernels, not with the call: a second layer overwrites the first one's"),
    Mutant(name="compiled_wgrad_onto_garbage", patch=_added, look="1r-local/random/float32",
           says="weight gradients are added to memory that nobody has written"),
    Mutant(name="compiled_empty_expert_unwritten", patch=_empty, look="1r-local/cold_rank/float32",
           says="the gradient of `up` of an expert without rows is never written (pytorch#172439)"),
    Mutant(name="compiled_ends_of_rows", patch=_row_ends, look="1r-local/zipf2/float32",
           says="a vector loop leaves out the last columns of rows whose width it does not divide"),
)  # fmt: skip
