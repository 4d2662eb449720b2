"""Layouts of dense projections that are stored as one weight, by the layer's name and what its owner knows.

One name means different orders in different models: where it does, the owner's class is asked, and of others nothing is
guessed.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from torch import nn

from trimtab.experts.shared import SharedExperts
from trimtab.optim.layout import Layout

PAIRS = {"up": "down", "up_proj": "down_proj", "fc1": "fc2", "linear_fc1": "linear_fc2", "w1": "w2"}
"""A first projection that is twice as wide as what the second takes has a gate in it."""
_FUSED = re.compile(r"qkv|kv_|^kv|^in_proj$|in_proj_ba|^x_proj$|gate_up|up_gate|^w1[23]$|^wi$|query_key|q_gate|c_attn")
"""Names that say several projections in one, unless `SPLITS` knows better."""


def _of(owner: nn.Module, *prefixes: str) -> bool:
    return any(cls.__name__.startswith(prefixes) for cls in type(owner).__mro__)


def _parts(linear: nn.Linear, number: int) -> Layout:
    return Layout((linear.out_features // number,) * number)


def _heads(linear: nn.Linear, *sizes: int) -> Layout:
    """Parts that follow each other in each head."""
    return Layout(sizes, repeats=linear.out_features // sum(sizes))


def _delta_net(o: Any, _: nn.Linear) -> Layout:
    values = o.num_v_heads // o.num_k_heads * o.head_v_dim
    return Layout((o.head_k_dim, o.head_k_dim, values, values), repeats=o.num_k_heads)


def _state_space(o: Any, linear: nn.Linear) -> Layout | None:
    if hasattr(o, "conv_dim"):  # Mamba 2: gate, x, B, C, dt
        states = o.n_groups * o.ssm_state_size
        return Layout((o.intermediate_size, o.intermediate_size, states, states, o.num_heads))
    if _of(o, "Lfm2"):  # B, C, x
        return _parts(linear, 3)
    return _parts(linear, 2) if _of(o, "Mamba", "FalconMamba", "Jamba") else None  # Zamba's take turns


def _qkv(o: Any, linear: nn.Linear) -> Layout | None:
    if _of(o, "MiniMaxLightning"):
        return _heads(linear, *(o.head_dim,) * 3)
    keys = o.num_key_value_heads * o.head_dim
    return Layout((linear.out_features - 2 * keys, keys, keys)) if _of(o, "Dbrx", "Phi3", "Phi4") else None


def _query(o: Any, linear: nn.Linear) -> Layout | None:
    if hasattr(o, "qk_head_dim") or linear.out_features != 2 * o.o_proj.in_features:
        return _parts(linear, 1)
    gated = _of(o, "Qwen3Next", "Qwen3_5", "Qwen4Exp")  # in each head the query, then its gate
    return _heads(linear, o.head_dim, o.head_dim) if gated else None


SPLITS: dict[str, Callable[[Any, nn.Linear], Layout | None]] = {
    "gate_up_proj": lambda _, linear: _parts(linear, 2),
    "input_linear": lambda o, linear: _parts(linear, linear.out_features // o.output_linear.in_features),
    **dict.fromkeys(("qkv_proj", "Wqkv"), _qkv),
    "q_proj": _query,
    "kv_proj": lambda o, m: _parts(m, 2) if _of(o, "JetMoe") else _parts(m, 1) if _of(o, "DeepseekV4") else None,
    "in_proj": _state_space,
    "in_proj_qkv": lambda o, _: Layout((o.key_dim, o.key_dim, o.value_dim)),
    "in_proj_qkvz": _delta_net,
    "in_proj_ba": lambda o, _: Layout((o.num_v_heads // o.num_k_heads,) * 2, repeats=o.num_k_heads),
    "x_proj": lambda o, _: Layout((o.time_step_rank, o.ssm_state_size, o.ssm_state_size)),
    "wqkv": lambda o, m: _heads(m, o.heads_per_kv * o.head_dim, o.head_dim, o.head_dim),
    **dict.fromkeys(("kv_b_proj", "wkv_b"), lambda o, m: _heads(m, o.qk_nope_head_dim, o.v_head_dim)),
    **dict.fromkeys(
        ("kv_a_proj_with_mqa", "wkv_a"), lambda o, m: Layout((m.out_features - o.qk_rope_head_dim, o.qk_rope_head_dim))
    ),
    "q_gate_proj": lambda o, m: _heads(m, o.qk_head_dim, o.v_head_dim),
    "index_qk_proj": lambda o, _: Layout((o.index_n_heads * o.index_head_dim, o.index_kv_heads * o.index_head_dim)),
}
"""By the name of the linear layer: (its owner, it) -> its layout."""


def of_linear(name: str, owner: nn.Module, linear: nn.Linear) -> Layout | None:
    """The layout of a dense projection; None where it is several of sizes that are not known."""
    second = getattr(owner, PAIRS.get(name, ""), None)
    gated = isinstance(second, nn.Linear) and linear.out_features == 2 * second.in_features
    if gated:
        return _parts(linear, 2) if isinstance(owner, SharedExperts) else None
    whole = None if _FUSED.search(name) else _parts(linear, 1)
    try:
        found = SPLITS[name](owner, linear) if name in SPLITS else whole
    except AttributeError:  # a projection of this name of somebody else
        found = whole
    return found if found is not None and found.fits((linear.out_features, linear.in_features)) else None
