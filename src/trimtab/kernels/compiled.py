"""The backend "cpu": expert MLPs in C++, one call forward, one or two backward. TRIMTAB_COMPILED=0 switches it off.

    forward            y from x                                                                        cpu/forward.h
    backward           dx, dw and, if there is no d_pre to keep for later, the parameters' gradients   cpu/backward.h
    weight_gradients   later, from x, dy, pre and d_pre                                                cpu/wgrad.h
    place_slots        the plan of a rank's experts                                                    cpu/experts.cpp

What these do not cover goes block by block, see `trimtab.experts.passes`. Sums are taken in float32, and an expert
row's bits depend on no other row, on no thread and on no number of threads. A weight in float32 beside rows in bfloat16
is rounded on the way.

Legend: M rows, R expert rows, E experts, D model dim, F expert hidden dim, I width of the pre-activations.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial, partialmethod
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from trimtab.errors import BackendError
from trimtab.kernels.api import Block, as_it_lies
from trimtab.kernels.bf16 import Bf16Products
from trimtab.kernels.compiler import is_made, load
from trimtab.kernels.rows import ExpertPlan
from trimtab.kernels.tensor_checks import plain
from trimtab.kernels.torch_mm import TorchBackend

SWITCH = "TRIMTAB_COMPILED"
SOURCES = Path(__file__).parent / "cpu"
MAIN = SOURCES / "experts.cpp"

TYPES = {torch.float32: 0, torch.bfloat16: 1}
CODES = {"nf4": 2, "int8": 3, "fp8": 4, "mxfp4": 5, "packed": 6, "packed_pairs": 6}
"""Formats of `trimtab.experts.quantized` by their numbers in cpu/call.h."""
ACTIVATIONS = ("swiglu", "geglu", "geglu_tanh", "clamped_swiglu", "relu_squared", "gelu", "gelu_tanh")
"""In the order of their numbers in cpu/call.h."""

_CALLS = ("forward", "backward", "weight_gradients")
_NUMBERS = (
    "act", "transposed", "type_up", "type_down", "add_up", "add_down", "interleaved", "alpha", "limit",
    "shift", "scale_up", "scale_down", "M", "R", "E", "D", "F", "rank_up", "rank_down",
)  # fmt: skip
_TENSORS = (
    "row_R", "slot_R", "offsets", "w", "x", "up", "down", "up_bias", "down_bias", "pre", "y", "dy", "d_pre", "dx",
    "dw", "d_up", "d_down", "d_up_bias", "d_down_bias", "up_a", "up_b", "down_a", "down_b", "u_up", "u_down", "v_up",
    "v_down", "d_up_a", "d_up_b", "d_down_a", "d_down_b", "up_scales", "down_scales",
)  # fmt: skip
_CALL = struct.Struct("11i 5f 7q 33P 2P")
"""cpu/call.h, field by field: int32, float, int64 and addresses, of which the library sets the last two."""


class CompiledKernels(TorchBackend):
    """The backend "torch", and whole expert MLPs in C++. Use `compiled_kernels()`, which shares them.

    instructions: what they were compiled for. bf16: what makes their products of bfloat16.

    Args:
        products: of `trimtab.kernels.bf16.PRODUCTS` those alone instead of the fastest.
        defines: macros for the compiler, for tests. TRIMTAB_EMULATE_BF16 names a header that gives any machine
            all products, slowly.

    Raises:
        BackendError: switched off, not compiled, or not for this machine.
    """

    name = "cpu"
    weighs_sums = False  # a block has the bits that it would have in C++

    def __init__(self, *, products: str | None = None, defines: Sequence[str] = ()) -> None:
        if switched_off():
            raise BackendError(f"compiled kernels are switched off by {SWITCH}=0")
        lib = load(MAIN, list(SOURCES.glob("*")), defines)
        address, number = ctypes.c_void_p, ctypes.c_int64
        for name in _CALLS:
            getattr(lib, f"trimtab_{name}").argtypes = (ctypes.c_char_p, address, address)
        lib.trimtab_scratch_floats.argtypes = (ctypes.c_char_p,)
        lib.trimtab_count_slots.argtypes = (address, *[number] * 3, address, address)
        lib.trimtab_place_slots.argtypes = (address, *[number] * 3, *[address] * 6)
        for name in ("scratch_floats", "call_bytes"):
            getattr(lib, f"trimtab_{name}").restype = number
        lib.trimtab_isa.restype = ctypes.c_char_p
        if not lib.trimtab_runs_here():
            raise BackendError(f"the compiled kernels need {lib.trimtab_isa().decode()}, which this CPU does not have")
        if lib.trimtab_call_bytes() != _CALL.size:
            raise BackendError("the compiled kernels were made from other sources than these")
        super().__init__()
        self._lib, self._made_of = lib, (products, tuple(defines))
        self._faults: dict[Hashable, str | None] = {}
        self.instructions: str = lib.trimtab_isa().decode()
        self.bf16 = Bf16Products(lib.trimtab_lack, products)

    def __reduce__(self) -> tuple[Any, ...]:
        if self._made_of == (None, ()):
            return compiled_kernels, ()  # a copy shares what it was copied from
        return partial(CompiledKernels, products=self._made_of[0], defines=self._made_of[1]), ()

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return self.pool.empty(*shape, dtype=dtype)

    def grouped_mm(self, x_RA: Tensor, w_eAB: Tensor, block: Block, out: Tensor | None = None) -> Tensor:
        """As "torch" does, but by cpu/forward.h where it `multiplies` and operands lie as it reads them."""
        transposed = w_eAB.is_contiguous()
        weight = w_eAB if transposed else w_eAB.transpose(1, 2)
        (e, deep, wide), rows = w_eAB.shape, x_RA.shape[0]
        given = [x_RA, weight] if out is None else [x_RA, weight, out]
        fits = x_RA.shape[1] == deep and (out is None or out.shape == (rows, wide))
        legal = fits and self.multiplies(weight)
        if not legal or not self._takes(given, block, e):
            return super().grouped_mm(x_RA, w_eAB, block, out)
        if out is None:
            out = self.empty(rows, wide, dtype=x_RA.dtype)
        # As the pre-activations of experts without a gate, and no more.
        self.forward({
            "type": TYPES[x_RA.dtype], "act": ACTIVATIONS.index("relu_squared"), "transposed": int(transposed),
            "M": rows, "R": rows, "E": e, "D": deep, "F": wide, "row_R": torch.arange(rows, device="cpu"),
            "offsets": block.offsets_e, "x": x_RA, "up": weight, "pre": out,
        })  # fmt: skip
        return out

    def grouped_wgrad(self, a_RA: Tensor, b_RB: Tensor, block: Block, out_eAB: Tensor, *, add: bool = False) -> None:
        """As "torch" does, but by cpu/wgrad.h where it `multiplies` and operands lie as it reads them."""
        targets, a, b = as_it_lies(out_eAB, a_RA, b_RB)
        (e, wide, deep), rows = targets.shape, a.shape[0]
        there = targets.device.type == "cpu" and plain(targets, targets.dtype)
        fits = there and (a.shape, b.shape) == ((rows, wide), (rows, deep))
        if not fits or not self.multiplies(targets) or not self._takes([a, b], block, e):
            super().grouped_wgrad(a_RA, b_RB, block, out_eAB, add=add)
            return
        # As the gradient of `up` of experts without a gate: d_pre is a, x is b.
        self.weight_gradients({
            "type": TYPES[a.dtype], "act": ACTIVATIONS.index("relu_squared"), "M": rows, "R": rows, "E": e, "D": deep,
            "F": wide, "row_R": torch.arange(rows, device="cpu"), "offsets": block.offsets_e, "x": b, "d_pre": a,
            "d_up": targets, "type_up": TYPES[targets.dtype], "add_up": int(add),
        })  # fmt: skip

    def multiplies(self, weight_eAB: Tensor, dtype: torch.dtype | None = None) -> bool:
        """True if C++ multiplies rows by these weights, all experts' in one call, in `dtype` if not in theirs. It does
        not depend on the number of rows, or the bits of a row would."""
        return (dtype or weight_eAB.dtype) in TYPES and weight_eAB.shape[-1] * weight_eAB.shape[-2] > 0

    def compute_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype if dtype in TYPES else super().compute_dtype(dtype)

    def _takes(self, operands: Sequence[Tensor], block: Block, groups: int) -> bool:
        """True if these lie as the C++ reads them."""
        (rows, *_), dtype = operands[0].shape, operands[0].dtype
        here = dtype in TYPES and all(t.device.type == "cpu" and plain(t, dtype) for t in operands)
        placed = plain(block.offsets_e, torch.int64) and block.offsets_e.shape == (groups + 1,)
        return here and placed and block.rows.stop - block.rows.start == rows

    def place_slots(self, ids_MK: Tensor, num_experts: int, alignment: int) -> ExpertPlan:
        """The slots of `ids_MK` on the CPU grouped by expert; ids outside 0..num_experts - 1 are dropped."""
        ids = (ids_MK if ids_MK.dtype is torch.int64 else ids_MK.long()).contiguous()
        (rows, top_k), made = ids.shape, partial(torch.empty, dtype=torch.int64, device="cpu")
        counts_e, offsets_e = made(num_experts), made(num_experts + 1)
        given = ids.data_ptr(), rows * top_k, num_experts
        of_e = counts_e.data_ptr(), offsets_e.data_ptr()
        self._lib.trimtab_count_slots(*given, alignment, *of_e)
        slots = int(offsets_e[-1])  # of a tensor: `make_fx`, which would take it for a constant, raises
        kept = slots if alignment == 1 else int(counts_e.sum())
        slot_R, row_R, bag_index, bag_offsets = made(slots), made(slots), made(kept), made(rows + 1)
        places = slot_R.data_ptr(), row_R.data_ptr(), bag_index.data_ptr(), bag_offsets.data_ptr()
        self._lib.trimtab_place_slots(given[0], rows, top_k, num_experts, *of_e, *places)
        return ExpertPlan(slot_R, row_R, bag_index, bag_offsets, counts_e, offsets_e)

    def fault_by(self, find: Callable[[CompiledKernels], str | None], asked: Hashable) -> str | None:
        """The fault that `find` finds in them, or None. It is `asked` once for all layers that share them: a model of
        many layers would wait for the same answer many times."""
        if asked not in self._faults:
            self._faults[asked] = find(self)
        return self._faults[asked]

    def _run(self, name: str, fields: Mapping[str, Any], address: Callable[[str, Tensor], int] | None = None) -> None:
        """address: the address of a field's tensor. With it nothing is run: only the call's memory is allocated."""
        get, own = fields.get, fields["type"]
        threads = get("threads") or torch.get_num_threads()
        numbers = [get(field, 0) for field in _NUMBERS]
        if address is None:
            addresses = [0 if (t := get(field)) is None else t.data_ptr() for field in _TENSORS]
        else:
            addresses = [0 if (t := get(field)) is None else address(field, t) for field in _TENSORS]
        call = _CALL.pack(own, get("type_weights", own), self.bf16.number, threads, *numbers, *addresses, 0, 0)
        # Sums by themselves: forward and backward want as many of them, but not as much of the rest.
        sums = None
        if own != TYPES[torch.float32] and (get("y") is not None or get("dx") is not None):
            sums = self.pool.empty(fields["M"] * fields["D"], dtype=torch.float32)
        scratch = self.pool.empty(self._lib.trimtab_scratch_floats(call), dtype=torch.float32)
        if address is None:
            getattr(self._lib, f"trimtab_{name}")(call, None if sums is None else sums.data_ptr(), scratch.data_ptr())

    forward, backward, weight_gradients = (partialmethod(lambda self, *of: self._run(*of), name) for name in _CALLS)
    """Each runs on the fields of cpu/call.h that it reads: numbers, and contiguous tensors or None."""


_shared: WeakValueDictionary[str, CompiledKernels] = WeakValueDictionary()
"""Holds nothing: layers share one object, and so its pages, for as long as one of them lives."""


def compiled_kernels() -> CompiledKernels:
    """The kernels, one object that all callers share.

    Raises:
        BackendError: see `CompiledKernels`.
    """
    return _shared.get("cpu") or _shared.setdefault("cpu", CompiledKernels())


def are_made() -> bool:
    """True if `compiled_kernels` has nothing to compile.

    Raises:
        BackendError: there is no compiler.
    """
    return is_made(MAIN, list(SOURCES.glob("*")))


def at_once(kernels: object, *weights_eAB: Tensor, dtype: torch.dtype | None = None) -> bool:
    """True if `kernels` multiply by all experts of each of these in one call, see `CompiledKernels.multiplies`."""
    return isinstance(kernels, CompiledKernels) and all(kernels.multiplies(w, dtype) for w in weights_eAB)


def switched_off() -> bool:
    """True if the environment switches the compiled kernels off.

    Raises:
        BackendError: the variable is neither 0 nor 1.
    """
    value = os.environ.get(SWITCH) or "1"
    if value not in ("0", "1"):
        raise BackendError(f"{SWITCH}={value!r}: 0 switches the compiled kernels off, 1 leaves them on")
    return value == "0"
