"""DDP for models with MoE layers: dense parameters in DDP's buckets, experts over their own group.

    dense parameters    all-reduced over dp, mean               DDP
    experts             all-reduced over edp, divided by dp     once, at the end of each backward that DDP reduces in

Every expert that a rank's layers use has a gradient there, tokens or not, so no rank waits for another; with
`find_unused_parameters` ranks may leave layers out. An expert's gradient is
scaled by edp / dp where it enters the layer, then averaged over edp: an average of averages is itself, so backwards
may accumulate with or without `no_sync()`, as DDP's do, and one average more than DDP takes changes nothing.
"""

from __future__ import annotations

import copy
import inspect
import weakref
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from trimtab.errors import ConfigError, InputError
from trimtab.parallel.data import join_data_parallel
from trimtab.parallel.experts import ParallelExperts
from trimtab.parallel.local import local_part
from trimtab.parallel.token_meshes import check_meshes


def ddp(model: nn.Module, dp_mesh: DeviceMesh, edp_mesh: DeviceMesh, **options: Any) -> DistributedDataParallel:
    """The model in DDP, its experts reduced apart. Call after `parallelize`, on every rank: values of each group's
    first rank are taken.

    The balance losses become those of the global batch, see `trimtab.parallel.data`.

    Args:
        dp_mesh: one dim, the ranks that have tokens of their own (CP included).
        edp_mesh: one dim, the ranks that hold the same experts.
        options: for DDP. Buffers are not broadcast before each forward if nothing is said of them.

    Experts with `main_grad`: the dummies that autograd delivers are dropped, `reduce_main_grads` reduces the buffers.
    Experts with `delay_wgrad`: theirs are reduced by `backward_dw()`, unless forward and it are under `no_sync()`. No
    rank may leave them out, whatever the options: it would have nothing to call `backward_dw()` for.
    With find_unused_parameters or static_graph each rank may use other layers: experts that no rank used keep their
    gradients, None or not, as DDP's own parameters do, and others get zeros where they were not used. Without, all
    get zeros.
    As with DDP, a backward through the wrapped module alone, `wrapped.module(x)`, reduces nothing; but where DDP finds
    no tensor in what a forward returns, experts are reduced until the next forward.
    Experts may be frozen and trained again later, alike on every rank; as with DDP other parameters may not.
    Optimisers: experts' parameters are DTensors and others are not. torch's fused=True and foreach=True want them in
    parameter groups of their own; `GradScaler.unscale_` and `swa_utils.get_ema_multi_avg_fn` take no mixture at all
    (`fully_shard_moe` makes none). `ZeroRedundancyOptimizer` and `PostLocalSGDOptimizer` take the dense parameters:
    give experts an optimiser of their own.
    An optimiser that steps inside the backward, in hooks of the parameters, sees gradients of this rank alone, as with
    DDP itself; under `fully_shard_moe` it sees the reduced ones.
    `join()` is refused: a rank whose data has ended still owns experts, so feed it batches without tokens.

    Raises:
        ConfigError: no parallel experts, meshes that do not fit together or have more dims, or nothing but experts to
            train.
    """
    check_meshes(dp_mesh=dp_mesh, edp_mesh=edp_mesh)
    if dp_mesh.ndim != 1 or edp_mesh.ndim != 1:
        raise ConfigError(f"ddp needs meshes of one dim, got {dp_mesh} and {edp_mesh}")
    experts = join_data_parallel(model, dp_mesh, edp_mesh)
    own = {id(tensor) for module in experts for tensor in (*module.parameters(), *module.buffers())}
    if not any(p.requires_grad for p in model.parameters() if id(p) not in own):
        raise ConfigError(
            "all parameters but those of experts are frozen, and DDP takes no such model: use fully_shard_moe"
        )
    ignored = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if id(tensor) in own]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)  # type: ignore[no-untyped-call]
    names = ("forward_sync_buffers", "broadcast_buffers")  # torch 2.13 deprecates the second one, 2.11 has no other
    if not options.keys() & set(names):
        known = inspect.signature(DistributedDataParallel).parameters
        options[next(name for name in names if name in known)] = False
    wrapped = DistributedDataParallel(model, process_group=dp_mesh.get_group(), **options)
    group = edp_mesh.get_group()
    for param in (param for module in experts for param in module.parameters()):
        dist.broadcast(local_part(param.detach()), group=group, group_src=0)
    for module in experts:
        module.gradient_scale = edp_mesh.size() / dp_mesh.size()
    unused = wrapped.find_unused_parameters or wrapped.static_graph
    dense = [p for p in model.parameters() if id(p) not in own and p.requires_grad] if unused else []
    at_once = [param for module in experts if not module.delay_wgrad for param in _reduced(module)]
    reducer = _ExpertReducer(at_once, group, dense, unused=unused)
    wrapped.register_forward_pre_hook(partial(_note_sync, reducer))
    wrapped.register_forward_hook(partial(_note_outputs, reducer))
    for module in experts:
        if module.delay_wgrad:
            wrapped.register_forward_pre_hook(partial(_note_sync, _DelayedReducer(_reduced(module), group)))
    wrapped.join_hook = _no_join  # type: ignore[method-assign]
    fused = [module.get_parameter(name) for module in experts for name in module.fused]
    wrapped.__dict__["_dummies"] = _Dummies(fused)  # where a copy of the model finds it
    return wrapped


