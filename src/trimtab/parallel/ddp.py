"""DDP for models with MoE layers: dense parameters in DDP's buckets, experts over their own group.

    dense parameters    all-reduced over dp, mean               DDP, without find_unused_parameters
    experts             all-reduced over edp, divided by dp     once, at the end of each backward that DDP reduces in

Every expert has a gradient on every rank, tokens or not, so no rank waits for another. An expert's gradient is
scaled by edp / dp where it enters the layer, then averaged over edp: an average of averages is itself, so backwards
may accumulate with or without `no_sync()`, as DDP's do, and one average more than DDP takes changes nothing.
"""

from __future__ import annotations

import copy
import inspect
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from trimtab.errors import ConfigError, InputError
from trimtab.parallel.data import join_data_parallel
from trimtab.parallel.experts import ParallelExperts


def ddp(model: nn.Module, dp_mesh: DeviceMesh, edp_mesh: DeviceMesh, **options: Any) -> DistributedDataParallel:
    """The model in DDP, its experts reduced apart. Call after `parallelize`, on every rank: values of each group's
    first rank are taken.

    The balance losses become those of the global batch, see `trimtab.parallel.data`.

    Args:
        dp_mesh: one dim, the ranks that have tokens of their own (CP included).
        edp_mesh: one dim, the ranks that hold the same experts.
        options: for DDP. Buffers are not broadcast before each forward if nothing is said of them.

    Experts with `main_grad`: the dummies that autograd delivers are dropped, `reduce_main_grads` reduces the buffers.
    Experts with `delay_wgrad`: theirs are reduced by `backward_dw()`, unless forward and it are under `no_sync()`.
    Experts may be frozen and trained again later, alike on every rank; as with DDP other parameters may not.
    Optimisers: experts' parameters are DTensors and others are not. torch's fused=True and foreach=True want them in
    parameter groups of their own; `GradScaler.unscale_` and `swa_utils.get_ema_multi_avg_fn` take no mixture at all
    (`fully_shard_moe` makes none).
    An optimiser that steps inside the backward, in hooks of the parameters, sees gradients of this rank alone, as with
    DDP itself; under `fully_shard_moe` it sees the reduced ones.
    `join()` is refused: a rank whose data has ended still owns experts, so feed it batches without tokens.

    Raises:
        ConfigError: no parallel experts, meshes that do not fit together or have more dims, or nothing but experts to
            train.
    """
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
        dist.broadcast(_local(param.detach()), group=group, group_src=0)
    for module in experts:
        module.gradient_scale = edp_mesh.size() / dp_mesh.size()
    delayed = [module for module in experts if module.delay_wgrad]
    for part in [[module for module in experts if not module.delay_wgrad], *([module] for module in delayed)]:
        reducer = _ExpertReducer([param for module in part for param in _reduced(module)], group)
        wrapped.register_forward_pre_hook(partial(_note_sync, reducer))
    wrapped.join_hook = _no_join  # type: ignore[method-assign]
    fused = [module.get_parameter(name) for module in experts for name in module.fused]
    wrapped.__dict__["_dummies"] = _Dummies(fused)  # where a copy of the model finds it
    return wrapped


def reduce_main_grads(model: nn.Module, dp_mesh: DeviceMesh, edp_mesh: DeviceMesh) -> None:
    """Once per optimiser step, after the last backward: the experts' `main_grad`s summed over edp, divided by dp.

    For experts built with main_grad="accumulate" (or "overwrite", one micro-batch a step); the optimiser then reads
    `main_grad` and zeroes it. Every rank of `edp_mesh` must call. Biases have ordinary gradients, which `ddp` reduces.

    Raises:
        InputError: a trained parameter has no `main_grad`; before any is reduced.
    """
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
    _average([_local(p.main_grad) for p in params.values()], edp_mesh.get_group(), dp_mesh.size())  # type: ignore[attr-defined]


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
    """Reduces the gradients of some experts as a backward that reached one of them ends, if DDP reduces in it.

    DDP does so once after a forward outside of `no_sync()`, whatever came in between, and where it was told to before
    the backward alone: torch's pipeline stages run every forward under `no_sync()`, and the last backward without.
    """

    def __init__(self, params: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
        self.params, self.group = params, group
        self.expected, self.spent, self.queued = False, False, False
        self.wrapped: Callable[[], nn.Module | None] = lambda: None
        for param in params:
            _when_accumulated(param, self.accumulated)

    def __deepcopy__(self, memo: dict[int, Any]) -> _ExpertReducer:
        """For the copies of the parameters, over the same group."""
        return _ExpertReducer(copy.deepcopy(self.params, memo), self.group)

    def accumulated(self, _: Tensor) -> None:
        wrapped = self.wrapped()
        now = wrapped is not None and bool(wrapped.require_backward_grad_sync)
        if (self.expected or now) and not self.queued:
            self.queued = True
            Variable._execution_engine.queue_callback(self.reduce)

    def reduce(self) -> None:
        self.spent, self.queued = True, False
        trained = [param for param in self.params if param.requires_grad]
        for param in trained:  # one that no layer used this time has a gradient of zeros, as on its peers
            if param.grad is None:
                param.grad = torch.zeros_like(param)
        _average([_local(p.grad) for p in trained if p.grad is not None], self.group, self.group.size())


def _note_sync(reducer: _ExpertReducer, wrapped: nn.Module, _: Any) -> None:
    reducer.wrapped = weakref.ref(wrapped)
    if reducer.spent:  # not as a backward ends: reentrant checkpointing has one within another for each layer
        reducer.expected = reducer.spent = False
    reducer.expected |= torch.is_grad_enabled() and bool(wrapped.require_backward_grad_sync)


@torch.no_grad()
def _average(tensors: Sequence[Tensor], group: dist.ProcessGroup, divisor: int) -> None:
    """Sums over the group, divided, in place: one all-reduce for each tensor, in their order."""
    for tensor in tensors:
        dist.all_reduce(tensor, group=group)
        tensor.div_(divisor)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
