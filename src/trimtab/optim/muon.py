"""Muon for the matrices that a model is made of, AdamW for the rest: one `torch.optim.Optimizer`.

    B <- B + (1 - momentum) (g - B);    U = g + momentum (B - g), or B without Nesterov
    p <- p (1 - lr weight_decay) - lr s(out, in) NewtonSchulz(U)          of each matrix, see `trimtab.optim.layout`

s is 0.2 sqrt(max(out, in)) ("match_rms_adamw": updates as large as AdamW's) or sqrt(max(1, out / in)) ("original"), of
one matrix in its out x in sense. Jordan et al. 2024; Liu et al. 2025, arXiv 2502.16982.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from trimtab.checkpoint.state import HOW, check_groups
from trimtab.errors import ConfigError
from trimtab.optim import exchange
from trimtab.optim.describe import described
from trimtab.optim.layout import Layout
from trimtab.optim.low_bits import widen, write_back
from trimtab.optim.matrices import Found, Layouts, Rule, find_matrices
from trimtab.optim.newton_schulz import KELLER, Coefficients, NewtonSchulz, at_once, plain
from trimtab.parallel.meshes import local_part

SCALES: dict[str, Callable[[int, int], float]] = {
    "match_rms_adamw": lambda outs, ins: 0.2 * math.sqrt(max(outs, ins)),
    "original": lambda outs, ins: math.sqrt(max(1, outs / ins)),
}
"""`adjust_lr_fn` of torch.optim.Muon by name, of one matrix."""
STATE: dict[Rule, tuple[str, ...]] = {"muon": ("momentum_buffer",), "adamw": ("exp_avg", "exp_avg_sq")}


class Muon(torch.optim.Optimizer):
    """Muon for experts and dense projections, AdamW for embeddings, heads, vectors and what is not known.

    Args:
        model: whole, after `parallelize`, `fully_shard` or `from_pretrained`: the modules tell which matrices their
            parameters are made of, and `print(optimizer)` what was found.
        lr: of all groups; with "match_rms_adamw" what suits AdamW.
        weight_decay: of all but vectors and biases.
        momentum, nesterov: of Muon.
        adjust_lr_fn: the scale, see the module's head; torch.optim.Muon's default is "original".
        newton_schulz: `plain`, `gram`, or one's own, see `trimtab.optim.newton_schulz.NewtonSchulz`.
        coefficients: of its steps: `KELLER`, `POLAR_EXPRESS`, or others.
        ns_dtype: what it computes in.
        betas, eps: of AdamW.
        adamw_lr: of AdamW's groups, `lr` if not given.
        router: whose routers are. Moonlight, GLM-4.5 and DeepSeek-V4 say Muon, others AdamW.
        lora: whose LoRA factors are.
        layouts: of parameters by patterns of their names, `{"*.fc1.weight": Layout((hidden, hidden))}`, for modules
            that are not known, or known otherwise; None for AdamW.
        low_bits: sixteen low bits beside each bfloat16 parameter, and its other state in float32: it learns as with a
            float32 master, bit for bit, for two bytes an element (see `trimtab.optim.low_bits`).

    Groups have a `rule`: "muon", "adamw", and "adamw" without decay. State is of a parameter's shape and placement and
    has torch's names: `momentum_buffer`; `step`, `exp_avg`, `exp_avg_sq`; and `low_bits`. On the CPU float32 parameters
    get the bits of torch.optim.Muon on each of their matrices. Every rank that holds a part of a parameter must call
    `step`, with a gradient where the others have one: matrices that are cut are put together by an exchange.

    Raises:
        ConfigError: parameters in the place of the model, an option out of its range, a layout that does not fit.
    """

    def __init__(
        self, model: nn.Module, lr: float | Tensor = 3e-4, *, weight_decay: float = 0.1, momentum: float = 0.95,
        nesterov: bool = True, adjust_lr_fn: Literal["match_rms_adamw", "original"] = "match_rms_adamw",
        newton_schulz: NewtonSchulz = plain, coefficients: Coefficients = KELLER,
        ns_dtype: torch.dtype = torch.bfloat16, betas: tuple[float, float] = (0.9, 0.95), eps: float = 1e-8,
        adamw_lr: float | Tensor | None = None, router: Rule = "adamw", lora: Rule = "adamw",
        layouts: Layouts | None = None, low_bits: bool = False,
    ) -> None:  # fmt: skip
        if not isinstance(model, nn.Module):
            raise ConfigError(
                f"Muon takes the model, not {type(model).__name__}: which matrices a parameter is made of (gate and up "
                "in one, stacks, in x out) is told by the module that holds it. Pass model, not model.parameters()"
            )
        if adjust_lr_fn not in SCALES or not {router, lora} <= {"adamw", "muon"}:
            raise ConfigError(f"{adjust_lr_fn=} is one of {tuple(SCALES)}, {router=} and {lora=} of ('adamw', 'muon')")
        own = lr if adamw_lr is None else adamw_lr
        if min(float(lr), float(own), weight_decay, momentum, eps, *betas) < 0 or max(momentum, *betas) >= 1:
            raise ConfigError(
                f"{lr=}, {adamw_lr=}, {weight_decay=} and {eps=} are at least 0, {momentum=} and {betas=} in [0, 1)"
            )
        self.newton_schulz, self.coefficients, self.ns_dtype = newton_schulz, tuple(coefficients), ns_dtype
        self.low_bits = low_bits
        self._find = partial(find_matrices, model, router=router, lora=lora, layouts=layouts)
        self._found = self._find()
        groups: dict[tuple[bool, bool], list[nn.Parameter]] = {(True, True): [], (False, True): [], (False, False): []}
        for param, found in self._found.items():
            if param.requires_grad:
                muons = found.layout is not None
                groups[muons, muons or (param.ndim > 1 and not found.name.endswith("bias"))].append(param)
        given = [
            {
                "params": params, "rule": "muon" if muons else "adamw", "lr": lr if muons else own,
                "weight_decay": weight_decay if decays else 0.0,
            } for (muons, decays), params in groups.items() if params
        ]  # fmt: skip
        defaults = {
            "lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov,
            "adjust_lr_fn": adjust_lr_fn, "betas": betas, "eps": eps, "fused": True,
        }  # fmt: skip
        super().__init__(given, defaults)

    def found(self, param: nn.Parameter) -> Found:
        """What a parameter is made of. Raises ConfigError: it is not of the model."""
        if param not in self._found:
            self._found = self._find()  # wrappers may have put others there
        if param not in self._found:
            raise ConfigError(f"a parameter {tuple(param.shape)} is not of the model that this optimizer was made for")
        return self._found[param]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's, of parameters that are trained from now on. Without a "rule" it is "muon" if all are matrices.

        Raises:
            ConfigError: "muon" for one that is no matrices, or one that is not of the model.
        """
        super().add_param_group(param_group)
        group = self.param_groups.pop()
        others = [found for found in map(self.found, group["params"]) if found.layout is None]
        if others and group.setdefault("rule", "adamw") == "muon":
            raise ConfigError(f"{others[0].name} is not Muon's ({others[0].what}): see layouts=, or take rule='adamw'")
        group.setdefault("rule", "muon")
        self.param_groups.append(group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of all parameters that have a gradient; returns what the closure returns."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            if group["rule"] == "muon":
                self._muon(group["params"], group)
            else:
                self._adamw([param for param in group["params"] if param.grad is not None], group)
        return loss

    def _muon(self, params: Iterable[nn.Parameter], group: Mapping[str, Any]) -> None:
        lr, scale = float(group["lr"]), SCALES[group["adjust_lr_fn"]]
        for layout, cuts, bucket in self._buckets(params):
            updates = [self._update(param, group) for param in bucket]
            with exchange.whole_matrices(updates, cuts) as whole:
                self._orthogonalize(whole, layout)
            alphas = [-(lr * scale(outs, ins)) for _, outs, ins in layout.matrices(bucket[0].shape)]
            rows = exchange.parts_of_rows(layout, bucket[0], cuts) if len(set(alphas)) > 1 else None
            for param, update in zip(bucket, updates, strict=True):
                wide = self._widened(param)  # float32, so that bfloat16 is rounded once, whatever the mesh
                wide = wide.to(torch.promote_types(wide.dtype, torch.float32)).mul_(1 - lr * group["weight_decay"])
                exchange.add_parts(wide, update, alphas, rows, layout.axis)
                self._narrow(param, wide)

    def _buckets(
        self, params: Iterable[nn.Parameter]
    ) -> Iterator[tuple[Layout, list[exchange.Cut], list[nn.Parameter]]]:
        """Those with a gradient, alike in layout, shape, dtype, device and placement: as many as are taken at once."""
        alike: dict[Any, list[nn.Parameter]] = {}
        for param in params:
            placed = (param.device_mesh, param.placements) if isinstance(param, DTensor) else None
            key = self.found(param).layout, param.shape, param.dtype, param.device, placed
            alike.setdefault(key, []).append(param)
        cut = [(key[0], exchange.cuts_of(self.found(each[0]).name, each[0]), each) for key, each in alike.items()]
        exchange.check_gradients([(self.found(param).name, param, cuts) for _, cuts, every in cut for param in every])
        for layout, cuts, every in cut:
            number = at_once(exchange.largest_part(every[0], cuts), every[0].dtype, every[0].device)
            each = [param for param in every if param.grad is not None]
            yield from ((layout, cuts, each[first : first + number]) for first in range(0, len(each), number))

    def _update(self, param: nn.Parameter, group: Mapping[str, Any]) -> Tensor:
        """U of the module's head, of what this rank has of a parameter: contiguous, in memory of its own."""
        state = self._state(param, "muon")
        buffer, momentum = local_part(state["momentum_buffer"]), group["momentum"]
        new = exchange.local_gradient(self.found(param).name, param).to(buffer.dtype)
        buffer.lerp_(new, 1 - momentum)
        return (new.lerp(buffer, momentum) if group["nesterov"] else buffer.clone()).contiguous()

    def _state(self, param: nn.Parameter, rule: Rule) -> dict[str, Any]:
        """A parameter's state; at first zeros, in float32 where there are low bits beside it. Raises ConfigError: it is
        that of the other rule."""
        names, state = STATE[rule], cast(dict[str, Any], self.state[param])
        if not state:
            state |= {name: torch.zeros_like(param) for name in names}
        if absent := set(names) - state.keys():
            raise ConfigError(f"{self.found(param).name} is {rule}'s, and what was loaded for it has no {min(absent)}")
        if self.low_bits and param.dtype == torch.bfloat16 and "low_bits" not in state:  # or resumed without
            state |= {name: state[name].float() for name in names}
            state["low_bits"] = torch.zeros_like(param)
        return state

    def _orthogonalize(self, updates: Sequence[Tensor], layout: Layout) -> None:
        """Newton-Schulz of each matrix, in place. updates: contiguous, alike, every matrix whole."""
        for views in zip(*map(layout.views, updates), strict=True):
            all_Brsn = torch.cat(views) if len(views) > 1 else views[0]
            for x_Brsn in all_Brsn.split(at_once(all_Brsn[:1].numel(), self.ns_dtype, all_Brsn.device)):
                made = self.newton_schulz(x_Brsn.flatten(1, 2), self.coefficients, self.ns_dtype)
                x_Brsn.copy_(made.reshape(x_Brsn.shape))
            if len(views) > 1:
                for view, own in zip(views, all_Brsn.split(views[0].shape[0]), strict=True):
                    view.copy_(own)

    def _adamw(self, params: Sequence[nn.Parameter], group: Mapping[str, Any]) -> None:
        """torch's, fused, on what this rank has of each parameter; one by one where that is widened."""
        beta1, beta2 = group["betas"]
        for param in params:
            state = self._state(param, "adamw")
            if "step" not in state:
                state["step"] = torch.zeros((), device=param.device)
        alone = [[param] for param in params if "low_bits" in self.state[param]]
        for some in (*alone, [param for param in params if "low_bits" not in self.state[param]]):
            own = [self._widened(param) for param in some]
            grads = [exchange.local_gradient(self.found(p).name, p).to(t.dtype) for p, t in zip(some, own, strict=True)]
            means, squares, steps = (
                [local_part(self.state[param][name]) for param in some] for name in (*STATE["adamw"], "step")
            )
            adamw(
                own, grads, means, squares, [], steps, fused=True, amsgrad=False, beta1=beta1, beta2=beta2,
                lr=group["lr"], weight_decay=group["weight_decay"], eps=group["eps"], maximize=False,
            )  # fmt: skip
            for param, wide in zip(some, own, strict=True):
                self._narrow(param, wide)

    def _widened(self, param: nn.Parameter) -> Tensor:
        """What this rank has of a parameter; with its low bits, if it has some, in new memory."""
        local, low = local_part(param), self.state[param].get("low_bits")
        return local if low is None else widen(local, local_part(low))

    def _narrow(self, param: nn.Parameter, wide: Tensor) -> None:
        """Put what became of `_widened` where it is from."""
        local, low = local_part(param), self.state[param].get("low_bits")
        if low is not None:
            write_back(wide, local, local_part(low))
        elif wide.dtype != local.dtype:
            local.copy_(wide)

    def state_dict(self) -> dict[str, Any]:
        """As torch's, with "param_names" in each group."""
        packed: dict[str, Any] = super().state_dict()
        for group, own in zip(packed["param_groups"], self.param_groups, strict=True):
            group["param_names"] = [self.found(param).name for param in own["params"]]
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but a parameter gets what was saved under its name, whatever the groups, and tensors keep their
        dtype. Raises ConfigError: names that only one of both has, a group whose parameters had different options, or
        the state of the other rule."""
        kept: dict[str, Any] = {}  # what the user's hooks make of it, in the order of the parameters here

        def by_name(_: Any, loaded: dict[str, Any]) -> dict[str, Any]:
            here = [[self.found(param).name for param in own["params"]] for own in self.param_groups]
            numbers, options = dict[str, Any](), dict[str, dict[str, Any]]()
            for i, group in enumerate(loaded["param_groups"]):
                ordered = any(isinstance(number, str) for number in group["params"])  # by torch's helpers
                names = here[i] if ordered else group.get("param_names", ())
                numbers |= zip(names, group["params"], strict=False)
                shared = {key: value for key, value in group.items() if key not in HOW}
                options |= dict.fromkeys(names, shared)
            check_groups(here, options)
            kept.update(loaded, param_groups=[
                own | options.get(min(names, default=""), {}) | {"params": [numbers[name] for name in names]}
                for own, names in zip(self.param_groups, here, strict=True)
            ])  # fmt: skip
            return kept

        with self.register_load_state_dict_pre_hook(by_name):
            super().load_state_dict(state_dict)
        for group, own in zip(kept["param_groups"], self.param_groups, strict=True):
            for number, param in zip(group["params"], own["params"], strict=True):
                if saved := kept["state"].get(number):
                    self.state[param] |= {k: v.to(param.device) for k, v in saved.items() if isinstance(v, Tensor)}
                    self._state(param, own["rule"])

    def __getstate__(self) -> dict[str, Any]:
        own = ("newton_schulz", "coefficients", "ns_dtype", "low_bits", "_find", "_found")
        return super().__getstate__() | {name: getattr(self, name) for name in own}

    def __repr__(self) -> str:
        return described(self)


def for_trainer() -> type[Muon]:
    """For transformers' Trainer, which calls what this gives with the model:
    `optimizer_cls_and_kwargs=(trimtab.optim.for_trainer, {"lr": 3e-4})`."""
    return Muon
