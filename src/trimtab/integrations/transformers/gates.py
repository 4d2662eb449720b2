"""The activation of ours that equals the function between the two products of a transformers experts module.

transformers' own activations are known by their types. A gate of its own (gpt-oss, DeepSeek-V4, MiniMax-M3 …) is tried
once on values near zero and on both sides of its limits, handed nothing but the module's numbers: where one of ours,
and no second one, gives the same in float64, it is what runs. Any other function is run as it is.

Legend: n rows, I width of the pre-activations.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache, partial
from itertools import product
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import (
    FastGELUActivation,
    GELUActivation,
    GELUTanh,
    NewGELUActivation,
    ReLUSquaredActivation,
    SiLUActivation,
)
from transformers.integrations.moe import _default_apply_gate

from trimtab.experts.activations import activation_of, clamped
from trimtab.kernels.tensor_checks import in_clean_thread

GATED = {"silu": "swiglu", "gelu": "geglu", "gelu_tanh": "geglu_tanh"}
UNGATED = {"relu_squared": "relu_squared", "gelu": "gelu", "gelu_tanh": "gelu_tanh"}
LIMITS, SLOPES = ("limit", "swiglu_limit"), ("alpha", "swiglu_alpha")


def gate_of(module: nn.Module) -> str | Callable[[Tensor], Tensor]:
    """The activation of an experts module: the word of ours that computes the same, or the module's own function.
    With a gate that is `_apply_gate`, whatever `act_fn` is."""
    word = word_of(module)
    if word is not None:
        return word
    function: Any = module._apply_gate if module.has_gate else getattr(module, "act_fn", None)
    assert callable(function)
    return function  # type: ignore[no-any-return]


def word_of(module: nn.Module) -> str | None:
    """The word of `activations.activation_of` for it, None where none of ours is known to compute the same."""
    name = known(getattr(module, "act_fn", None))
    if not module.has_gate:
        return UNGATED.get(name or "")
    gate: object = module._apply_gate
    function = gate.__func__ if isinstance(gate, MethodType) and gate.__self__ is module else None
    if function is _default_apply_gate and name in GATED:
        return GATED[name]
    if not isinstance(function, FunctionType) or not _is_transformers(function):
        return None
    numbers = [(key, getattr(module, key, None)) for key in (*LIMITS, *SLOPES)]
    # As text, which is a constant to `torch.compile` where a number may be a symbol.
    plain = tuple((key, float(value).hex()) for key, value in numbers if isinstance(value, (int, float)))
    word: str | None = _clamped(function, plain, name == "silu")
    return word


def known(act_fn: object) -> str | None:
    """The name of an activation that is one of transformers' or torch's and no more: neither a hook on it nor a forward
    of its own would be called."""
    if isinstance(act_fn, nn.Module):
        forward: object = act_fn.forward  # read so that `torch.compile` sees it replaced later
        if not isinstance(forward, MethodType) or forward.__func__ is not type(act_fn).forward:
            return None
        if any(getattr(act_fn, on) for on in _HOOKS):
            return None
    kind = type(act_fn)
    if act_fn is F.silu or kind in (nn.SiLU, SiLUActivation):
        return "silu"
    inside = getattr(act_fn, "act", None)
    tanh = isinstance(inside, partial) and inside.func is F.gelu and inside.keywords == {"approximate": "tanh"}
    if act_fn is F.gelu or (kind is GELUActivation and inside is F.gelu) or _torch_gelu(act_fn, "none"):
        return "gelu"
    if kind in (NewGELUActivation, FastGELUActivation) or (kind is GELUTanh and tanh) or _torch_gelu(act_fn, "tanh"):
        return "gelu_tanh"
    return "relu_squared" if kind is ReLUSquaredActivation else None


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _torch_gelu(act_fn: object, approximate: str) -> bool:
    return type(act_fn) is nn.GELU and act_fn.approximate == approximate


def _is_transformers(function: FunctionType) -> bool:
    """True for a plain function of a model's file, and not for one that somebody put around it."""
    home = (function.__module__ or "").startswith("transformers.models.")
    return home and function.__closure__ is None and not hasattr(function, "__wrapped__")


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _clamped(function: FunctionType, numbers: tuple[tuple[str, str], ...], silu: bool) -> str | None:
    """It tries the gate, which cannot be traced; the answer depends on nothing else."""
    return _tried(function, numbers, silu)


@lru_cache(maxsize=64)
def _tried(function: FunctionType, numbers: tuple[tuple[str, str], ...], silu: bool) -> str | None:
    """Kept for the process: a model has a module a layer, each asks at each call, and nothing else matters to the
    answer. In a thread of its own: what is tried beside a trace must not enter it."""
    return in_clean_thread(torch.device("cpu"), partial(_try, function, numbers, silu))


def _try(function: FunctionType, numbers: tuple[tuple[str, str], ...], silu: bool) -> str | None:
    """The word of the clamped gate that gives what `function` gives; None where none or several do, or it fails."""
    given = {key: float.fromhex(value) for key, value in numbers}
    limits = {given[key] for key in LIMITS if given.get(key, 0.0) > 0}
    slopes = {1.0, *(given[key] for key in SLOPES if key in given)}
    with torch.device("cpu"), torch.no_grad():
        pre_nI = _trial(3 * max((limit for limit in limits if limit < math.inf), default=7.0))
        try:
            truth = function(SimpleNamespace(**given, **({"act_fn": F.silu} if silu else {})), pre_nI.clone()).double()
        except Exception:  # it reads something else, or wants something else
            return None
        candidates = product(slopes, limits, (0.0, 1.0), (False, True))
        ours = [clamped(alpha, limit, shift, interleaved=turns) for alpha, limit, shift, turns in candidates]
        same = [word for word in ours if _same(activation_of(word).forward(pre_nI), truth)]
    return same[0] if len(same) == 1 else None


def _trial(reach: float) -> Tensor:
    """Pre-activations where a sigmoid is neither 0 nor 1, where limits cut, and each beside the other: [n, 8]."""
    spread = torch.arange(1536, dtype=torch.float64) * 0.7548776662466927 % 1
    near, far = (2 * spread - 1).mul(8.0).view(-1, 8), (2 * spread - 1).mul(reach).view(-1, 8)
    turns = torch.arange(near.numel()).view(-1, 8)
    return torch.cat((near, far, torch.where((turns + turns // 8) % 2 == 0, near, far)))


def _same(h: Tensor, truth: Tensor) -> bool:
    return h.shape == truth.shape and torch.allclose(h, truth, rtol=1e-12, atol=1e-12)
