"""Where PyTorch 2.13 and transformers 5.24 treat float64 as if it were narrow."""

from __future__ import annotations

from typing import Any

import torch


def reduce_float64_like_float32() -> None:
    """FSDP2 divides gradients by their factor once in float32 and bfloat16, but twice in any other dtype where its
    group has one rank, as that of the experts has when each rank holds its own. Here float64 takes float32's way.
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives

    factors = collectives._get_gradient_divide_factors

    def divided_once(scatter: Any, reduce: Any, dtype: torch.dtype, *more: Any, **named: Any) -> Any:
        return factors(scatter, reduce, torch.float32 if dtype == torch.float64 else dtype, *more, **named)

    collectives._get_gradient_divide_factors = divided_once  # type: ignore[assignment]


def shard_float64_whole() -> None:
    """Routers of transformers make their weights in float32, and `from_pretrained` gives those an FSDP unit of their
    own in bfloat16 and float16 only. Here a float64 model is float64 throughout before it is sharded, as the reference.
    """
    from transformers import PreTrainedModel

    distribute = PreTrainedModel.maybe_distribute_model.__func__  # type: ignore[attr-defined]

    def whole(cls: Any, model: Any, *more: Any, **named: Any) -> Any:
        if model.config.dtype == torch.float64:
            model.to(torch.float64)
        return distribute(cls, model, *more, **named)

    PreTrainedModel.maybe_distribute_model = classmethod(whole)  # type: ignore[method-assign, assignment]
