"""Megatron-Core on a CPU: what stands in for CUDA, each by name with its reason, and model parallelism over Gloo.

For tests alone: the package knows nothing of it, and on a GPU nothing of it is needed. Importing this imports Megatron,
with torch.compile as the identity; tests skip where Megatron is not installed.
"""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from queue import Queue
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import trace_rules
from torch.overrides import TorchFunctionMode

from helpers.ranks import run_ranks
from trimtab.verify.cases import Case
from trimtab.verify.collect import Verdict
from trimtab.verify.patterns import pattern_named
from trimtab.verify.run import run_local
from trimtab.verify.topologies import topology_named

if find_spec("megatron") is None:
    pytest.skip("megatron-core is not installed", allow_module_level=True)


def _as_it_is(function: Any = None, **options: Any) -> Any:
    """In place of torch.compile, which Megatron calls while it is imported: small functions, minutes of C++."""
    return (lambda given: given) if function is None else function


# Dynamo lists the functions of torch.cuda, and fails where two of them are one stand-in: it does so before.
trace_rules.get_torch_obj_rule_map()
with patch("torch.compile", _as_it_is), warnings.catch_warnings(action="ignore"):
    import megatron.core
    import megatron.core.distributed
    import megatron.core.models.gpt
    import megatron.core.optimizer
    import megatron.core.transformer.moe.moe_layer
    from megatron.core import parallel_state, process_groups_config, tensor_parallel
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.transformer import spec_utils
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

VERSION = tuple(int(part) for part in megatron.core.__version__.split(".")[:2])


class Stream:
    """In place of CUDA's streams and events: all that is asked has happened already."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.cuda_stream = 0

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *error: Any) -> None:
        return None

    def record_event(self, event: Any = None) -> Any:
        return Stream() if event is None else event

    def query(self) -> bool:
        return True

    def record(self, *args: Any) -> None:
        return None

    wait = wait_stream = wait_event = synchronize = record


class OnCpu(TorchFunctionMode):
    """`torch.zeros(1, device="cuda")` makes it on the CPU: the optimizer, its clip and the schedules say so."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if "device" in kwargs and _is_cuda(kwargs["device"]):
            kwargs["device"] = "cpu"
        if any(map(_is_cuda, args)):  # tensor.to("cuda")
            args = tuple("cpu" if _is_cuda(arg) else arg for arg in args)
        return func(*args, **kwargs)


def _is_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.partition(":")[0] == "cuda"


def _type(self: Tensor, dtype: Any = None, *args: Any, **options: Any) -> Any:
    with torch._C.DisableTorchFunction():  # which would ask for Tensor.type, and that is this
        if dtype is not None:
            return torch._C.TensorBase.type(self, dtype, *args, **options)
        return torch._C.TensorBase.type(self).replace("torch.", "torch.cuda.")


