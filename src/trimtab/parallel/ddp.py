"""DDP for models with MoE layers: dense parameters in DDP's buckets, experts over their own group.

    dense parameters    all-reduced over dp, mean               DDP
    experts             all-reduced over edp, divided by dp     at the end of the backward

An expert's gradient is scaled by edp / dp where it enters the layer, then averaged over edp. An average of averages is
itself, so backwards may accumulate with or without `no_sync()`, as DDP's do.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from trimtab.errors import ConfigError, InputError
from trimtab.parallel.experts import ParallelExperts
from trimtab.parallel.meshes import check_meshes, local_part
from trimtab.parallel.moe import join_data_parallel


def ddp(model: nn.Module, dp_mesh: DeviceMesh, edp_mesh: DeviceMesh, **options: Any) -> DistributedDataParallel:
    """The model in DDP, its experts reduced over `edp_mesh`. Call after `parallelize`, on every rank.

    Parameters take the values of each group's first rank. The balance losses become those of the global batch.

    Args:
        dp_mesh: one dim, the ranks that have tokens of their own (CP included).
        edp_mesh: one dim, the ranks that hold the same experts.
        options: for DDP. Buffers are not broadcast before each forward if nothing is said of them.

    Experts are reduced in backwards outside of `no_sync()`, and in those of a forward outside of it. Without
    find_unused_parameters every rank must use the same layers; with it, experts that no rank used keep their gradients
    and others get zeros where they were not used. With `main_grad`, call `reduce_main_grads` before the optimizer's
    step. With `delay_wgrad`, `backward_dw()` reduces, and no rank may leave these experts out. DDP's `join()` is
    refused: a rank whose data has ended still owns experts, so feed it batches without tokens, [0, L, D].
    Experts' parameters are DTensors and others are not: optimizers with fused=True or foreach=True want them in groups
    of their own, and `ZeroRedundancyOptimizer` takes the dense ones alone.

    Raises:
        ConfigError: no parallel experts, meshes that do not fit together or have more dims, or nothing but experts to
            train.
    """
    check_meshes(1, dp_mesh=dp_mesh, edp_mesh=edp_mesh)
    experts = join_data_parallel(model, dp_mesh, edp_mesh)
    own = {id(tensor) for module in experts for tensor in (*module.parameters(), *module.buffers())}
    dense = [p for p in model.parameters() if id(p) not in own and p.requires_grad]
    if not dense:
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
    used, left_out, fused = [list[nn.Parameter]() for _ in range(3)]
    for module in experts:
        module.gradient_scale = edp_mesh.size() / dp_mesh.size()
        kind = left_out if wrapped.find_unused_parameters and not module.delay_wgrad else used
        for name, param in module.named_parameters():
            if param.is_floating_point():
                (fused if name in module.fused else kind).append(param)
    reducer = _ExpertReducer(group, used, left_out, fused, dense if left_out else ())
    wrapped.register_forward_pre_hook(reducer.before_forward)
    wrapped.join_hook = _no_join  # type: ignore[method-assign]
    return wrapped


def reduce_main_grads(model: nn.Module, dp_mesh: DeviceMesh, edp_mesh: DeviceMesh) -> None:
    """Once per optimizer step, after the last backward: the experts' `main_grad`s summed over edp, divided by dp.

    For experts built with main_grad="accumulate" (or "overwrite", one micro-batch a step); the optimizer then reads
    `main_grad` and zeroes it. Every rank of `edp_mesh` must call. Biases have ordinary gradients, which `ddp` reduces.

    Args:
        dp_mesh, edp_mesh: as in `ddp`.

    Raises:
        ConfigError: what is no mesh.
        InputError: a trained parameter has no `main_grad`; before any is reduced.
    """
    check_meshes(dp_mesh=dp_mesh, edp_mesh=edp_mesh)
    experts = [(name, module) for name, module in model.named_modules() if isinstance(module, ParallelExperts)]
    params = {
        f"{name}.{own}".lstrip("."): param
        for name, module in experts
        for own in module.fused if (param := module.get_parameter(own)).requires_grad
    }  # fmt: skip
    if absent := [name for name, param in params.items() if getattr(param, "main_grad", None) is None]:
        raise InputError(
            f"{', '.join(absent)}: no main_grad to reduce. Give each trained parameter of experts with main_grad= a "
            "tensor of its shape as `main_grad`, before the backward"
        )
    for param in params.values():
        _average(param.main_grad, edp_mesh.get_group(), dp_mesh.size())  # type: ignore[attr-defined]


class _ExpertReducer:
    """Averages experts' gradients over `group` as a backward ends.

    used: parameters that every rank uses in the same backwards. left_out: those that a rank may not use, whichever of
    them or of `dense` its backward reached. fused: whose gradients are in `main_grad`: what autograd delivers is
    dropped.
    """

    def __init__(self, group: dist.ProcessGroup, *params: Sequence[nn.Parameter]) -> None:
        self.group, self.params = group, params
        self.used, self.left_out, fused, dense = params
        self.reached: set[Tensor] = set()
        self.expected, self.queued = False, False
        self.wrapped: nn.Module | None = None
        for hook, hooked in ((self._reached, (*self.used, *self.left_out, *dense)), (_drop, fused)):
            for param in hooked:
                trained = param.requires_grad  # one that is frozen may thaw
                param.requires_grad_(True).register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
                param.requires_grad_(trained)

    def __deepcopy__(self, memo: dict[int, Any]) -> _ExpertReducer:
        """For copied parameters, over the same group."""
        return _ExpertReducer(self.group, *copy.deepcopy(self.params, memo))

    def before_forward(self, wrapped: nn.Module, _: Any) -> None:
        """As DDP does, take from the forward whether its backward is to reduce."""
        self.wrapped, self.queued = wrapped, False
        self.reached.clear()  # of a backward that failed
        if torch.is_grad_enabled():
            self.expected = bool(wrapped.require_backward_grad_sync)

    def _reached(self, param: Tensor) -> None:
        """Also where the backward alone is outside of `no_sync()`, as the last one of a pipeline stage."""
        if self.expected or (self.wrapped is not None and self.wrapped.require_backward_grad_sync):
            self.reached.add(param)
            if not self.queued:
                self.queued = True
                Variable._execution_engine.queue_callback(self._reduce)

    def _reduce(self) -> None:
        found = [param for param in self.used if param in self.reached]
        self.queued = False
        self.reached.clear()
        if trained := [param for param in self.left_out if param.requires_grad]:
            here = [param.grad is not None for param in trained]
            anywhere = torch.tensor(here, dtype=torch.int32).to(local_part(trained[0]).device, non_blocking=True)
            dist.all_reduce(anywhere, group=self.group)
            everywhere = here if all(here) else anywhere.tolist()  # without a wait for the device
            found += [param for param, ranks in zip(trained, everywhere, strict=True) if ranks]
        for param in found:
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad
            _average(param.grad, self.group, self.group.size())


def _drop(param: Tensor) -> None:
    param.grad = None


@torch.no_grad()
def _average(tensor: Tensor, group: dist.ProcessGroup, divisor: int) -> None:
    local = local_part(tensor)
    dist.all_reduce(local, group=group)
    local.div_(divisor)


def _no_join(**_: Any) -> NoReturn:
    raise ConfigError(
        "DDP's join() lets ranks whose data has ended stay away, and their experts with them: feed such a rank batches "
        "without tokens, [0, L, D], as long as another has data"
    )
