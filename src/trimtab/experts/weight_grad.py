"""Where the gradients of parameters go, once per microbatch: to autograd or into `param.main_grad`; now or later.

    mode        the buffer is      kernels then     close() gives autograd       and sets
    off         a new buffer       overwrite it     that buffer
    accumulate  param.main_grad    add to it        a dummy of the full shape    param.grad_added_to_main_grad = True
    overwrite   param.main_grad    overwrite it     a dummy of the full shape    param.grad_added_to_main_grad = True
    te          param.main_grad    add to it        as accumulate if the parameter has the attribute, else nothing
    te_first    param.main_grad    overwrite it     the same

The attribute names are Megatron-LM's. The dummy fires autograd's post-accumulate hooks as a real gradient would; its
memory is not set, but zeros if the parameter has a true `zero_out_wgrad`. A true `overwrite_main_grad` on the parameter
turns accumulate into overwrite for it; Megatron's FSDP makes the buffer when it is asked for. For an expert without
tokens the kernels write zeros, or add none.

`accumulate` counts a parameter used twice in one graph twice; `overwrite` would keep the last use. A backward that asks
for the gradient of the input alone writes nothing; delayed gradients wait for a `backward_dw()` of their own after any
backward. "te" is what TransformerEngine does, for `trimtab.integrations.transformer_engine` alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from trimtab.autograd import without_autocast
from trimtab.errors import ConfigError, InputError
from trimtab.experts.weight import Form
from trimtab.kernels.tensor_checks import ReadOn
from trimtab.validation import holds_values

MainGradMode = Literal["off", "accumulate", "overwrite", "te", "te_first"]
MODES = ("off", "accumulate", "overwrite")
MAIN_GRAD_NAMES = ("main_grad", "overwrite_main_grad", "zero_out_wgrad")
"""What a view that stands for a parameter must have of it."""

WgradJob = Callable[[], list[tuple[Tensor, Tensor]]]
"""Gives the parameters that want a gradient, each with what autograd gets for it."""

Defer = Callable[[WgradJob, Sequence[Tensor]], None]
"""Takes such a job, and the tensors of others that it will read."""


@dataclass(slots=True)
class GradSink:
    """main_grad: where the gradients of values go, see above; all others' are ordinary. defer: takes the work of all of
    them at each backward, as `DelayedGradients.add`.

    Raises:
        ConfigError: no such mode.
    """

    main_grad: MainGradMode = "off"
    defer: Defer | None = None
    ordinary: bool = field(init=False)

    def __post_init__(self) -> None:
        if self.main_grad not in get_args(MainGradMode):
            raise ConfigError(f"main_grad={self.main_grad!r} is not one of {get_args(MainGradMode)}", phase="experts")
        self.ordinary = self.main_grad == "off" and self.defer is None


ORDINARY = GradSink()


class WeightGradient:
    """One parameter's gradient of one microbatch.

    Args:
        param: the parameter. A frozen one counts as "off"; its gradient is the caller's to drop.
        mode: see the table above.
        name: what error messages call it.
        empty_like: makes the buffer where there is no `main_grad`.

    `buffer` is the tensor that the kernels write, of the parameter's shape: added to if `adds`, overwritten if not.
    `silent`: autograd is to get nothing.

    Raises:
        InputError: the mode needs a `main_grad` and the parameter has none of its shape, on its device, floating,
            with a place for each element.
    """

    def __init__(
        self, param: Tensor, mode: MainGradMode, name: str, empty_like: Callable[[Tensor], Tensor] = torch.empty_like
    ) -> None:
        self.param, self.name = param, name
        self.fused = mode != "off" and param.requires_grad
        self.silent = self.fused and mode in ("te", "te_first") and not hasattr(param, "grad_added_to_main_grad")
        self.adds = self.fused and mode in ("accumulate", "te") and not getattr(param, "overwrite_main_grad", False)
        self.buffer = self._main_grad() if self.fused else empty_like(param)

    def close(self) -> Tensor:
        """What autograd gets once the buffer is written: full shape, the parameter's dtype."""
        if not self.fused:
            return self.buffer
        self.param.grad_added_to_main_grad = True  # type: ignore[attr-defined]
        zeros = getattr(self.param, "zero_out_wgrad", False) or torch.is_anomaly_enabled()  # which looks for NaN
        return torch.zeros_like(self.param) if zeros else torch.empty_like(self.param)

    def _main_grad(self) -> Tensor:
        param = self.param
        if hasattr(param, "__fsdp_param__"):
            param.main_grad = param.get_main_grad()  # type: ignore[attr-defined]
        main_grad = getattr(param, "main_grad", None)
        found = main_grad
        if isinstance(main_grad, Tensor):
            fits = main_grad.shape == param.shape and main_grad.device == param.device
            strides = zip(main_grad.stride(), main_grad.shape, strict=True)
            expanded = any(stride == 0 and size > 1 for stride, size in strides)
            if fits and holds_values(main_grad.dtype) and not expanded:
                return main_grad
            found = f"{tuple(main_grad.shape)} {main_grad.dtype} on {main_grad.device}{', expanded' * expanded}"
        raise InputError(
            f"{self.name}.main_grad is {found}, expected a floating tensor {tuple(param.shape)} on {param.device}: "
            "main_grad='accumulate' and 'overwrite' write there. Set it before the backward or use 'off', as for a "
            "parametrized weight, which is a new tensor at each use",
            phase="experts",
        )


