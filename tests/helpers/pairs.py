"""One place of the grid of pairs: a module with some kind of weights, its leaves, and a dense truth in float64.

Legend: M rows, K slots per row, E experts or groups, S kept slots (of a linear, rows in segments), I inputs and O
outputs of one weight, r rank.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from trimtab import oracle
from trimtab.experts.linear import GroupedLinear
from trimtab.experts.lora_model import add_adapter
from trimtab.experts.mlp import expert_mlp
from trimtab.experts.module import ExpertMLP
from trimtab.experts.quantized import FORMATS, decoded, scales_of
from trimtab.experts.recipes import FP8Blockwise, Recipe

E, WIDTH, M, K, TAIL = 3, 64, 7, 2, 2
SIZES = (5, 0, 4)
STALE, SCALE = 2.0, 0.5
RANKS = {0.0: 4, 0.5: WIDTH}
"""By dropout: with some, the factors can be the identity, which shows the mask."""


@dataclass(frozen=True, kw_only=True)
class Pair:
    """weights: words joined by "+": bias, lora, a format of codes, separate (one parameter per expert), transposed;
    with lora also whole (its base is trained), shared, a or b (that factor is frozen). own: "activation" or "norm"."""

    module: str
    weights: str
    kernels: str = "torch"
    main_grad: str = "off"
    delayed: bool = False
    recipe: bool = False
    dropout: float = 0.0
    own: str = ""

    @property
    def words(self) -> set[str]:
        """What a refusal may be about."""
        flags = {"delayed": self.delayed, "recipe": self.recipe, "dropout": self.dropout, "own": self.own}
        flags |= {"main_grad": self.main_grad != "off"}
        found = {self.module, self.kernels, *self.weights.split("+"), *(name for name, on in flags.items() if on)}
        return found | ({"codes"} if found & FORMATS.keys() else set())

    @property
    def activation(self) -> str:
        """Of an MLP; where masks are looked at one that keeps 1."""
        return "relu_squared" if self.own or self.dropout else "swiglu"

    @property
    def dtype(self) -> torch.dtype:
        """The "torch" backend alone computes in float64."""
        return torch.float64 if self.kernels == "torch" and not self.recipe else torch.float32

    @property
    def bound(self) -> float:
        """A recipe is near, not equal."""
        return 0.25 if self.recipe else 1e-12 if self.dtype is torch.float64 else 1e-5

    def __str__(self) -> str:
        flags = [self.main_grad, "delayed" * self.delayed, "recipe" * self.recipe, "dropout" * bool(self.dropout)]
        return "-".join([self.module, self.weights, *(flag for flag in [*flags, self.own] if flag), self.kernels])


class Subject:
    """A module of a pair. leaves: x, w of an MLP, and each tensor that may want a gradient, by name; `trained` of them
    do in the pair. Raises ConfigError where the pair is refused."""

    def __init__(self, pair: Pair) -> None:
        self.pair, self.words = pair, pair.words
        torch.manual_seed(0)
        recipe: Recipe | None = FP8Blockwise(backend="emulated") if pair.recipe else None
        options: dict[str, Any] = {"dtype": pair.dtype, "recipe": recipe, "kernels": pair.kernels}
        options |= {"bias": "bias" in self.words, "main_grad": pair.main_grad, "delay_wgrad": pair.delayed}
        self.layer, self.names = {"mlp": _mlp, "linear": _linear, "megatron": _megatron}[pair.module](pair, options)
        for name in self.words & FORMATS.keys():
            _quantize(self.layer, name)
        if "lora" in self.words:
            shared = "shared" in self.words
            add_adapter(self.layer, rank=RANKS[pair.dropout], alpha=SCALE * RANKS[pair.dropout], shared=shared,
                        dropout=pair.dropout)  # fmt: skip
        self.leaves = self._drawn()
        self.trained = [name for name, leaf in self.leaves.items() if self._trains(name, leaf)]
        self.gain = torch.full((1,), 1.5, dtype=pair.dtype, requires_grad=True)
        if pair.own:
            self.leaves["gain"] = self.gain
            self.trained.append("gain")
        if pair.own == "activation":
            self.layer.activation = self._own  # type: ignore[assignment]
        self.masks = [1.0, 1.0]
        if pair.dropout:
            self.masks = [self._mask(0), self._mask(1)]

    def _drawn(self) -> dict[str, Tensor]:
        g = torch.Generator().manual_seed(1)

        def draw(*shape: int, scale: float = 1.0) -> Tensor:
            return torch.randn(shape, generator=g, dtype=torch.float64).mul(scale).to(self.pair.dtype)

        params = {name: p for name, p in self.layer.named_parameters() if p.dtype != torch.uint8}
        for name, param in params.items():
            if not name.endswith("_scales"):
                param.data.copy_(draw(*param.shape, scale=param.shape[-1] ** -0.5))
        if "transposed" in self.words:
            for name in self.names:
                params[name] = nn.Parameter(params[name].detach().flatten(1, -2).mT.contiguous())
        rows = M if self.pair.module != "linear" else sum(SIZES) + TAIL
        self.dy, x = draw(rows, WIDTH), draw(rows, WIDTH)
        if self.pair.module == "linear":
            self.e_S = torch.arange(E).repeat_interleave(torch.tensor(SIZES))
            x[sum(SIZES) :] = self.dy[sum(SIZES) :] = torch.nan
            return {"x": x, **params}
        ids = torch.randint(0, E - 1, (M, K), generator=g)  # the last expert is empty
        self.ids = ids.masked_fill(torch.rand(M, K, generator=g) < 0.2, -1)
        self.m_S, self.k_S = (self.ids >= 0).nonzero().unbind(1)
        self.e_S = self.ids[self.m_S, self.k_S]
        return {"x": x, "w": draw(M, K), **params}

    def _trains(self, name: str, leaf: Tensor) -> bool:
        if name.endswith("_scales"):
            return False
        if "adapters" in name:
            return not name.endswith(tuple(f"_{kind}" for kind in self.words & {"a", "b"}))
        return name in ("x", "w") or "lora" not in self.words or "whole" in self.words

    def _own(self, rows: Tensor) -> Tensor:
        return torch.tanh(rows) * self.gain.to(rows.dtype)

    def run(self, wanted: list[str], asked: str = "") -> dict[str, Tensor | None]:
        """The output, and what each leaf got, None for nothing, of one call with gradients for `wanted`. asked: the
        one whose gradient this backward is for, as a part of a schedule's backward may be."""
        for name, leaf in self.leaves.items():
            leaf.requires_grad_(name in wanted)
            leaf.grad = None
            if isinstance(leaf, nn.Parameter):
                leaf.main_grad, leaf.grad_added_to_main_grad = torch.full_like(leaf, STALE), False
        y = self.call(self.leaves["x"], self.leaves.get("w"))
        if asked:
            (gradient,) = torch.autograd.grad(y, [self.leaves[asked]], self.dy)
            self.leaves[asked].grad = gradient
        else:
            y.backward(self.dy)
            self.layer.backward_dw()
        return {"y": y.detach()} | {name: self._got(name, leaf) for name, leaf in self.leaves.items()}

    def _got(self, name: str, leaf: Tensor) -> Tensor | None:
        """Where the mode has it, and nowhere else."""
        mode, main_grad = self.pair.main_grad, getattr(leaf, "main_grad", None)
        if main_grad is None:
            return leaf.grad
        if not leaf.grad_added_to_main_grad:  # type: ignore[attr-defined]
            assert (main_grad == STALE).all(), f"main_grad of {name} was written, and nobody told"
            is_weight = "adapters" not in name and "bias" not in name
            assert leaf.grad is None or mode == "off" or not is_weight, f"{name}.grad is not main_grad"
            return leaf.grad
        assert mode != "off"
        return main_grad - (STALE if mode == "accumulate" else 0.0)

    def call(self, x: Tensor, w: Tensor | None) -> Tensor:
        torch.manual_seed(7)  # of dropout
        if self.pair.module == "linear":
            y: Tensor = self.layer(x, SIZES)
            return y
        norm: AbstractContextManager[object] = nullcontext()
        if self.pair.own == "norm":
            norm = patch("trimtab.experts.module.expert_mlp", partial(expert_mlp, norm=self._own))
        with norm:
            if "transposed" in self.words:
                leaves = [self.leaves[name] for name in self.names]
                whole = zip(self.layer.expert_weights(), leaves, strict=True)
                weights = tuple(replace(of, transposed=True, values=(leaf,)) for of, leaf in whole)
                return self.layer.run(weights, x, self.ids, w)
            y = self.layer(x, self.ids, w)
        return y[0] if self.pair.module == "megatron" else y

    def truth(self) -> dict[str, Tensor]:
        """The output and the gradient of every leaf that is trained in the pair."""
        t = {name: leaf.detach().double().requires_grad_() for name, leaf in self.leaves.items()}
        own: Callable[[Tensor], Tensor] = lambda rows: torch.tanh(rows) * t["gain"]  # noqa: E731
        if self.pair.module == "linear":
            used = self.product(t, 0, t["x"][: sum(SIZES)])
            y, dy = torch.cat([used, used.new_zeros(TAIL, WIDTH)]), self.dy.nan_to_num().double()
        else:
            pre = self.product(t, 0, t["x"][self.m_S])
            function = {"swiglu": oracle.swiglu, "relu_squared": lambda pre: torch.relu(pre).square()}
            h = own(pre) if self.pair.own == "activation" else function[self.pair.activation](pre)
            out = self.product(t, 1, h)
            out = own(out) if self.pair.own == "norm" else out
            out = out * t["w"][self.m_S, self.k_S][:, None]
            y, dy = torch.zeros_like(t["x"]).index_add(0, self.m_S, out), self.dy.double()
        found = torch.autograd.grad(y, [t[name] for name in self.trained], dy, materialize_grads=True)
        return {"y": y.detach()} | dict(zip(self.trained, found, strict=True))

    def product(self, t: dict[str, Tensor], which: int, rows_SI: Tensor) -> Tensor:
        """One weight of each row's expert, with all that belongs to it: [S, O]."""
        name = self.names[which]
        weight = self._base(t, name)
        y = torch.einsum("si,soi->so", rows_SI, weight[self.e_S])
        if "bias" in self.words:
            bias = name.replace("weight", "bias") if "weight" in name else f"{name}_bias"
            y = y + self._stacked(t, bias).flatten(1)[self.e_S]
        if "lora" in self.words:
            a, b = (t[f"adapters.default.{name}_{kind}"].flatten(1, -2) for kind in "ab")
            a, b = (f.expand(E, -1, -1)[self.e_S] for f in (a, b))
            y = y + SCALE * torch.einsum("si,sri,sor->so", rows_SI * self.masks[which], a, b)
        return y

    def _base(self, t: dict[str, Tensor], name: str) -> Tensor:
        for form in self.words & FORMATS.keys():
            codes, scales = (self.layer.get_parameter(n).flatten(1, -2) for n in (name, f"{name}_scales"))
            return decoded(codes, scales, form, self.pair.dtype).double()
        weight = self._stacked(t, name)
        return weight.mT if "transposed" in self.words else weight.flatten(1, -2)

    def _stacked(self, t: dict[str, Tensor], name: str) -> Tensor:
        return t[name] if name in t else torch.stack([t[f"{name}{e}"] for e in range(E)])

    @torch.no_grad()
    def _mask(self, which: int) -> Tensor | float:
        """What dropout makes of the rows of a product [S, I], seen at an MLP of ones: all other weights and factors
        are the identity or zero."""
        if which >= len(self.names):
            return 1.0
        before = {name: leaf.clone() for name, leaf in self.leaves.items()}
        for name, leaf in self.leaves.items():
            leaf.fill_(name == "x")
        for i, name in enumerate(self.names):
            for leaf, on in ((name, i != which), *((f"adapters.default.{name}_{kind}", i == which) for kind in "ab")):
                self.leaves[leaf].copy_(torch.eye(WIDTH) * (on / (SCALE if leaf.endswith("_b") else 1.0)))
        if self.pair.module == "linear":
            mask = self.call(self.leaves["x"], None)[: sum(SIZES)]
        else:
            slots = [torch.eye(K)[k].expand(M, K) for k in range(K)]
            mask = torch.stack([self.call(self.leaves["x"], w) for w in slots], 1)[self.m_S, self.k_S]
            mask = mask if which else mask.sqrt()  # relu_squared behind it
        for name, leaf in self.leaves.items():
            leaf.copy_(before[name])
        assert {round(float(v), 6) for v in mask.unique()} == {0.0, 1 / (1 - self.pair.dropout)}
        return mask.double()


