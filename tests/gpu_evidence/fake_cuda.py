"""Counts on fake CUDA tensors what a path would launch on a GPU and where its host would wait, without a GPU.

Operators of trimtab are opened, so that the counter sees what they call. A launch is a call of ATen that is no view and
makes or changes tensors on the device, or a kernel of Triton, which is noted instead of run; a wait is a read of
values, a mask as an index, or a copy to or from pageable memory.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trimtab import AllToAll, Dispatcher, ExpertMLP, GroupedLinear, MoEConfig, RouterConfig
from trimtab.dispatch import facts
from trimtab.dispatch.facts import CallId
from trimtab.dispatch.options import ReplicationConfig
from trimtab.dispatch.replica_route import ReplicaPlanner
from trimtab.dispatch.transport import layer_frame
from trimtab.experts.plan import plan_for
from trimtab.experts.recipes import MXFP8, NVFP4, FP8Blockwise
from trimtab.kernels import choose
from trimtab.kernels.choose import KernelChoice
from trimtab.operators import KERNELS
from trimtab.parallel.ddp import _ExpertReducer

T, D, F, E, K, P = 4096, 2048, 768, 128, 8, 8
SENT = [T]
READS = {"_local_scalar_dense", "item", "equal", "nonzero", "is_nonzero", "masked_select", "_unique2", "bincount"}
VIEWS = {
    "view", "_unsafe_view", "reshape", "expand", "slice", "select", "transpose", "t", "permute", "unsqueeze", "squeeze",
    "detach", "alias", "as_strided", "split", "split_with_sizes", "unbind", "diagonal", "_reshape_alias", "unflatten",
    "flatten", "narrow", "view_as", "lift_fresh", "chunk", "movedim", "set_", "resize_",
    "empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided",
}  # fmt: skip
"""They launch nothing."""


def place() -> str:
    """The line of trimtab that is at work."""
    frame: Any = inspect.currentframe()
    while frame is not None:
        if "/src/trimtab/" in frame.f_code.co_filename:
            return f"{frame.f_code.co_filename.split('/trimtab/')[-1]}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


class Watch(TorchDispatchMode):
    """Counts launches by name, and waits with the line that has each."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: Counter[str] = Counter()
        self.waits: list[str] = []
        self.lines: Counter[str] = Counter()
        self.recording = False
        self.collectives: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in KERNELS:
            with self:
                return KERNELS[func](*args, **kwargs)
        if func.namespace == "prim":
            return func(*args, **kwargs)
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            with self:  # inside of an operator others come as they were called
                return func.decompose(*args, **kwargs)
        name = func._schema.name.split("::")[-1]
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        on_device = any(t.device.type == "cuda" for t in given)
        masks = name.lstrip("_").startswith("index") and any(
            t.dtype == torch.bool for t in tree_leaves(args[1:2]) if isinstance(t, Tensor)
        )
        if on_device and (name in READS or masks or (name == "_grouped_mm" and given[0].dtype != torch.bfloat16)):
            self.waits.append(f"{name} {place()}")
        out = func(*args, **kwargs)
        made = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        if name in ("_to_copy", "copy_"):
            source, target = (args[0], made[0]) if name == "_to_copy" else (args[1], args[0])
            later = kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2])
            if {source.device.type, target.device.type} == {"cpu", "cuda"} and not later:
                self.waits.append(f"{name} {source.device.type}->{target.device.type} {place()}")
        if func.namespace == "c10d":
            self.collectives.append(f"{name} " + " <- ".join(f"{t.dtype} {list(t.shape)}" for t in given))
        if name not in VIEWS and (on_device or any(t.device.type == "cuda" for t in made)):
            self.launched(name)
        return out

    def kernel(self, kernel: Any, args: Any, options: Any) -> None:
        """A launch of Triton's."""
        self.launched(f"triton {kernel.__name__}")

    def launched(self, name: str) -> None:
        if self.recording:
            return
        self.launches[name] += 1
        self.lines[f"{name} {place()}"] += 1


