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

from helpers.comparing import rounded
from helpers.emulated import fenced, fences
from helpers.pair_modules import MODULES, K, quantize, slots
from helpers.pair_truth import LOW, TRUTHS, Activated, Quantized, by_expert
from helpers.threads import torch_threads
from trimtab.experts.lora import add_adapter
from trimtab.experts.mlp import expert_mlp
from trimtab.experts.quantized import FORMATS, decoded
from trimtab.experts.recipes import Recipe
from trimtab.kernels.choose import KernelChoice

WIDTH, M = 64, 7
STALE, SCALE = 2.0, 0.5
KERNELS = {name: KernelChoice(name) for name in ("torch", "cpu", "grouped_mm")}
"""Shared by modules, so that the self-test runs once."""


@dataclass(frozen=True, kw_only=True)
class Pair:
    """weights: words joined by "+": bias, lora, a format of codes, separate (one parameter per expert), transposed;
    with lora also whole (its base is trained), shared, a or b (that factor is frozen). own: "activation" or "norm".
    empty: which of the experts has no rows, or how else slots fall, see `EMPTY`. rows: of an MLP. activation: a word.
    dtype, main_dtype: of parameters and of `main_grad`, which with `strided` does not lie as the parameter does.
    fenced: operands lie between NaN."""

    module: str
    weights: str
    kernels: str = "torch"
    main_grad: str = "off"
    delayed: bool = False
    recipe: str = ""
    dropout: float = 0.0
    own: str = ""
    empty: str = "last"
    experts: int = 3
    dtype: torch.dtype = torch.float32
    main_dtype: torch.dtype = torch.float32
    activation: str = "swiglu"
    dim: int = WIDTH
    hidden: int = WIDTH
    rows: int = M
    rank: int = 8
    threads: int = 1
    strided: bool = False
    fenced: bool = False

    @property
    def words(self) -> set[str]:
        """What a refusal may be about."""
        flags = {"delayed": self.delayed, "recipe": self.recipe, "dropout": self.dropout, "own": self.own}
        flags |= {"main_grad": self.main_grad != "off"}
        found = {self.module, self.kernels, *self.weights.split("+"), *(name for name, on in flags.items() if on)}
        return found | ({"codes"} if found & FORMATS.keys() else set())

    @property
    def sizes(self) -> list[int]:
        """Rows of a linear's groups."""
        sizes = [2 + (3 * i) % 5 for i in range(self.experts)]
        which = {"first": [0], "middle": [self.experts // 2], "last": [self.experts - 1]}
        everyone = list(range(self.experts)) if self.empty in ("all", "no row") else []
        for i in which.get(self.empty, everyone):
            sizes[i] = 0
        return sizes

    @property
    def tail(self) -> int:
        """Rows behind the last group of a linear."""
        return 0 if self.empty == "no row" else 2

    def __str__(self) -> str:
        flags = [self.main_grad, "delayed" * self.delayed, self.recipe, "dropout" * bool(self.dropout), self.own]
        named = [self.module, self.weights, *(flag for flag in flags if flag), self.kernels, self.empty]
        size = f"{self.rows}x{self.dim}x{self.hidden}" if (self.dim, self.hidden) != (WIDTH, WIDTH) else ""
        return "-".join([*named, *([size] if size else []), str(self.dtype).removeprefix("torch.")])


class Subject:
    """A module of a pair. leaves: x, w of an MLP, and each tensor that may want a gradient, by name; `trained` of them
    do in the pair. Raises ConfigError where the pair is refused."""

    def __init__(self, pair: Pair) -> None:
        self.pair, self.words = pair, pair.words
        torch.manual_seed(0)
        recipe: Recipe | None = LOW[pair.recipe][0] if pair.recipe else None
        options: dict[str, Any] = {"dtype": pair.dtype, "recipe": recipe, "kernels": KERNELS[pair.kernels]}
        options |= {"bias": "bias" in self.words, "main_grad": pair.main_grad, "delay_wgrad": pair.delayed}
        self.layer, self.names = MODULES[pair.module](pair, options)
        for name in self.words & FORMATS.keys():
            quantize(self.layer, name)
        if "lora" in self.words:
            rank, shared = pair.rank, "shared" in self.words
            add_adapter(self.layer, rank=rank, alpha=SCALE * rank, shared=shared, dropout=pair.dropout)
        self.fired: list[str] = []
        self.leaves = self._drawn()
        self.trained = [name for name, leaf in self.leaves.items() if self._trains(name)]
        if pair.own == "activation":
            self.layer.activation = self._own  # type: ignore[assignment]

    @property
    def linear(self) -> bool:
        return len(self.names) == 1

    def _drawn(self) -> dict[str, Tensor]:
        pair, g = self.pair, torch.Generator().manual_seed(1)

        def draw(*shape: int, scale: float = 1.0) -> Tensor:
            return torch.randn(shape, generator=g, dtype=torch.float64).mul(scale).to(pair.dtype)

        place = fenced if pair.fenced else lambda t: t
        coded = set(self.names) if self.words & FORMATS.keys() else set()
        params = {name: p for name, p in self.layer.named_parameters() if name not in coded and p.dtype != torch.uint8}
        for name, param in params.items():
            if not name.endswith("_scales"):
                param.data = place(draw(*param.shape, scale=param.shape[-1] ** -0.5))
        if "transposed" in self.words:
            for name in self.names:
                params[name] = nn.Parameter(place(params[name].detach().flatten(1, -2).mT.contiguous()))
        if pair.own:
            params["gain"] = nn.Parameter(torch.full((1,), 1.5, dtype=pair.dtype))
        fired = self.fired  # a hook that knew this object would keep it for good
        for name, param in params.items():
            param.requires_grad_().register_post_accumulate_grad_hook(lambda _, name=name: fired.append(name))
        used = sum(pair.sizes)
        rows = used + pair.tail if self.linear else 0 if pair.empty == "no row" else pair.rows
        self.dy, x = place(draw(rows, pair.hidden if self.linear else pair.dim)), place(draw(rows, pair.dim))
        if self.linear:
            self.e_S = torch.arange(pair.experts).repeat_interleave(torch.tensor(pair.sizes))
            x[used:] = self.dy[used:] = torch.nan
            return {"x": x, **params}
        self.ids, self.e_S = slots(pair, rows, g), torch.empty(0)
        held = (self.ids >= 0) & (self.ids < pair.experts)
        m_S, k_S = held.nonzero().unbind(1)
        by_expert = self.ids[m_S, k_S].argsort(stable=True)
        self.m_S, self.k_S = m_S[by_expert], k_S[by_expert]
        self.e_S = self.ids[self.m_S, self.k_S]
        return {"x": x, "w": draw(rows, K), **params}

    def _trains(self, name: str) -> bool:
        if name.endswith("_scales"):
            return False
        if "adapters" in name:
            return not name.endswith(tuple(f"_{kind}" for kind in self.words & {"a", "b"}))
        return name in ("x", "w", "gain") or "lora" not in self.words or "whole" in self.words

    def _own(self, rows: Tensor) -> Tensor:
        return torch.tanh(rows) * self.leaves["gain"].to(rows.dtype)

    def run(self, wanted: list[str], asked: str = "") -> dict[str, Tensor | None]:
        """The output, and what each leaf got, None for nothing, of one call with gradients for `wanted`. asked: the
        one whose gradient this backward is for, as a part of a schedule's backward may be."""
        for name, leaf in self.leaves.items():
            leaf.requires_grad_(name in wanted)
            if isinstance(leaf, nn.Parameter):
                leaf.main_grad, leaf.grad_added_to_main_grad = self._main_grad(leaf), False  # type: ignore[attr-defined]
        with torch_threads(self.pair.threads):
            y = self.call(self.leaves["x"], self.leaves.get("w"))
            if asked:
                (self.leaves[asked].grad,) = torch.autograd.grad(y, [self.leaves[asked]], self.dy)
            else:
                y.backward(self.dy)
        if not asked:
            early = set(self.fired) - {"gain"}
            assert not (self.pair.delayed and early), f"the hooks of {early} fired before backward_dw()"
            self.layer.backward_dw()
            assert sorted(self.fired) == sorted(set(wanted) - {"x", "w"}), f"hooks: {self.fired}"
        assert y.dtype == self.pair.dtype
        return {"y": y.detach()} | {name: self._got(name, leaf) for name, leaf in self.leaves.items()}

    def _main_grad(self, leaf: Tensor) -> Tensor:
        made = torch.full(leaf.shape, STALE, dtype=self.pair.main_dtype)
        if self.pair.strided and leaf.ndim > 1:
            made = made.transpose(-1, -2).contiguous().transpose(-1, -2)
        return fenced(made) if self.pair.fenced else made

    def _got(self, name: str, leaf: Tensor) -> Tensor | None:
        """Where the mode has it, and nowhere else."""
        mode, main_grad = self.pair.main_grad, getattr(leaf, "main_grad", None)
        assert leaf.grad is None or (leaf.grad.shape, leaf.grad.dtype) == (leaf.shape, leaf.dtype), name
        if main_grad is None:
            return leaf.grad
        assert not self.pair.fenced or fences(main_grad).isnan().all(), f"beside main_grad of {name}"
        if not leaf.grad_added_to_main_grad:  # type: ignore[attr-defined]
            assert (main_grad == STALE).all(), f"main_grad of {name} was written, and nobody told"
            is_weight = "adapters" not in name and "bias" not in name and name != "gain"
            assert leaf.grad is None or mode == "off" or not is_weight, f"{name}.grad is not main_grad"
            return leaf.grad
        assert mode != "off"
        return main_grad.double() - (STALE if mode == "accumulate" else 0.0)

    def call(self, x: Tensor, w: Tensor | None) -> Tensor:
        torch.manual_seed(7)  # of dropout
        if self.linear:
            on_device = torch.tensor(self.pair.sizes, dtype=torch.int32)
            more = (self.pair.main_grad == "overwrite",) if self.pair.module == "te" else ()
            y: Tensor = self.layer(x, on_device if self.pair.kernels == "grouped_mm" else self.pair.sizes, *more)
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
        pair, t = self.pair, {name: leaf.detach().double().requires_grad_() for name, leaf in self.leaves.items()}
        self.masks = [self._mask(i) if pair.dropout else 1.0 for i in range(len(self.names))]
        states = [s for s in self.layer.children() if hasattr(s, "recipe")] if pair.recipe else []
        self.low = [state.call() for state in states] or [None, None]
        if self.linear:
            used = self.product(t, 0, t["x"][: sum(pair.sizes)], 1.0)
            y, dy = torch.cat([used, used.new_zeros(pair.tail, pair.hidden)]), self.dy.nan_to_num().double()
        else:
            own: Callable[[Tensor], Tensor] = lambda rows: torch.tanh(rows) * t["gain"]  # noqa: E731
            pre, w_S1 = self.product(t, 0, t["x"][self.m_S], 1.0), t["w"][self.m_S, self.k_S][:, None]
            h = own(pre) if pair.own == "activation" else self._activated(pre)
            inside = self.low[1] is not None and not pair.own
            out = self.product(t, 1, h, w_S1 if inside else 1.0)
            out = own(out) if pair.own == "norm" else out
            out = out if inside else out * w_S1
            y, dy = torch.zeros_like(t["x"]).index_add(0, self.m_S, out), self.dy.double()
        found = torch.autograd.grad(y, [t[name] for name in self.trained], dy, materialize_grads=True)
        return {"y": y.detach()} | dict(zip(self.trained, found, strict=True))

    def _activated(self, pre: Tensor) -> Tensor:
        if self.low[0]:
            h: Tensor = Activated.apply(pre, self.pair.activation, self.pair.dtype)
            return h
        return rounded(TRUTHS[self.pair.activation], self.pair.dtype)(pre)

    def product(self, t: dict[str, Tensor], which: int, rows_SI: Tensor, w_S1: Tensor | float) -> Tensor:
        """One weight of each row's expert, with all that belongs to it, times w: [S, O]."""
        name, low = self.names[which], self.low[which]
        weight = self._base(t, name)
        if low is None:
            y = by_expert(rows_SI, weight, self.e_S)
        else:
            y = Quantized.apply(
                rows_SI * w_S1, weight, low, self.e_S, LOW[self.pair.recipe][1].alignment, self.pair.dtype
            )
        if "bias" in self.words:
            bias = name.replace("weight", "bias") if "weight" in name else f"{name}_bias"
            y = y + self._stacked(t, bias).flatten(1)[self.e_S] * w_S1
        if "lora" in self.words:
            a, b = (t[f"adapters.default.{name}_{kind}"].flatten(1, -2) for kind in "ab")
            a, b = (f.expand(self.pair.experts, -1, -1) for f in (a, b))
            rows_SI = rows_SI * w_S1 * self.masks[which]
            y = y + SCALE * by_expert(by_expert(rows_SI, a, self.e_S), b, self.e_S)
        return y

    def _base(self, t: dict[str, Tensor], name: str) -> Tensor:
        for form in self.words & FORMATS.keys():
            codes, scales = (self.layer.get_parameter(n).flatten(1, -2) for n in (name, f"{name}_scales"))
            return decoded(codes, scales, form, self.pair.dtype).double()
        weight = self._stacked(t, name)
        return weight.mT if "transposed" in self.words else weight.flatten(1, -2)

    def _stacked(self, t: dict[str, Tensor], name: str) -> Tensor:
        return t[name] if name in t else torch.stack([t[f"{name}{e}"] for e in range(self.pair.experts)])

    @torch.no_grad()
    def _mask(self, which: int) -> Tensor:
        """What dropout makes of the rows of a product [S, I], seen at an MLP of ones: all other weights and factors
        are the identity or zero."""
        before = {name: leaf.clone() for name, leaf in self.leaves.items()}
        for name, leaf in self.leaves.items():
            leaf.fill_(name == "x")
        for i, name in enumerate(self.names):
            for leaf, on in ((name, i != which), *((f"adapters.default.{name}_{kind}", i == which) for kind in "ab")):
                self.leaves[leaf].copy_(torch.eye(WIDTH) * (on / (SCALE if leaf.endswith("_b") else 1.0)))
        if self.linear:
            mask = self.call(self.leaves["x"], None)[: sum(self.pair.sizes)]
        else:
            slots = [torch.eye(K)[k].expand(len(self.ids), K) for k in range(K)]
            mask = torch.stack([self.call(self.leaves["x"], w) for w in slots], 1)[self.m_S, self.k_S]
            mask = mask if which else mask.sqrt()  # relu_squared behind it
        for name, leaf in self.leaves.items():
            leaf.copy_(before[name])
        assert {round(float(v), 2) for v in mask.unique()} <= {0.0, 1 / (1 - self.pair.dropout)}
        assert not len(mask) or 0.3 < mask.count_nonzero() / mask.numel() < 0.7
        return mask.double()
