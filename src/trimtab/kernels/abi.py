"""What crosses the C ABI of the compiled kernels: the structs of cpu/call.h and cpu/places.h.

Legend: M rows, K slots per row, R expert rows, E experts, D model dim, F expert hidden dim.
"""

from __future__ import annotations

import ctypes

import torch

TYPES = {torch.float32: 0, torch.bfloat16: 1}
ACTIVATIONS = ("swiglu", "geglu", "geglu_tanh", "clamped_swiglu", "relu_squared", "gelu", "gelu_tanh")
"""In the order of their numbers in cpu/call.h."""

_INTS = (
    "type", "type_weights", "products", "act", "threads", "folded", "transposed", "type_up", "type_down", "add_up",
    "add_down", "interleaved",
)  # fmt: skip
_SIZES = ("M", "R", "E", "D", "F")
_TENSORS = (
    "row_R", "slot_R", "offsets", "w", "x", "up", "down", "up_bias", "down_bias", "pre", "y", "dy", "d_pre", "dx",
    "dw", "d_up", "d_down", "d_up_bias", "d_down_bias", "sums", "scratch",
)  # fmt: skip


class Call(ctypes.Structure):
    """cpu/call.h, field by field."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in _INTS),
        *((name, ctypes.c_float) for name in ("alpha", "limit", "shift")),
        *((name, ctypes.c_int64) for name in _SIZES),
        *((name, ctypes.c_void_p) for name in _TENSORS),
    )


class Places(ctypes.Structure):
    """cpu/places.h, likewise."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("M", "K", "E", "alignment")),
        *((name, ctypes.c_void_p) for name in ("ids", "counts", "offsets", "slot_R", "row_R")),
        *((name, ctypes.c_void_p) for name in ("bag_index", "bag_offsets")),
    )