@contextmanager
def fake_cuda(watch: Watch) -> Iterator[None]:
    """Within, `watch` sees what runs on fake CUDA tensors, which trimtab takes for real ones."""
    for module in [m for name, m in sys.modules.items() if name.startswith("trimtab") and hasattr(m, "no_values")]:
        module.no_values = lambda device: False  # type: ignore[attr-defined]
    KernelChoice._choose = lambda self, device, dtype: choose.get_backend(  # type: ignore[method-assign, assignment]
        self.candidates[0], device
    )
    torch.cuda.device_of = nullcontext  # type: ignore[assignment, misc]
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(  # type: ignore[assignment]
        major=9, minor=0, multi_processor_count=132
    )
    if sys.modules.get("triton", "") is not None and importlib.util.find_spec("triton"):
        from triton.runtime.jit import JITFunction

        JITFunction.run = lambda self, *args, **kwargs: watch.kernel(self, args, kwargs)
    torch.cuda.CUDAGraph = partial(Graph, watch)  # type: ignore[assignment, misc]
    torch.cuda.Stream = torch.cuda.Event = Idle  # type: ignore[assignment, misc]
    torch.cuda.current_stream = torch.accelerator.current_stream = Idle  # type: ignore[assignment]
    torch.cuda.stream = nullcontext  # type: ignore[assignment, misc]
    made = torch.tensor

    def tensor(data: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Numbers of the host on a device: a copy that no mode sees."""
        if torch.device(kwargs.get("device") or "cpu").type == "cuda":
            watch.waits.append(f"torch.tensor {place()}")
        return made(data, *args, **kwargs)

    torch.tensor = tensor
    FakeTensor.tolist = lambda self: values(self, watch)  # type: ignore[method-assign, assignment]
    yield


class Idle:
    """In place of torch.cuda's streams and events, whose order nothing here depends on."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device = torch.device("cuda", 0)

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record(self, stream: Any = None) -> None: ...

    def record_event(self) -> Idle:
        return self

    def query(self) -> bool:
        return True


class Graph:
    """In place of torch.cuda.CUDAGraph: what is recorded launches nothing and may not wait; a replay is one launch."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch

    def capture_begin(self, **options: Any) -> None:
        self.watch.recording, self.waits = True, len(self.watch.waits)

    def capture_end(self) -> None:
        self.watch.recording = False
        assert len(self.watch.waits) == self.waits, f"a capture fails at {self.watch.waits[self.waits :]}"

    def replay(self) -> None:
        self.watch.launched("graph")


def values(t: Tensor, watch: Watch) -> Any:
    """What the host reads: of the device the handshake alone, where each of T tokens is sent to two ranks, and so is
    each of this rank's `SENT[-1]`."""
    if t.dim() == 1:  # a layer's name
        return [0] * t.numel()
    watch.waits.append(f"tolist {place()}")
    sent, received = ([0] * facts.COLUMNS + [T * K // E] * (t.shape[2] - facts.COLUMNS) for _ in range(2))
    for row, tokens in ((sent, SENT[-1]), (received, T)):
        row[facts.ROWS], row[facts.SLOTS], row[facts.TOKENS], row[facts.GRAD] = 2 * tokens // P, tokens * K // P, T, 1
    return [[sent] * t.shape[1], [received] * t.shape[1]]


def rows(count: int = T, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(count, D, dtype=dtype, device="cuda", requires_grad=True)


def slots(count: int = T, top_k: int = K) -> tuple[Tensor, Tensor]:
    """Ids and weights."""
    ids = torch.empty(count, top_k, dtype=torch.int64, device="cuda")
    return ids, torch.empty(count, top_k, device="cuda", requires_grad=True)


def experts(count: int = E, **more: Any) -> ExpertMLP:
    return ExpertMLP(count, D, F, dtype=torch.bfloat16, device="cuda", **more)


Steps = dict[str, Callable[[], Any]]


def both(forward: Callable[[], Tensor]) -> Steps:
    """And the backward of what it gives."""
    found: dict[str, Tensor] = {}

    def backward() -> None:
        found["y"].backward(torch.empty_like(found["y"]))

    return {"forward": lambda: found.update(y=forward()), "backward": backward}


def expert_mlp(**more: Any) -> Steps:
    module, x, (ids, w) = experts(**more), rows(), slots()
    return both(lambda: module(x, ids, w))


def router(**more: Any) -> Steps:
    module = RouterConfig(num_experts=E, top_k=K, **more).build(D, device="cuda")
    x = rows()
    return {"forward": lambda: module(x)}


def layer() -> Steps:
    router = RouterConfig(num_experts=E, top_k=K)
    moe, x = MoEConfig(dim=D, hidden=F, dtype=torch.bfloat16, device="cuda", router=router).build(), rows()
    return both(lambda: moe(x).y)


def megatron() -> Steps:
    """The exchange of Megatron's own experts, which split rows on the host."""
    import torch.distributed as dist

    from trimtab.dispatch.options import ExchangeOptions
    from trimtab.integrations.megatron.dispatcher import TokenDispatcher

    config = SimpleNamespace(num_moe_experts=E, moe_ffn_hidden_size=F, moe_router_topk=K)
    groups = SimpleNamespace(ep=fake_group(), expt_tp=dist.new_group([0]), tp_ep=fake_group())
    dispatcher = TokenDispatcher(config, groups, takes_rows=False, options=ExchangeOptions())
    x, (ids, w) = rows(), slots()
    facts.compare = lambda *args: None  # nobody else is there

    def forward() -> Tensor:
        sent = dispatcher.token_dispatch(*dispatcher.dispatch_preprocess(x, ids, w))
        rows_RH, sizes_e, probs_R = dispatcher.dispatch_postprocess(*sent)
        assert (sizes_e.device.type, rows_RH.shape[0]) == ("cpu", T * K)
        home = dispatcher.token_combine(dispatcher.combine_preprocess((rows_RH * probs_R[:, None]).bfloat16()))
        return dispatcher.combine_postprocess(home)

    return both(forward)


def fake_group() -> Any:
    """Its collectives return what was in their results' memory."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if not dist.is_initialized():
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=P)
    return dist.group.WORLD


def all_to_all(tokens: int = T, guard: bool = False, kernels: str = "auto", **more: Any) -> Steps:
    """In a call that is not the first."""
    transport = AllToAll(fake_group(), guard=guard)
    if transport.guard is not None:
        transport.guard.waits, transport.guard._first = True, False
    dispatcher = Dispatcher(E, transport, **more)
    module, x, (ids, w) = experts(E // P, kernels=kernels), rows(tokens), slots(tokens)
    SENT.append(tokens)
    dispatcher.calls = 1
    facts.compare = lambda *args: None  # nobody else is there

    def forward() -> Tensor:
        sent = dispatcher.dispatch(x, ids, w)
        return dispatcher.combine(module(sent.x_MD, sent.ids_MK, sent.weights_MK, **sent.known), sent)

    forward()
    return both(forward)


def plan() -> Steps:
    ids = slots()[0]
    kernels = KernelChoice("auto").on(ids.device, torch.bfloat16)
    return {"forward": lambda: plan_for(ids, E, None, kernels)}


def replicas() -> Steps:
    """The plan of replicated experts and where each slot goes, in a call that is not the first."""
    ids, call = slots()[0], CallId(layer="", number=1, experts=E, top_k=K, width=D, fingerprint="")
    transport = AllToAll(fake_group(), guard=False)
    planner = ReplicaPlanner(ReplicationConfig(copy_cost=512), E, transport, None, layer_frame(""))
    planner.place(ids, call)
    return {"forward": lambda: planner.place(ids, call)}


def ddp_flags() -> Steps:
    """The end of a backward under DDP with find_unused_parameters, of a rank that used all."""
    module = experts(P)
    reducer = _ExpertReducer(fake_group(), [], list(module.parameters()), [], [])
    for param in module.parameters():
        param.grad = torch.empty_like(param)
    return {"forward": reducer._reduce}


def linear() -> Steps:
    module, x = GroupedLinear(P, D, F, dtype=torch.bfloat16, device="cuda"), rows()
    sizes = torch.empty(P, dtype=torch.int64, device="cuda")
    return both(lambda: module(x, sizes))


DEEPSEEK = {"score": "sigmoid", "groups": 8, "top_groups": 4, "bias": True, "normalize": True, "scale": 2.5}
CASES: dict[str, Callable[[], Steps]] = {
    "experts": expert_mlp, "experts, triton": lambda: expert_mlp(kernels="triton"),
    "experts, bias": lambda: expert_mlp(bias=True), "experts, geglu": lambda: expert_mlp(activation="geglu"),
    "experts, blockwise": lambda: expert_mlp(recipe=FP8Blockwise(backend="emulated"), kernels="triton"),
    "experts, mxfp8": lambda: expert_mlp(recipe=MXFP8(backend="emulated"), kernels="triton"),
    "experts, nvfp4": lambda: expert_mlp(recipe=NVFP4(backend="emulated"), kernels="triton"), "router": router,
    "router, groups": lambda: router(**DEEPSEEK), "plan": plan, "replicas": replicas, "layer": layer,
    "all-to-all": all_to_all, "all-to-all, triton": lambda: all_to_all(kernels="triton"),
    "all-to-all, guarded": lambda: all_to_all(guard=True),
    "all-to-all, replicas": lambda: all_to_all(replication=ReplicationConfig(copy_cost=512)),
    "all-to-all, ordered": lambda: all_to_all(combine="ordered"),
    "all-to-all, few tokens": lambda: all_to_all(tokens=36), "all-to-all, no tokens": lambda: all_to_all(tokens=0),
    "linear": linear, "ddp, flags": ddp_flags, "megatron": megatron,
}  # fmt: skip


def counted(case: str) -> dict[str, Any]:
    """Launches, their names and lines, and waits of each step of a case."""
    watch, found = Watch(), {}
    with FakeTensorMode(allow_non_fake_inputs=True), fake_cuda(watch), watch:
        for step, run in CASES[case]().items():
            watch.launches.clear(), watch.waits.clear(), watch.lines.clear(), watch.collectives.clear()
            run()
            found[step] = {
                "launches": sum(watch.launches.values()), "names": dict(watch.launches), "waits": list(watch.waits),
                "lines": dict(watch.lines), "collectives": list(watch.collectives),
            }  # fmt: skip
    return found
