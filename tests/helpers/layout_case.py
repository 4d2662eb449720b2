"""One layout of ranks after another, each model against what one process computed.

    dense mesh    [dp, cp, tp]       d has sequences of its own, c and t hold positions of them
    expert mesh   [edp, etp, ep]     the same ranks, folded

Loss of a rank (d, c) = sum(h * dy) over its positions; the mean over all d and c counts, plus the balance losses.

Legend: B batch, L positions, D model dim.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from helpers.comparing import full_value, relative_error
from helpers.layout_truth import Batch, Case, Model, Solved, build, data_of, solve
from helpers.ranks import packed, unpacked
from trimtab.layout import shard_cuts
from trimtab.parallel.check_replicated import check_replicated
from trimtab.parallel.ddp import ddp, reduce_main_grads
from trimtab.parallel.expert_parallel import ExpertParallel, parallelize
from trimtab.parallel.fsdp import fully_shard_moe
from trimtab.parallel.grad_norm import clip_grad_norm_
from trimtab.parallel.moe import join_data_parallel
from trimtab.routing.balance import routers, set_totals, update_bias

BOUNDS = {"float64": 1e-13, "float32": 2e-6, "float16": 1e-2, "bfloat16": 5e-2}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """W ranks as dense [dp, cp, tp] and experts [edp, etp, ep]. zigzag: the order of a cp rank's positions.

    data: "none" reduces gradients by hand; "hsdp2" has experts over two dims, too.
    dtype: of the parameters and of what comes in. compute, reduce: FSDP2's mixed precision, "" where it is not asked.
    lora: three adapters, see `layout_truth.build`.
    """

    ep: int = 1
    etp: int = 1
    tp: int = 1
    cp: int = 1
    zigzag: bool = False
    tokens: str = "own"
    data: str = "none"
    transport: str = "alltoall"
    combine: str = "sum"
    bias: bool = False
    activation: str = "swiglu"
    delay_wgrad: bool = False
    main_grad: str = "off"
    dtype: str = "float32"
    compute: str = ""
    reduce: str = ""
    replicate_experts: Any = "off"
    lora: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """For `fully_shard`."""
        if not self.compute + self.reduce:
            return {}
        param, reduced = (getattr(torch, name) if name else None for name in (self.compute, self.reduce))
        return {"mp_policy": MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduced)}

    @property
    def bound(self) -> float:
        """How far anything may be from the truth: by the narrowest type that a value passes through."""
        return max(BOUNDS[name] for name in (self.dtype, self.compute, self.reduce) if name)

    @property
    def truth(self) -> dict[str, Any]:
        """What the values depend on."""
        return {"bias": self.bias, "activation": self.activation, "lora": self.lora}

    @property
    def config(self) -> dict[str, Any]:
        return self.truth | {"delay_wgrad": self.delay_wgrad, "main_grad": self.main_grad}


class Meshes:
    """Made once for each shape."""

    def __init__(self) -> None:
        self.made: dict[Any, DeviceMesh] = {}

    def get(self, **dims: int) -> DeviceMesh:
        key = tuple(dims.items())
        if key not in self.made:
            ranks = torch.arange(dist.get_world_size()).view(*dims.values())
            self.made[key] = DeviceMesh("cpu", ranks, mesh_dim_names=tuple(dims))
        return self.made[key]


class Ranks:
    """One layout's model and meshes, by the calls that a user makes."""

    def __init__(self, layout: Layout, meshes: Meshes) -> None:
        o, world = layout, dist.get_world_size()
        self.layout, self.dp, edp = o, world // (o.cp * o.tp), world // (o.ep * o.etp)
        self.dense = meshes.get(dp=self.dp, cp=o.cp, tp=o.tp)
        self.experts = meshes.get(edp=edp, etp=o.etp, ep=o.ep)
        self.d, self.c, self.t = self.dense.get_coordinate() or (0, 0, 0)
        self.divisor = self.dp * o.cp
        self.dtype: torch.dtype = getattr(torch, o.dtype)
        model = build(self.dtype, **o.config)
        style = ExpertParallel(
            transport=o.transport, tokens=o.tokens, combine=o.combine,  # type: ignore[arg-type]
            tp_mesh=self.dense["tp"] if o.tokens != "own" else None, cp_mesh=self.dense["cp"] if o.cp > 1 else None,
            etp="etp" if o.etp > 1 else None, replicate_experts=o.replicate_experts, copy_cost=0,
        )  # fmt: skip
        on = self.experts["etp", "ep"] if o.etp > 1 else self.experts["ep"]
        parallelize(model, on, {"layers.*.moe": style})
        flat = meshes.get(data=self.divisor, tp=o.tp)["data"]
        self.model: Model = model
        self.runner: Any = model
        if o.data == "fsdp":
            mesh = self.dense["dp", "cp"] if min(self.dp, o.cp) > 1 else flat
            self.runner = fully_shard_moe(model, mesh, self.experts["edp"], blocks=["layers.*.moe"], **o.options)
        elif o.data in ("hsdp", "hsdp2"):
            dense = meshes.get(replicate=2, shard=self.divisor // 2, tp=o.tp)["replicate", "shard"]
            folded = meshes.get(replicated=2, sharded=edp // 2, etp=o.etp, ep=o.ep) if o.data == "hsdp2" else None
            edp_mesh = self.experts["edp"] if folded is None else folded["replicated", "sharded"]
            self.runner = fully_shard_moe(model, dense, edp_mesh, **o.options)
        elif o.data == "ddp":
            self.runner = ddp(model, flat, self.experts["edp"])
        else:
            join_data_parallel(model, flat, self.experts["edp"])
        self.flat = flat
        experts = [layer["moe"].experts for layer in model.layers if o.main_grad != "off"]
        self.replicas, self.fused = 0, [param for module in experts for param in (module.gate_up, module.down)]

    def mine(self, length: int) -> list[int]:
        """The positions that this rank is given, of any sequence."""
        o = self.layout
        cuts = uneven(length, o.cp)
        held = list(range(cuts[self.c], cuts[self.c + 1]))
        if o.zigzag:
            half = shard_cuts(length, 2 * o.cp)
            held = [p for i in (self.c, 2 * o.cp - 1 - self.c) for p in range(half[i], half[i + 1])]
        if o.tokens == "sharded":
            cuts = uneven(len(held), o.tp)
            held = held[cuts[self.t] : cuts[self.t + 1]]
        return held

    def step(self, case: Case, truth: Solved) -> dict[str, float]:
        """Errors of everything, by name."""
        errors: dict[str, float] = {}
        self.runner.zero_grad()
        for param in self.fused:
            param.main_grad = torch.zeros_like(param)  # type: ignore[attr-defined]
            param.grad_added_to_main_grad = False  # type: ignore[attr-defined]
        if case.totals:
            set_totals(self.model, truth.tokens, truth.counts)
        for micro in range(case.micros):
            b, held = data_of(case, self.d, micro), self.mine(truth.y[micro][self.d].shape[1])
            with self._sync(not case.totals or micro == case.micros - 1):
                ours = b.x[:, held].to(self.dtype).requires_grad_()
                y, losses = self.runner(ours, *_cut(b, held))
                torch.autograd.backward([y, losses], [b.dy[:, held].to(y.dtype), torch.ones_like(losses)])
            reports = [layer["moe"].dispatcher.replicated for layer in self.model.layers]
            self.replicas += sum(int(report.replicas_P.sum()) for report in reports if report is not None)
            own, balance = truth.dx[micro][self.d]
            errors[f"y{micro}"] = relative_error(y, truth.y[micro][self.d][:, held])
            assert ours.grad is not None
            errors[f"dx{micro}"] = relative_error(ours.grad, (own + self.divisor * balance)[:, held])
            errors[f"losses{micro}"] = relative_error(losses, torch.tensor(truth.losses[micro], dtype=torch.float64))
        held_back = [p for layer in self.model.layers for p in layer["moe"].experts.parameters()]
        assert not self.layout.delay_wgrad or all(p.grad is None for p in held_back), "not before backward_dw"
        for _ in range(case.micros if self.layout.delay_wgrad else 0):
            for layer in reversed(self.model.layers):
                layer["moe"].experts.backward_dw()
        if self.layout.data == "ddp":
            assert all(param.grad is None for param in self.fused), "the dummies are dropped"
            reduce_main_grads(self.runner, self.flat, self.experts["edp"])
        loads = update_bias(self.model, self.model.layers[0]["moe"].router.groups.batch)
        for name, router in routers(self.model).items():
            errors[f"loads {name}"] = relative_error(loads[name], truth.counts[name])
            router.totals = None
        true = {name: own / self.divisor + balance for name, (own, balance) in truth.grads.items()}
        for name, grad in self.gradients().items():
            errors[f"d {name}"] = relative_error(grad, true[name])
        return errors | self._norms(list(true.values()))

    def _norms(self, true: list[Tensor]) -> dict[str, float]:
        """Of the gradients, before and after they are clipped, and with another power."""
        errors = {}
        for power in (float("inf"), 2.0):
            want = torch.stack([torch.linalg.vector_norm(g, power) for g in true]).norm(power)
            errors[f"norm {power}"] = relative_error(clip_grad_norm_(self.runner, 1e9, norm_type=power), want)
        clip_grad_norm_(self.runner, 0.5)
        errors["norm clipped"] = relative_error(clip_grad_norm_(self.runner, 1e9), want.clamp(max=0.5))
        return errors

    def gradients(self) -> dict[str, Tensor]:
        """Whole gradients of the mean loss. Without data parallelism they are reduced by hand here."""
        found = {}
        for name, param in self.model.named_parameters():
            if ".idle." in name or not param.requires_grad:
                assert param.grad is None, name
                continue
            fused = any(param is p for p in self.fused)
            assert not fused or param.grad_added_to_main_grad  # type: ignore[attr-defined]
            grad = param.main_grad if fused else param.grad  # type: ignore[attr-defined]
            assert grad is not None, name
            if self.layout.data == "none":
                local = grad.to_local() if isinstance(grad, DTensor) else grad
                dist.all_reduce(local, group=(self.experts["edp"] if ".experts." in name else self.flat).get_group())
                local /= self.divisor
            found[name] = full_value(grad)
        return found

    def _sync(self, last: bool) -> Any:
        if self.layout.data in ("fsdp", "hsdp", "hsdp2"):
            self.runner.set_requires_gradient_sync(last)
        return self.runner.no_sync() if self.layout.data == "ddp" and not last else contextlib.nullcontext()


def _cut(b: Batch, held: list[int]) -> tuple[Tensor | None, Tensor | None]:
    return (None if b.mask is None else b.mask[:, held]), (None if b.ids is None else b.ids[:, held])


def uneven(length: int, ranks: int) -> tuple[int, ...]:
    """Cuts with a first shard of one position, an empty second one where there are three, the rest in the last."""
    inner = [min(1, length), *[0] * (ranks - 2)] if ranks > 1 else []
    return (0, *accumulate([*inner, length - sum(inner)]))


def solve_all(world: int, plan: list[tuple[Layout, list[Case]]]) -> bytes:
    """The truth of each (number of d, case, configuration) of a plan, once, to be handed to the ranks."""
    solved: dict[Any, Solved] = {}
    for layout, cases in plan:
        dp = world // (layout.cp * layout.tp)
        for case in cases:
            key = (case, dp, *layout.truth.values())
            if key not in solved:
                solved[key] = solve(case, dp, **layout.truth)
    return packed(solved)


def run_plan(plan: list[tuple[Layout, list[Case]]], truths: bytes) -> dict[Layout, dict[str, float]]:
    """Errors by layout, case and what; a model that serves several cases starts each with the same parameters."""
    errors: dict[Layout, dict[str, float]] = {}
    meshes, solved = Meshes(), unpacked(truths)
    for layout, cases in plan:
        ranks = Ranks(layout, meshes)
        for case in cases:
            truth = solved[case, ranks.dp, *layout.truth.values()]
            for name, error in ranks.step(case, truth).items():
                errors.setdefault(layout, {})[f"{case} {name}"] = error
        check_replicated(ranks.runner)
        assert (ranks.replicas > 0) == (layout.replicate_experts != "off" and layout.ep > 1), layout
    return errors