class FactorGradient:
    """The gradient of a low-rank factor: made contiguous in float32 at least, given to autograd as the factor lies."""

    adds = silent = False

    def __init__(self, param: Tensor, empty_like: Callable[..., Tensor]) -> None:
        like = param if param.is_contiguous() else param.new_empty(()).expand(param.shape)
        wide = torch.float32 if param.dtype.itemsize < 4 else param.dtype
        self.param, self.buffer = param, empty_like(like, dtype=wide)

    def close(self) -> Tensor:
        value = self.buffer.to(self.param.dtype)
        if self.param.is_contiguous():
            return value
        from trimtab.experts.lora import lying_as

        return lying_as(value, self.param)


class Gradients:
    """Of one microbatch's tensors; those with a `main_grad` themselves. kinds: see `kinds_of`. wanted: which of them
    get one. main_grad: where those of values go. empty_like: makes a buffer."""

    def __init__(
        self, params: Sequence[Tensor], kinds: Sequence[tuple[str, str]], wanted: Sequence[bool],
        main_grad: MainGradMode, empty_like: Callable[..., Tensor],
    ) -> None:  # fmt: skip
        self.each: list[Any] = []
        for param, (kind, name), want in zip(params, kinds, wanted, strict=True):
            if not want:
                self.each.append(None)
            elif kind == "factor":
                self.each.append(FactorGradient(param, empty_like))
            else:
                mode = main_grad if kind == "value" else "off"
                self.each.append(WeightGradient(param, mode, name, empty_like))

    def buffers(self) -> tuple[list[Tensor], list[bool], list[bool]]:
        """As an operator takes them: those that are written, which of all these are, and which are added to."""
        found = [gradient for gradient in self.each if gradient is not None]
        return [g.buffer for g in found], [g is not None for g in self.each], [g.adds for g in found]

    def close(self) -> list[Tensor | None]:
        """What autograd gets for each, once the buffers are written."""
        return [None if g is None or g.silent else g.close() for g in self.each]

    def deliver(self) -> list[tuple[Tensor, Tensor]]:
        """The tensors that have one, each with what autograd gets for it."""
        return [(g.param, g.close()) for g in self.each if g is not None and not g.silent]