def reduce_main_grads(model: nn.Module, dp_mesh: DeviceMesh, edp_mesh: DeviceMesh) -> None:
    """Once per optimiser step, after the last backward: the experts' `main_grad`s summed over edp, divided by dp.

    For experts built with main_grad="accumulate" (or "overwrite", one micro-batch a step); the optimiser then reads
    `main_grad` and zeroes it. Every rank of `edp_mesh` must call. Biases have ordinary gradients, which `ddp` reduces.

    Raises:
        ConfigError: what is no mesh.
        InputError: a trained parameter has no `main_grad`; before any is reduced.
    """
    check_meshes(dp_mesh=dp_mesh, edp_mesh=edp_mesh)
    experts = [(name, module) for name, module in model.named_modules() if isinstance(module, ParallelExperts)]
    params = {
        f"{name}.{own}".lstrip("."): param
        for name, module in experts
        for own in module.fused
        if (param := module.get_parameter(own)).requires_grad
    }
    if absent := [name for name, param in params.items() if getattr(param, "main_grad", None) is None]:
        raise InputError(
            f"{', '.join(absent)}: no main_grad to reduce. Give each trained parameter of experts with main_grad= a "
            "tensor of its shape as `main_grad`, before the backward"
        )
    _average([local_part(p.main_grad) for p in params.values()], edp_mesh.get_group(), dp_mesh.size())  # type: ignore[attr-defined]


def _reduced(module: ParallelExperts) -> list[nn.Parameter]:
    """The parameters that have ordinary gradients where they are trained."""
    return [p for name, p in module.named_parameters() if name not in module.fused]


def _when_accumulated(param: Tensor, hook: Callable[[Tensor], None]) -> None:
    """Call the hook whenever the parameter has got a gradient, also if it is frozen yet."""
    trained = param.requires_grad
    param.requires_grad_(True).register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    param.requires_grad_(trained)


def _no_join(**_: Any) -> NoReturn:
    raise ConfigError(
        "DDP's join() lets ranks whose data has ended stay away, and their experts with them: feed such a rank batches "
        "without tokens, [0, L, D], as long as another has data"
    )


class _Dummies:
    """Drops what autograd delivers for parameters whose gradients are in `main_grad`."""

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self.params = params
        for param in params:
            _when_accumulated(param, self.drop)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Dummies:
        """Those of the copies of the parameters."""
        return _Dummies(copy.deepcopy(self.params, memo))

    @staticmethod
    def drop(param: Tensor) -> None:
        param.grad = None


