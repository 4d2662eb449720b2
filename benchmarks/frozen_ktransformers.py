"""KTransformers' kernels of bfloat16 for CPUs: `AMXBF16_MOE`, and `AMXBF16_SFT_MOE` with adapters and a backward.

The extension is loaded by itself, for the package would want all that it depends on; of its builds that for this
processor, as the package picks it. Both copy the weights into an order of their own, the second once more for the
backward; it takes adapters in bfloat16, and gate and up each with a factor A.

Legend: T tokens, K experts per token, D model dim, F expert hidden dim, b experts that were drawn, E experts, R rank,
I = 2F.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.frozen_peers import Spread, package_file
from benchmarks.layer_case import LayerCase
from benchmarks.layer_step import Layer


def extension() -> Any:
    """Raises ImportError where it is not installed, or this processor multiplies no bfloat16."""
    if not torch.cpu._is_avx512_bf16_supported():
        raise ImportError("its kernels of bfloat16 want AVX-512 with bf16, which this processor does not have")
    variant = "amx" if torch.cpu._is_amx_tile_supported() else "avx512_bf16"
    file = package_file("kt_kernel", f"_kt_kernel_ext_{variant}.*.so")
    spec = importlib.util.spec_from_file_location("kt_kernel_ext", file)
    assert spec is not None
    assert spec.loader is not None
    kt = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(kt)
    return kt


def ktransformers_bf16(case: LayerCase, up_bID: Tensor, down_bDF: Tensor, spread: Spread) -> Layer:
    kt = extension()
    pool = kt.CPUInfer(torch.get_num_threads())
    config = kt.moe.MOEConfig(case.num_experts, case.top_k, case.dim, case.hidden, 0)
    config.max_len, config.pool = max(case.tokens, 512), pool.backend_
    halves = (*up_bID.chunk(2, 1), down_bDF)
    drawn = [[half[i].contiguous() for i in spread(torch.arange(len(half))).tolist()] for half in halves]
    config.gate_projs, config.up_projs, config.down_projs = ([[t.data_ptr() for t in part]] for part in drawn)
    config.gate_scales = config.up_scales = config.down_scales = [[0] * case.num_experts]
    experts, places = kt.moe.AMXBF16_MOE(config), torch.arange(case.num_experts)
    _run(pool, experts.load_weights_task(places.data_ptr()))

    def layer(x_TD: Tensor, ids_TK: Tensor, w_TK: Tensor) -> Tensor:
        y_TD, count = torch.empty_like(x_TD), torch.tensor([len(x_TD)], dtype=torch.int32)
        given = (ids_TK, w_TK, x_TD, y_TD)
        _run(pool, experts.forward_task(count.data_ptr(), case.top_k, *(t.data_ptr() for t in given), False))
        return y_TD

    return layer


def _run(pool: Any, task: Any) -> None:
    pool.submit(task)
    pool.sync()


def put_adapted(model: Any, *, tokens: int, rank: int, alpha: float) -> None:
    """Each layer's experts under peft's wrappers compute by `AMXBF16_SFT_MOE`, which has the only copy of weights.

    peft's factors stay the parameters. Raises ImportError as `extension`.
    """
    kt = extension()
    pool = kt.CPUInfer(torch.get_num_threads())
    for layer in model.get_base_model().model.layers:
        outer = layer.mlp.experts
        outer.forward = Adapted(kt, pool, outer, tokens=tokens, rank=rank, alpha=alpha)


class Adapted:
    """One layer's: called as transformers calls experts."""

    def __init__(self, kt: Any, pool: Any, outer: nn.Module, *, tokens: int, rank: int, alpha: float) -> None:
        self.pool, self.wrappers, inner = pool, {}, outer
        while hasattr(inner, "base_layer"):
            self.wrappers[inner.parameter_name] = inner
            inner = inner.base_layer
        gate_up, down = inner.gate_up_proj, inner.down_proj
        E, D, F = down.shape
        gate, up = (half.contiguous() for half in gate_up.detach().chunk(2, 1))
        self.places, K = torch.arange(E), inner.config.num_experts_per_tok
        config = kt.moe.MOESFTConfig()
        config.expert_num, config.num_experts_per_tok, config.hidden_size, config.intermediate_size = E, K, D, F
        config.lora_rank, config.lora_alpha, config.max_cache_depth, config.max_len = rank, alpha, 1, tokens
        config.physical_to_logical_map, config.pool = self.places.data_ptr(), pool.backend_
        config.gate_proj, config.up_proj, config.down_proj = gate.data_ptr(), up.data_ptr(), down.data_ptr()
        self.moe = kt.moe.AMXBF16_SFT_MOE(config)
        _run(pool, self.moe.load_weights_task())
        for weight in (gate_up, down):
            weight.data = weight.data.new_empty(0)

    def __call__(self, x_TD: Tensor, ids_TK: Tensor, w_TK: Tensor) -> Tensor:
        factors = []
        for name in ("gate_up_proj", "down_proj"):
            lhs_EOR, rhs_ERI, _ = self.wrappers[name].get_delta_factors("default")
            factors += [lhs_EOR, rhs_ERI]
        y_TD: Tensor = _Adapted.apply(self, x_TD, ids_TK, w_TK, *factors)  # type: ignore[no-untyped-call]
        return y_TD


class _Adapted(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, layer: Adapted, x_TD: Tensor, ids_TK: Tensor, w_TK: Tensor,
        up_EIR: Tensor, up_ERD: Tensor, down_EDR: Tensor, down_ERF: Tensor,
    ) -> Tensor:  # fmt: skip
        gate_EFR, only_up_EFR = up_EIR.chunk(2, 1)
        given = (up_ERD, gate_EFR, up_ERD, only_up_EFR, down_ERF, down_EDR)
        ctx.layer, ctx.factors = layer, [t.bfloat16().contiguous() for t in given]
        ctx.tokens = (
            torch.tensor([len(x_TD)], dtype=torch.int32),
            ids_TK,
            w_TK.float().contiguous(),
            x_TD.contiguous(),
        )
        ctx.weight_dtype, y_TD = w_TK.dtype, torch.empty_like(x_TD)
        layer.moe.update_lora_weights(*(t.data_ptr() for t in ctx.factors))
        count, *given = (t.data_ptr() for t in (*ctx.tokens, y_TD))
        _run(layer.pool, layer.moe.forward_sft_task(count, ids_TK.shape[1], *given, True))
        return y_TD

    @staticmethod
    def backward(ctx: Any, dy_TD: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        dy_TD, layer = dy_TD.contiguous(), ctx.layer
        dx_TD, dw_TK = torch.zeros_like(dy_TD), torch.zeros_like(ctx.tokens[2])
        made = [torch.zeros_like(t) for t in ctx.factors]
        grads = (t.data_ptr() for t in (dy_TD, dx_TD, *made, dw_TK))
        _run(layer.pool, layer.moe.backward_task(*grads, 0, 0, 0))
        gate_A, gate_B, up_A, up_B, down_A, down_B = made
        up = torch.cat([gate_B, up_B], 1), gate_A + up_A
        return None, dx_TD, None, dw_TK.to(ctx.weight_dtype), *up, down_B, down_A
