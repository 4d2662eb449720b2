"""Up and down of an expert MLP from tensors by name."""

from __future__ import annotations

import torch
from torch import Tensor

from trimtab.experts.weight import GroupedWeight, LoraFactors


def expert_weights(
    up: Tensor, down: Tensor, up_bias: Tensor | None = None, down_bias: Tensor | None = None, *,
    transposed: bool = False, lora: dict[str, LoraFactors] | None = None, format: str = "",
    scales: tuple[Tensor | None, Tensor | None] = (None, None), dtype: torch.dtype | None = None,
) -> tuple[GroupedWeight, GroupedWeight]:  # fmt: skip
    """lora: by "up" and "down". format, scales, dtype: where `up` and `down` are codes."""

    def made(name: str, value: Tensor, bias: Tensor | None, own: Tensor | None) -> GroupedWeight:
        biases = () if bias is None else (bias,)
        return GroupedWeight(
            values=(value,), biases=biases, scales=own, lora=(lora or {}).get(name), transposed=transposed,
            format=format, dtype=dtype,
        )  # fmt: skip

    return made("up", up, up_bias, scales[0]), made("down", down, down_bias, scales[1])