class _ExpertReducer:
    """Reduces the gradients of some experts as a backward ends that DDP reduces in.

    DDP does so once after a forward outside of `no_sync()`, whatever came in between, and where it was told to before
    the backward alone: torch's pipeline stages run every forward under `no_sync()`, and the last backward without.

    inside: a backward has come by what a forward of the wrapper returned. It is the outermost one: reentrant
    checkpointing has one within another for each layer, more on one rank than on another if that leaves layers out.
    pending: since the last forward none has yet.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        group: dist.ProcessGroup,
        dense: Sequence[nn.Parameter] = (),
        *,
        unused: bool = False,
    ) -> None:
        """dense: DDP's own parameters, if a backward may reach these and no expert. unused: as may be on all ranks."""
        self.params, self.group, self.dense, self.unused = params, group, dense, unused
        self.expected, self.spent, self.queued, self.inside, self.reached = False, False, False, False, False
        self.pending = False
        self.wrapped: Callable[[], nn.Module | None] = lambda: None
        for param in (*params, *dense):
            _when_accumulated(param, self.accumulated)

    def __deepcopy__(self, memo: dict[int, Any]) -> _ExpertReducer:
        """For the copies of the parameters, over the same group."""
        params, dense = copy.deepcopy((self.params, self.dense), memo)
        return type(self)(params, self.group, dense, unused=self.unused)

    @property
    def asked(self) -> bool:
        wrapped = self.wrapped()
        return self.expected or (wrapped is not None and bool(wrapped.require_backward_grad_sync))

    def entered(self, _: Tensor) -> None:
        self.inside = True
        Variable._execution_engine.queue_callback(self.ended)

    def ended(self) -> None:
        """Of several outputs the first one's call does all."""
        reached, self.inside, self.reached = self.reached, False, False
        if reached:
            self.pending = False
            if self.asked:
                self.expected = False
                self.reduce()

    def accumulated(self, _: Tensor) -> None:
        if self.inside:
            self.reached = True
        elif self.expected or (self.pending and self.asked):
            # By a tensor that was not found in what the forward returned, or a view that was changed in place.
            self.reduce_later()

    def reduce_later(self) -> None:
        if not self.queued:
            self.queued = True
            Variable._execution_engine.queue_callback(self.reduce)

    def reduce(self) -> None:
        self.spent, self.queued, self.reached = True, False, False
        trained = [param for param in self.params if param.requires_grad]
        missing = [index for index, param in enumerate(trained) if param.grad is None]
        used = [1] * len(trained)
        if self.unused and trained:
            used = self.used_anywhere(trained[0].device, used, missing)
        for index in missing:  # one that was not used here has a gradient of zeros, as on its peers
            if used[index]:
                trained[index].grad = torch.zeros_like(trained[index])
        _average([local_part(p.grad) for p in trained if p.grad is not None], self.group, self.group.size())

    def used_anywhere(self, device: torch.device, used: list[int], missing: list[int]) -> list[int]:
        """On how many ranks each has a gradient. The host waits for the answer only where one is missing."""
        ranks = torch.ones(len(used), dtype=torch.int32, device=device)
        if missing:
            ranks[missing] = 0
        dist.all_reduce(ranks, group=self.group)
        return ranks.tolist() if missing else used


class _DelayedReducer(_ExpertReducer):
    """Of experts whose gradients come by `backward_dw()`, outside of any backward of the wrapper."""

    def accumulated(self, _: Tensor) -> None:
        if self.asked:
            self.reduce_later()


def _note_sync(reducer: _ExpertReducer, wrapped: nn.Module, _: Any) -> None:
    reducer.wrapped = weakref.ref(wrapped)
    reducer.inside = reducer.reached = reducer.queued = False  # as a backward that raised has left them
    reducer.pending = reducer.pending or torch.is_grad_enabled()
    if reducer.spent:  # not as a backward ends: it may be one within another
        reducer.expected = reducer.spent = False
    reducer.expected |= torch.is_grad_enabled() and bool(wrapped.require_backward_grad_sync)


def _note_outputs(reducer: _ExpertReducer, _: nn.Module, __: Any, output: Any) -> None:
    """On each output of its own graph: a leaf outlives the call, and hooks would pile up on it."""
    seen: set[int] = set()
    left = [output]
    while left:  # as DDP looks for them, but it may hold itself
        one = left.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, Tensor):
            if one.grad_fn is not None:
                one.register_hook(reducer.entered)  # type: ignore[no-untyped-call]
        elif isinstance(one, (list, tuple)):
            left += one
        elif isinstance(one, dict):
            left += one.values()
        elif is_dataclass(one):
            left += [getattr(one, field.name, None) for field in fields(one)]


@torch.no_grad()
def _average(tensors: Sequence[Tensor], group: dist.ProcessGroup, divisor: int) -> None:
    """Sums over the group, divided, in place: one all-reduce for each tensor, in their order."""
    for tensor in tensors:
        dist.all_reduce(tensor, group=group)
        tensor.div_(divisor)
