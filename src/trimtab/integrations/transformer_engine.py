"""`GroupedLinear` by the names of TransformerEngine's, which need not be installed.

Legend: R rows, G groups ("gemms").
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import Function

from trimtab.autograd import forward_of, once_differentiable
from trimtab.errors import ConfigError, InputError
from trimtab.experts.linear import GroupedLinear as Grouped
from trimtab.experts.segments import GroupSizes
from trimtab.kernels.choose import KernelChoice
from trimtab.validation import check_flags

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from trimtab.experts.recipes.base import Recipe


class GroupedLinear(Grouped):
    """y = x W_g^T + b_g, g the group of the row, with the arguments, attributes and methods of TransformerEngine's.

    What differs: a group, or all of them, may be without rows; rows behind the splits may hold anything, their output
    is zero, and so is their gradient; it runs on a CPU, in float64 too; single parameters need no environment variable;
    delayed gradients add up over microbatches.

    Args:
        num_gemms: G, the weights, one for each group of rows.
        in_features: of the whole layer; `parallel_mode` "row" divides it by the size of the tensor-parallel group.
        out_features: of the whole layer; "column" divides it so. Nothing is communicated here.
        sequence_parallel: noted at the biases of "row".
        fuse_wgrad_accumulation: weight gradients are added to `weight.main_grad`. A weight with the attribute
            `grad_added_to_main_grad` gets True there and a gradient of unset memory (zeros with `zero_out_wgrad`),
            others get none. A true `overwrite_main_grad` overwrites.
        tp_group: the tensor-parallel group, of which only the size is used.
        tp_size: the same size, where no group is given.
        get_rng_state_tracker: gives the tracker in whose `fork` each weight is drawn.
        rng_tracker_name: the name that `fork` is given.
        init_method: draws one weight in place, by default from N(0, 0.023). Biases begin at 0.
        bias: whether each group has one.
        return_bias: whether biases come back beside the output in place of being added: a list of G, or the one
            parameter.
        params_dtype: of the parameters; torch's default one if not given.
        parallel_mode: None; "column" or "row" for a layer that is cut over out_features or in_features.
        device: by default "cuda" where there is one, else "cpu".
        delay_wgrad_compute: weight and bias gradients are computed by `backward_dw()`, not by the backward. Parameters
            are not marked `skip_backward_post_hook`, since autograd delivers these gradients as well.
        single_grouped_weight: one parameter `weight` [G, out, in] in place of `weight0` .. ; state dicts of either form
            load into either.
        single_grouped_bias: one parameter `bias` [G, out] in place of `bias0` .. , as well.
        ub_overlap_rs, ub_overlap_ag: Userbuffers, which are not there: False.
        ub_name, save_original_input, use_grouped_tensor, name: kept as an attribute, and not used.
        recipe, kernels: as of `trimtab.GroupedLinear`.

    Raises:
        ConfigError (a ValueError): sizes or options that do not fit together, a bias with a tensor-parallel group of
            more than one, Userbuffers, FP8 parameters.
    """

    def __init__(
        self, num_gemms: int, in_features: int, out_features: int, sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False, tp_group: ProcessGroup | None = None, tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None, rng_tracker_name: str | None = None,
        init_method: Callable[[Tensor], Any] | None = None, bias: bool = True, return_bias: bool = False,
        params_dtype: torch.dtype | None = None, parallel_mode: str | None = None,
        device: torch.device | str | int | None = None, ub_overlap_rs: bool = False, ub_overlap_ag: bool = False,
        ub_name: str | None = None, delay_wgrad_compute: bool = False, save_original_input: bool = False,
        single_grouped_weight: bool = False, single_grouped_bias: bool = False, name: str | None = None,
        use_grouped_tensor: bool | None = None, *, recipe: Recipe | None = None, kernels: KernelChoice | str = "auto",
    ) -> None:  # fmt: skip
        check_flags(
            fuse_wgrad_accumulation=fuse_wgrad_accumulation, return_bias=return_bias,
            single_grouped_weight=single_grouped_weight, single_grouped_bias=single_grouped_bias,
        )  # fmt: skip
        if ub_overlap_rs or ub_overlap_ag:
            raise ConfigError("ub_overlap_rs and ub_overlap_ag are not for a grouped linear layer")
        self.tp_size = tp_size if tp_group is None else torch.distributed.get_world_size(tp_group)
        self.single_grouped_weight, self.single_grouped_bias = single_grouped_weight, single_grouped_bias
        self.parallel_mode, self.return_bias, self.apply_bias = parallel_mode, return_bias, bias and not return_bias
        self.init_method, self.rng_tracker_name = init_method, rng_tracker_name
        self.get_rng_state_tracker = get_rng_state_tracker
        if self.tp_size > 1 and bias:
            raise ConfigError(f"bias=True with tp_size={self.tp_size}: each rank's sum would add it once more")
        if _fp8("with_fp8_parameters"):
            raise ConfigError("built under TransformerEngine's quantized_model_init: parameters are not kept in FP8")
        super().__init__(
            num_gemms, _share(in_features, self.tp_size, parallel_mode, "row"),
            _share(out_features, self.tp_size, parallel_mode, "column"), bias=bias,
            dtype=torch.get_default_dtype() if params_dtype is None else params_dtype,
            device=("cuda" if torch.cuda.is_available() else "cpu") if device is None else device,
            single_parameter=single_grouped_weight, delay_wgrad=delay_wgrad_compute, recipe=recipe, kernels=kernels,
        )  # fmt: skip
        self.num_gemms, self.use_bias, self.params_dtype, self.name = num_gemms, bias, self.weights[0].dtype, name
        self.fuse_wgrad_accumulation, self.delay_wgrad_compute = fuse_wgrad_accumulation, delay_wgrad_compute
        self.sequence_parallel = self.tp_size > 1 and sequence_parallel
        self.save_original_input, self.use_grouped_tensor = save_original_input, use_grouped_tensor
        self.ub_overlap_rs, self.ub_overlap_ag, self.ub_name = ub_overlap_rs, ub_overlap_ag, ub_name
        self.tp_group, self.main_grad = tp_group, "te" if fuse_wgrad_accumulation else "off"
        self.wgrad_accumulation_and_reduce_hooks: list[Callable[[], Any]] = []
        for weight in self.weights:
            _mark(weight, tensor_model_parallel=True, partition_dim=int(parallel_mode == "row"), partition_stride=1)
        for one in self._params("bias") if bias and parallel_mode else ():
            if parallel_mode == "row":
                _mark(one, sequence_parallel=self.sequence_parallel)
            else:
                _mark(one, tensor_model_parallel=True, partition_dim=0, partition_stride=1)

    def _stacked(self, name: str) -> bool:
        return self.single_grouped_weight if name == "weight" else self.single_grouped_bias

    @property
    def biases(self) -> tuple[Tensor, ...]:
        """Those that the product adds."""
        return self._params("bias") if self.apply_bias else ()

    @torch.no_grad()
    def reset_parameters(self, defer_init: bool = False) -> None:
        """Draws each group's weight by `init_method` and zeroes the biases; with `defer_init` it does nothing."""
        if defer_init:
            return
        stacked = self._stacked("weight")
        for weight in self.weights[0].unbind() if stacked else self.weights:
            tracker = self.get_rng_state_tracker
            name = (self.rng_tracker_name,) if self.rng_tracker_name else ()
            with nullcontext() if tracker is None else tracker().fork(*name):
                if self.init_method is None:
                    nn.init.normal_(weight, mean=0.0, std=0.023)
                else:
                    self.init_method(weight)
        for bias in self._params("bias") if self.has_bias else ():
            bias.zero_()

    def forward(  # type: ignore[override]
        self, inp: Tensor, m_splits: GroupSizes, is_first_microbatch: bool | None = None, out: Tensor | None = None,
        dgrad_out: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor | list[Tensor]]:  # fmt: skip
        """[..., out_features] in inp's dtype or autocast's; with `return_bias` the biases beside it.

        Args:
            inp: [..., in_features], R rows in all, R >= 0, grouped.
            m_splits: rows of each group: G of them, a list, a CPU tensor, or one on inp's device, which the host does
                not read.
            is_first_microbatch: True overwrites `main_grad` in place of adding to it.
            out: [R, out_features], contiguous, in the output's dtype, without a gradient: the output is copied there,
                and what comes back is this tensor. Its rows behind the splits stay as they are.
            dgrad_out: [R, in_features], the same for the gradient of inp.

        Raises:
            InputError (a ValueError): shapes, dtypes, devices or sums that do not fit.
            ConfigError: under TransformerEngine's FP8 autocast without a `recipe`.
        """
        if self.recipe is None and _fp8("is_fp8_enabled"):
            raise ConfigError(
                "TransformerEngine's FP8 autocast chooses no recipe here: GroupedLinear(recipe=) takes one of "
                "trimtab.experts.recipes",
                phase="experts",
            )
        kind, lead = inp.device.type, inp.shape[:-1]
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else inp.dtype
        x = inp.reshape(-1, inp.shape[-1])
        if dgrad_out is not None:
            _check_buffer("dgrad_out", dgrad_out, x)
            x = forward_of(_GradientInto, x, dgrad_out, _held(m_splits, x))
        if self.fuse_wgrad_accumulation:
            self.main_grad = "te_first" if is_first_microbatch else "te"
        y = super().forward(x.to(dtype), m_splits)
        if out is not None:
            _check_buffer("out", out, y)
            y = out.copy_(torch.where(_held(m_splits, y), y, out))
        y = y.view(*lead, self.out_features)
        if not self.return_bias:
            return y
        each = self._params("bias") if self.use_bias else [y.new_empty(0)] * self.num_gemms
        return y, each[0] if self.use_bias and self.single_grouped_bias else [bias.to(dtype) for bias in each]

    def need_backward_dw(self) -> bool:
        """Whether `backward_dw()` has something to do after a backward."""
        return self.delay_wgrad

    def backward_dw(self) -> None:
        """Weight and bias gradients of the oldest backward that has not had them yet; hooks fire now.

        Does nothing without `delay_wgrad_compute` or without such a backward.
        """
        if self.delay_wgrad and self._delayed:
            super().backward_dw()
            for hook in self.wgrad_accumulation_and_reduce_hooks:
                hook()

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], Any]) -> None:
        """`hook()` is called at the end of each `backward_dw()` that computed gradients."""
        self.wgrad_accumulation_and_reduce_hooks.append(hook)

    def get_extra_state(self) -> Tensor:
        """Empty, as TransformerEngine's without FP8."""
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        """Scales of another's FP8 are left out."""

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        state_dict.setdefault(f"{prefix}_extra_state", self.get_extra_state())
        for i in range(self.num_gemms):
            state_dict.pop(f"{prefix}_extra_state{i}", None)  # one of each group, of Megatron's sharded checkpoints
        super()._load_from_state_dict(state_dict, prefix, *args)