def kinds_of(form: str, name: str) -> list[tuple[str, str]]:
    """The kind of each of `GroupedWeight.tensors`, and what errors call it, of a weight of this form and name."""
    if form in ("0 0 0 ", "0 0 1 "):  # as nearly always: one tensor of values
        return [("value", name)]
    f = Form.read(form)
    values = [name] if f.values == 0 else [f"{name}{i}" for i in range(f.values)]
    biases = [f"{name}_bias"] if f.biases == 1 else [f"{name}_bias{i}" for i in range(f.biases)]
    found = [*(("value", own) for own in values), *(("bias", own) for own in biases)]
    found += [("scale", f"{name}_scales")] if f.format else []
    return found if f.lora is None else [*found, ("factor", f"{name}_a"), ("factor", f"{name}_b")]


class Sink:
    """Where kernels write the gradients of a weight's tensors, in the order of `GroupedWeight.tensors`.

    wanted: which are asked for. into: where those are written, None elsewhere, and everywhere as long as products wait.
    adds: whether they are added to what is there.
    """

    __slots__ = ("adds", "into", "wanted")

    def __init__(self, wanted: Sequence[bool]) -> None:
        self.wanted = wanted
        self.into: list[Tensor | None] = [None] * len(wanted)
        self.adds: list[bool] = [False] * len(wanted)

    def fill(self, out: Iterable[Tensor], adds: Iterable[bool]) -> None:
        """Take as many as are wanted from the lists of `Gradients.buffers`."""
        buffers, flags = iter(out), iter(adds)
        self.into = [next(buffers) if want else None for want in self.wanted]
        self.adds = [next(flags) if want else False for want in self.wanted]


class DelayedGradients:
    """The work that the backwards of one module left, oldest first. A copy of the module begins without any."""

    def __init__(self) -> None:
        self._jobs: deque[WgradJob] = deque()

    def __reduce__(self) -> tuple[Any, ...]:
        return DelayedGradients, ()

    def __bool__(self) -> bool:
        """Whether a backward waits."""
        return bool(self._jobs)

    def add(self, job: WgradJob, reads: Sequence[Tensor]) -> None:
        """Called by a backward. reads: the tensors of others that the job will read."""
        self._jobs.append(unchanged(job, reads))

    def run(self) -> None:
        """The gradients of the oldest backward that has not had them yet; hooks fire now.

        Raises:
            InputError: no backward is waiting; or what it is to read was changed in place since.
        """
        if not self._jobs:
            raise InputError("backward_dw() without a backward before it", phase="experts")
        job = self._jobs.popleft()
        with torch.no_grad(), without_autocast():
            found = [(param, gradient) for param, gradient in job() if param.requires_grad]
        torch.autograd.backward([param for param, _ in found], [gradient for _, gradient in found])


def unchanged(job: WgradJob, reads: Sequence[Tensor]) -> WgradJob:
    """The job, which raises InputError if a tensor that it reads was changed in place meanwhile. On a stream other than
    this backward's it waits for the backward, and keeps the memory that it reads until it has read it."""
    versions = [(t, t._version) for t in reads if not t.is_inference()]
    stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
    made = None if stream is None else stream.record_event()

    def run() -> list[tuple[Tensor, Tensor]]:
        changed = [tuple(t.shape) for t, version in versions if t._version != version]
        if changed:
            raise InputError(
                f"a tensor {changed[0]} that backward_dw() needs was changed in place since the backward: hand the "
                "layer a copy, or call backward_dw() before the buffer is used again",
                phase="experts",
            )
        if stream is None or made is None or (here := torch.cuda.current_stream(stream.device)) == stream:
            return job()
        here.wait_event(made)
        with ReadOn(here):
            return job()

    return run


def handed(tensors: Sequence[Tensor], sink: GradSink, like: Tensor) -> Sequence[Tensor]:
    """The tensors as autograd may meet them: of parameters whose gradients come later it would fire hooks now, without
    a gradient. Behind those an empty tensor, so that there is a backward even where no other input needs one."""
    if sink.defer is None:
        return tensors
    wanted = any(t.requires_grad for t in tensors)
    return [*(t.detach() for t in tensors), like.new_empty(0).requires_grad_(wanted)]
