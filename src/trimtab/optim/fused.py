"""Layouts of dense projections that are stored as one weight, by the layer's name and what its owner knows."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from torch import nn

from trimtab.optim.layout import Layout

_FUSED = re.compile(r"qkv|kv_|^kv|^in_proj$|in_proj_ba|^x_proj$|gate_up|up_gate|^w1[23]$|^wi$|query_key|q_gate|c_attn")
"""Names that say several projections in one, unless `SPLITS` knows better."""


def _halves(_: Any, linear: nn.Linear) -> Layout:
    return Layout((linear.out_features // 2,) * 2)


def _delta_net(o: Any, _: nn.Linear) -> Layout:
    values = o.num_v_heads // o.num_k_heads * o.head_v_dim
    return Layout((o.head_k_dim, o.head_k_dim, values, values), repeats=o.num_k_heads)


def _state_space(o: Any, linear: nn.Linear) -> Layout:
    if hasattr(o, "conv_dim"):  # Mamba 2: gate, x, B, C, dt
        states = o.n_groups * o.ssm_state_size
        return Layout((o.intermediate_size, o.intermediate_size, states, states, o.num_heads))
    parts = 2 if hasattr(o, "time_step_rank") else 3  # Mamba: x, gate; LFM2: B, C, x
    return Layout((linear.out_features // parts,) * parts)


def _qkv(o: Any, linear: nn.Linear) -> Layout:
    if type(o).__name__.endswith("LightningAttention"):
        return Layout((o.head_dim,) * 3, repeats=o.num_attention_heads)
    keys = o.num_key_value_heads * o.head_dim
    return Layout((linear.out_features - 2 * keys, keys, keys))


def _query(o: Any, linear: nn.Linear) -> Layout:
    if hasattr(o, "qk_head_dim") or linear.out_features != 2 * o.o_proj.in_features:
        return _whole(o, linear)
    return Layout((o.head_dim, o.head_dim), repeats=o.o_proj.in_features // o.head_dim)  # Qwen3-Next: with its gate


def _whole(_: Any, linear: nn.Linear) -> Layout:
    return Layout((linear.out_features,))


SPLITS: dict[str, Callable[[Any, nn.Linear], Layout]] = {
    **dict.fromkeys(("gate_up_proj", "input_linear"), _halves),
    **dict.fromkeys(("qkv_proj", "Wqkv"), _qkv),
    "q_proj": _query,
    "kv_proj": lambda o, linear: (_halves if hasattr(o, "kv_projection_size") else _whole)(o, linear),  # JetMoe
    "kv_a_proj": _whole,
    "in_proj": _state_space,
    "in_proj_qkv": lambda o, _: Layout((o.key_dim, o.key_dim, o.value_dim)),
    "in_proj_qkvz": _delta_net,
    "in_proj_ba": lambda o, _: Layout((o.num_v_heads // o.num_k_heads,) * 2, repeats=o.num_k_heads),
    "x_proj": lambda o, _: Layout((o.time_step_rank, o.ssm_state_size, o.ssm_state_size)),
    "kv_b_proj": lambda o, _: Layout((o.qk_nope_head_dim, o.v_head_dim), repeats=o.num_heads),
    "kv_a_proj_with_mqa": lambda o, m: Layout((m.out_features - o.qk_rope_head_dim, o.qk_rope_head_dim)),
    "q_gate_proj": lambda o, _: Layout((o.qk_head_dim, o.v_head_dim), repeats=o.num_heads),
    "index_qk_proj": lambda o, _: Layout((o.index_n_heads * o.index_head_dim, o.index_kv_heads * o.index_head_dim)),
}
"""By the name of the linear layer: (its owner, it) -> its layout."""


def of_linear(name: str, owner: nn.Module, linear: nn.Linear) -> Layout | None:
    """The layout of a dense projection; None where it is several of sizes that are not known."""
    known = None if _FUSED.search(name) else _whole(owner, linear)
    try:
        found = SPLITS[name](owner, linear) if name in SPLITS else known
    except AttributeError:  # a projection of this name of somebody else
        found = known
    return found if found is not None and found.fits((linear.out_features, linear.in_features)) else None