class _GradientInto(Function):
    """The same rows; their gradient goes through a buffer of the caller's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, buffer: Tensor, held_R1: Tensor) -> Tensor:
        ctx.buffer, ctx.held_R1 = buffer, held_R1
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None, None]:
        return ctx.buffer.copy_(torch.where(ctx.held_R1, dx, ctx.buffer)), None, None


def _held(m_splits: GroupSizes, rows: Tensor) -> Tensor:
    """Which rows [R, 1] lie before the end of the splits."""
    held = torch.as_tensor(m_splits).sum().to(rows.device)
    return torch.arange(rows.shape[0], device=rows.device)[:, None] < held


def _check_buffer(name: str, buffer: Tensor, like: Tensor) -> None:
    fits = (buffer.shape, buffer.dtype, buffer.device) == (like.shape, like.dtype, like.device)
    if not fits or not buffer.is_contiguous() or buffer.requires_grad:
        wanted = f"{tuple(like.shape)} {like.dtype} on {like.device}, contiguous, without a gradient"
        found = f"{tuple(buffer.shape)} {buffer.dtype} on {buffer.device}"
        raise InputError(f"{name} is {found}, expected {wanted}", phase="experts")


def _share(features: int, tp_size: int, mode: str | None, divided: str) -> int:
    if mode not in (None, "column", "row"):
        raise ConfigError(f"parallel_mode={mode!r} is none of None, 'column', 'row'")
    if mode != divided:
        return features
    if features % tp_size:
        raise ConfigError(f"{features} features do not divide by tp_size={tp_size} for parallel_mode={mode!r}")
    return features // tp_size


def _mark(param: Tensor, **flags: Any) -> None:
    for name, flag in flags.items():
        setattr(param, name, flag)


def _fp8(question: str) -> bool:
    """What TransformerEngine says of FP8, if it was imported."""
    for name in ("quantization", "fp8"):
        module: Any = sys.modules.get(f"transformer_engine.pytorch.{name}")
        if hasattr(module, "FP8GlobalStateManager"):
            return bool(getattr(module.FP8GlobalStateManager, question)())
    return False
