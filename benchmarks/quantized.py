"""`python -m benchmarks quantized`: experts whose frozen weights are codes, beside the same weights in bfloat16.

Forward, and forward with the gradients of rows and routing weights. All contestants have the same weights, of values
that every format holds exactly, and are judged by one another.

Legend: T tokens, D model dim, F expert hidden dim, E experts, K experts per token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.contestant import Contestant
from benchmarks.layer_case import DTYPES
from benchmarks.step import first_is_right
from benchmarks.subject import BOTH, FORWARD, Subject, Where
from benchmarks.task import Task

FORMATS = ("nf4", "int8", "fp8", "mxfp4")
UNIT = 2.0**-5


def quantized_task(shape: tuple[int, int, int, int], *, tokens: int, dtype: str, threads: int) -> Task:
    """The weights themselves are the first contestant, by which the others are measured and judged."""
    args = {"shape": list(shape), "tokens": tokens, "dtype": dtype}
    build = f"{__name__}:build"
    contestants = [Contestant(name=f"{dtype} weights", role="peer", build=build, args=args | {"format": ""})]
    contestants += [Contestant(name=name, role="ours", build=build, args=args | {"format": name}) for name in FORMATS]
    return Task(
        part="quantized",
        case={"shape": list(shape), "tokens": tokens, "dtype": dtype, "threads": threads},
        contestants=contestants,
        modes=[FORWARD, BOTH],
        make_judge=lambda: first_is_right(2e-2),
    )


def coded(weight: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Codes and scales of weights that are -UNIT, 0 or UNIT."""
    from trimtab.experts.quantized import FORMATS, quantized, scales_of

    if FORMATS[name].quantize:
        return quantized(weight, name)
    units = weight / UNIT
    if name == "fp8":
        codes = units.to(torch.float8_e4m3fn).view(torch.uint8)
        return codes, torch.full(scales_of(codes, name), UNIT)
    halves = torch.where(units < 0, 10, units * 2).to(torch.uint8)  # of e2m1, 1 is code 2 and -1 is code 10
    codes = halves[..., ::2] | halves[..., 1::2] << 4
    return codes, torch.full(scales_of(codes, name), 127 - 5, dtype=torch.uint8)


def build(args: dict[str, Any], where: Where) -> Subject:
    """args: shape, tokens, dtype, format ("" for the weights themselves)."""
    from trimtab.experts.mlp import expert_mlp
    from trimtab.experts.plan import plan_experts
    from trimtab.experts.weight import GroupedWeight
    from trimtab.kernels.choose import KernelChoice

    (D, F, E, K), T, name, dtype = args["shape"], args["tokens"], args["format"], DTYPES[args["dtype"]]
    g = torch.Generator().manual_seed(5)
    up_eID, down_eDF = (torch.randint(-1, 2, s, generator=g) * UNIT for s in ((E, 2 * F, D), (E, D, F)))
    if name:
        (up, up_scales), (down, down_scales) = coded(up_eID, name), coded(down_eDF, name)
        made = [
            GroupedWeight(values=(codes,), scales=scales, format=name, dtype=dtype)
            for codes, scales in ((up, up_scales), (down, down_scales))
        ]
    else:
        made = [GroupedWeight(values=(t.to(dtype),)) for t in (up_eID, down_eDF)]
    del up_eID, down_eDF
    x_TD = (torch.randn(T, D, generator=g) * 0.2).to(dtype).requires_grad_()
    dy_TD = (torch.randn(T, D, generator=g) * 0.2).to(dtype)
    w_TK = torch.rand(T, K, generator=g).requires_grad_()
    ids_TK = torch.rand(T, E, generator=g).topk(K, 1).indices
    kernels = KernelChoice("auto").on(torch.device("cpu"), dtype)

    def forward() -> Tensor:
        return expert_mlp(x_TD, w_TK, plan_experts(ids_TK, E, kernels=kernels), *made, "swiglu", kernels)

    def both() -> None:
        x_TD.grad = w_TK.grad = None
        forward().backward(dy_TD)  # type: ignore[no-untyped-call]

    def outcome() -> dict[str, Tensor]:
        both()
        assert x_TD.grad is not None
        assert w_TK.grad is not None
        return {"y": forward().detach(), "gradient of x": x_TD.grad, "gradient of w": w_TK.grad}

    return Subject(modes={FORWARD: forward, BOTH: both}, outcome=outcome, judged=BOTH)
