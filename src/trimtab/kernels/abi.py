"""What crosses the C ABI of the compiled kernels: the struct of cpu/call.h.

Legend: M rows, R expert rows, E experts, D model dim, F expert hidden dim.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

import torch

TYPES = {torch.float32: 0, torch.bfloat16: 1}
ACTIVATIONS = ("swiglu", "geglu", "geglu_tanh", "clamped_swiglu", "relu_squared", "gelu", "gelu_tanh")
"""In the order of their numbers in cpu/call.h."""

_NUMBERS = (
    "type", "type_weights", "products", "act", "threads", "folded", "transposed", "type_up", "type_down", "add_up",
    "add_down", "interleaved", "alpha", "limit", "shift", "M", "R", "E", "D", "F",
)  # fmt: skip
_TENSORS = (
    "row_R", "slot_R", "offsets", "w", "x", "up", "down", "up_bias", "down_bias", "pre", "y", "dy", "d_pre", "dx",
    "dw", "d_up", "d_down", "d_up_bias", "d_down_bias",
)  # fmt: skip
_CALL = struct.Struct("12i 3f 5q 19P 2P")
"""cpu/call.h, field by field: int32, float, int64 and addresses, of which the library sets the last two."""
CALL_BYTES = _CALL.size


def packed(fields: Mapping[str, Any]) -> bytes:
    """A call, from numbers, and contiguous tensors or None; what is not there is 0."""
    get = fields.get
    addresses = [0 if (t := get(name)) is None else t.data_ptr() for name in _TENSORS]
    return _CALL.pack(*[get(name, 0) for name in _NUMBERS], *addresses, 0, 0)