def _to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def stand_ins() -> list[tuple[Any, str, Any]]:
    """(object, attribute, what is there instead), each with the reason why Megatron needs it."""
    cuda, random = torch.cuda, tensor_parallel.random
    return [
        # buffers, router weights and gathered tensors are made on the current device
        (cuda, "current_device", lambda: "cpu"),
        # the all-to-all dispatcher replicas its splits to the host on a side stream; DDP and shared experts have others
        (cuda, "Stream", Stream),
        (cuda, "Event", Stream),
        (cuda, "current_stream", Stream),
        (cuda, "default_stream", Stream),
        (cuda, "stream", lambda stream: contextlib.nullcontext()),
        (cuda, "synchronize", lambda device=None: None),
        # weights are drawn under named CUDA generators; here each is a state of the CPU's
        (cuda, "manual_seed", torch.manual_seed),
        (cuda, "get_rng_state", lambda device="cuda": torch.get_rng_state()),
        (cuda, "set_rng_state", lambda state, device="cuda": torch.set_rng_state(state)),
        (random, "_get_cuda_rng_state", lambda *args, **options: torch.get_rng_state()),
        (random, "_set_cuda_rng_state", lambda state, *args, **options: torch.set_rng_state(state)),
        # memory is reported on and freed
        (cuda, "empty_cache", lambda: None),
        (cuda, "memory_allocated", lambda device=None: 0),
        (cuda, "max_memory_allocated", lambda device=None: 0),
        # models and losses are moved by name
        (Tensor, "cuda", lambda self, *args, **options: self),
        (nn.Module, "cuda", lambda self, device=None: self),
        # the optimizer takes parameters whose type is torch.cuda.FloatTensor and the like, no others
        (Tensor, "type", _type),
        # splits come to the host as numpy arrays from a GPU alone, and what reads them counts on that
        (token_dispatcher, "maybe_move_tensor_to_cpu", _to_host),
        (moe_utils, "maybe_move_tensor_to_cpu", _to_host),
        # results of saving come through a process that would outlive the rank
        (filesystem_async, "_results_queue", Queue()),
        # 0.16 asks for TransformerEngine's product by a name that it has only with TransformerEngine
        *([] if hasattr(moe_utils, "te_general_gemm") else [(moe_utils, "te_general_gemm", None)]),
    ]


@contextlib.contextmanager
def cuda_stood_in() -> Iterator[None]:
    """All stand-ins, put back at the end."""
    with contextlib.ExitStack() as stack:
        for thing, name, instead in stand_ins():
            stack.enter_context(patch.object(thing, name, instead, create=True))
        stack.enter_context(OnCpu())
        yield


def built(spec: Any, **options: Any) -> Any:
    """The module of a spec: a `ModuleSpec`, or what is called from 0.18 on. Its groups are those of this rank."""
    groups = process_groups_config.ProcessGroupCollection.use_mpu_process_groups()
    build = partial(spec_utils.build_module, spec) if isinstance(spec, spec_utils.ModuleSpec) else spec
    return build(pg_collection=groups, **options)


def judged(
    implementation: str, topologies: Sequence[str], patterns: Sequence[str], dtypes: Sequence[str] = ("float32",), *,
    deadline: float = 30.0,
) -> list[Verdict]:  # fmt: skip
    """Verdicts on a class of `peers.megatron_impl`, on ranks where CUDA is stood in for. `deadline`: of each case."""
    cases = [
        Case(topology=topology_named(topology), pattern=pattern_named(pattern), dtype=dtype, seed=0)
        for topology in topologies
        for dtype in dtypes
        for pattern in patterns
    ]
    return list(run_local(cases, f"peers.megatron_impl:{implementation}", deadline=deadline, around=cuda_stood_in))


def megatron_ranks(fn: Callable[..., Any], world: int, *args: Any, deadline: float = 90.0, **sizes: int) -> list[Any]:
    """`fn(*args)` on each of `world` ranks over Gloo, model parallelism of these sizes begun; what each returned, by
    rank.

    `fn` is a module-level function; `parallel_state` and `ProcessGroupCollection.use_mpu_process_groups()` of Megatron
    have the groups. AssertionError with the tracebacks where a rank fails or time runs out.
    """
    return run_ranks(_on_rank, world, sizes, fn, args, deadline=deadline)


def _on_rank(sizes: dict[str, int], fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    with cuda_stood_in(), model_parallel(**sizes):
        return fn(*args)


@contextlib.contextmanager
def model_parallel(
    *, tp: int = 1, pp: int = 1, ep: int = 1, etp: int = 1, cp: int = 1, seed: int = 1
) -> Iterator[None]:
    """Megatron's groups and generators over the world's ranks. Collective. Ends them, for another to begin."""
    options: dict[str, Any] = {"create_gloo_process_groups": False}
    known = inspect.signature(parallel_state.initialize_model_parallel).parameters
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, context_parallel_size=cp,
        expert_model_parallel_size=ep, expert_tensor_parallel_size=etp,
        **{name: value for name, value in options.items() if name in known},
    )  # fmt: skip
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
