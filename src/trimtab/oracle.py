"""The truth: a dense MoE in float64, one token and one expert at a time. No kernels, no plan, no parallelism.

    y[t] = sum over k of  w[t, k] * expert[ids[t, k]](x[t])        ids of -1 and masked tokens give nothing

Legend: T tokens, K experts per token, E experts, D model dim, F expert hidden dim, I = 2F with a gate, else F.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def swiglu(pre: Tensor) -> Tensor:
    """silu(gate) * up of `pre` [..., 2F], gate first."""
    gate, up = pre.chunk(2, dim=-1)
    return gate * torch.sigmoid(gate) * up


def moe(
    x_TD: Tensor, ids_TK: Tensor, w_TK: Tensor, up_EID: Tensor, down_EDF: Tensor, *, up_bias_EI: Tensor | None = None,
    down_bias_ED: Tensor | None = None, activation: Callable[[Tensor], Tensor] = swiglu,
    token_mask_T: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Dense MoE [T, D] in float64, differentiable in every floating input. Slow on purpose.

    up_EID, up_bias_EI: also [E, 2, F, D] and [E, 2, F], as `ExpertMLP` has them.
    """
    x, w, up, down = (t.double() for t in (x_TD, w_TK, up_EID.flatten(1, -2), down_EDF))
    up_bias_EI = None if up_bias_EI is None else up_bias_EI.flatten(1)
    outputs = []
    for t in range(x.shape[0]):
        total = x.new_zeros(down.shape[1])
        for k in range(ids_TK.shape[1]):
            e = int(ids_TK[t, k])
            if e < 0 or (token_mask_T is not None and not bool(token_mask_T[t])):
                continue
            pre = up[e] @ x[t]
            if up_bias_EI is not None:
                pre = pre + up_bias_EI[e].double()
            out = down[e] @ activation(pre)
            if down_bias_ED is not None:
                out = out + down_bias_ED[e].double()
            total = total + w[t, k] * out
        outputs.append(total)
    return torch.stack(outputs) if outputs else x * 1.0
