"""The modules of the grid of pairs: each with the names of its weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trimtab.experts.activations import ACTIVATIONS
from trimtab.experts.linear import GroupedLinear
from trimtab.experts.module import ExpertMLP
from trimtab.experts.quantized import FORMATS, scales_of

if TYPE_CHECKING:
    from helpers.pairs import Pair

K = 2
EMPTY = ("last", "none", "first", "middle", "all", "no row", "hot", "one", "duplicates", "sentinel")
"""Who has no rows. "hot": expert 1 has a slot of every row, "one": and there is no other; "duplicates": a row's slots
are all of one expert; "sentinel": dropped slots are numbered as many experts as there are."""


def _mlp(pair: Pair, options: dict[str, Any]) -> tuple[Any, tuple[str, ...]]:
    named = pair.activation if pair.activation in ACTIVATIONS else "swiglu"
    layer = ExpertMLP(pair.experts, pair.dim, pair.hidden, activation=named, **options)
    layer.activation = pair.activation
    return layer, layer.parameter_names[:2]


def _linear(pair: Pair, options: dict[str, Any]) -> tuple[Any, tuple[str, ...]]:
    single = "separate" not in pair.words
    return GroupedLinear(pair.experts, pair.dim, pair.hidden, single_parameter=single, **options), ("weight",)


def _transformer_engine(pair: Pair, options: dict[str, Any]) -> tuple[Any, tuple[str, ...]]:
    from trimtab.integrations import transformer_engine as te

    layer = te.GroupedLinear(
        pair.experts, pair.dim, pair.hidden, bias=options["bias"], params_dtype=pair.dtype, device="cpu",
        fuse_wgrad_accumulation=pair.main_grad != "off", delay_wgrad_compute=pair.delayed,
        single_grouped_weight=not pair.words & {"separate", "separate_weight"},
        single_grouped_bias=not pair.words & {"separate", "separate_bias"},
        recipe=options["recipe"], kernels=options["kernels"],
    )  # fmt: skip
    return layer, ("weight",)


def _megatron(pair: Pair, options: dict[str, Any]) -> tuple[Any, tuple[str, ...]]:
    from integrations.megatron.test_experts import GROUPS, config
    from trimtab.integrations.megatron.experts import Experts

    made = config(
        hidden_size=pair.dim, moe_ffn_hidden_size=pair.hidden, add_bias_linear=options["bias"], gated_linear_unit=True,
        activation_func=torch.nn.functional.silu, gradient_accumulation_fusion=pair.main_grad != "off",
        num_moe_experts=pair.experts,
    )  # fmt: skip
    made.delay_wgrad_compute = pair.delayed  # which Megatron's own checks allow with overlapped exchanges alone
    single = "separate" not in pair.words
    layer = Experts(pair.experts, made, pg_collection=GROUPS, single_parameter=single).to(pair.dtype)
    layer.kernels = options["kernels"]
    return layer, ("linear_fc1.weight", "linear_fc2.weight")


MODULES = {"mlp": _mlp, "linear": _linear, "te": _transformer_engine, "megatron": _megatron}


@torch.no_grad()
def quantize(layer: ExpertMLP, name: str) -> None:
    """By the public encoder, or as a loader of checkpoints does where there is none: random codes."""
    if FORMATS[name].quantize:
        layer.quantize_(name)
        return
    layer.quantize_("int8")
    layer.codes = name, layer.codes[1]  # type: ignore[index]
    for key in layer.parameter_names[:2]:
        shape = layer.get_parameter(key).shape
        codes = torch.randint(0, 120, (*shape[:-1], shape[-1] // FORMATS[name].per_byte), dtype=torch.uint8)
        scales = torch.full(scales_of(codes.flatten(1, -2), name), 0.02)
        if FORMATS[name].scales is torch.uint8:
            scales = scales.fill_(122).to(torch.uint8)
        setattr(layer, key, nn.Parameter(codes, requires_grad=False))
        setattr(layer, f"{key}_scales", nn.Parameter(scales, requires_grad=False))


def slots(pair: Pair, rows: int, g: torch.Generator) -> Tensor:
    """Ids [rows, K] of an MLP."""
    some = torch.tensor([e for e, size in enumerate(pair.sizes) if size] or [-1])
    ids = some[torch.randint(0, len(some), (rows, K), generator=g)]
    dropped = torch.rand(rows, K, generator=g) < 0.2
    if pair.empty in ("hot", "one"):
        ids[:, 0], dropped[:, 0], dropped[:, 1] = min(1, pair.experts - 1), False, pair.empty == "one"
    if pair.empty == "duplicates":
        ids = ids[:, :1].expand(-1, K)
    return ids.masked_fill(dropped, pair.experts if pair.empty == "sentinel" else -1)