def _mlp(pair: Pair, options: dict[str, Any]) -> tuple[Any, tuple[str, ...]]:
    layer = ExpertMLP(E, WIDTH, WIDTH, activation=pair.activation, **options)
    return layer, layer.parameter_names[:2]


def _linear(pair: Pair, options: dict[str, Any]) -> tuple[Any, tuple[str, ...]]:
    return GroupedLinear(E, WIDTH, WIDTH, single_parameter="separate" not in pair.words, **options), ("weight",)


def _megatron(pair: Pair, options: dict[str, Any]) -> tuple[Any, tuple[str, ...]]:
    from integrations.megatron.test_experts import GROUPS, config
    from trimtab.integrations.megatron.experts import Experts
    from trimtab.kernels.choose import KernelChoice

    made = config(
        hidden_size=WIDTH, moe_ffn_hidden_size=WIDTH, add_bias_linear=options["bias"], gated_linear_unit=True,
        activation_func=torch.nn.functional.silu, gradient_accumulation_fusion=pair.main_grad != "off",
    )  # fmt: skip
    made.delay_wgrad_compute = pair.delayed  # which Megatron's own checks allow with overlapped exchanges alone
    layer = Experts(E, made, pg_collection=GROUPS, single_parameter="separate" not in pair.words).to(pair.dtype)
    layer.kernels = KernelChoice(pair.kernels)
    return layer, ("linear_fc1.weight", "linear_fc2.weight")


@torch.no_grad()
def _quantize(layer: ExpertMLP, name: str) -> None:
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
