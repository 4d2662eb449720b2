"""peft's adapters of experts (`target_parameters=`), run by trimtab: factors are handed over, no delta is built.

peft parametrizes the experts' weights for the time of a call: W + scale B A of every expert, whatever runs them. Where
our experts function runs them, its wrapper leaves the weights alone and attaches its factors to the module for that
time.

Legend: E experts, F expert hidden dim, r rank of an adapter.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from trimtab.autograd import forward_of
from trimtab.errors import BackendError, ConfigError
from trimtab.experts.lora import stack_factors
from trimtab.experts.weight import LoraFactors
from trimtab.integrations.transformers.experts import ATTACHED, is_ours
from trimtab.integrations.transformers.quantized import MARK, WEIGHTS, dequantized_shape
from trimtab.parallel.meshes import SumGradients

HOME = "peft.tuners.lora.model"
KNOWN = "0.18 to 0.21"


def teach_peft() -> None:
    """peft's wrapper of parameters hands its factors to our experts: now, or when the program imports it.

    Raises BackendError where the peft that is loaded has no such wrapper as those that are known.
    """
    if (home := sys.modules.get(HOME)) is not None:
        _teach(home)
    elif not any(isinstance(finder, _WhenImported) for finder in sys.meta_path):
        sys.meta_path.insert(0, _WhenImported())


class _WhenImported(importlib.abc.MetaPathFinder):
    """Finds what the other finders find; is gone once the module has been imported."""

    def __init__(self) -> None:
        self.asks = False

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        if name != HOME or self.asks:
            return None
        self.asks = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.asks = False
        if spec is not None and spec.loader is not None:
            execute: Any = spec.loader.exec_module

            def taught(home: ModuleType) -> None:
                execute(home)
                sys.meta_path.remove(self)
                _teach(home)

            spec.loader.exec_module = taught  # type: ignore[method-assign, assignment]
        return spec


def _teach(home: Any) -> None:
    wrapper: Any = getattr(home, "ParamWrapper", None)
    if wrapper is None:  # before 0.17: no adapters of parameters
        return
    theirs: Any = getattr(wrapper, "_activate_lora", None)
    if theirs is None:
        version = getattr(sys.modules.get("peft"), "__version__", "that is installed")
        raise BackendError(f"trimtab knows how peft {KNOWN} runs adapters of parameters; {version} does otherwise")
    if not getattr(theirs, "of_trimtab", False):
        wrapper._activate_lora = _attaching(theirs)
        wrapper.get_delta_weight = _as_the_weight_lies(wrapper.get_delta_weight)
        sizes = "_get_in_out_features"
        setattr(wrapper, sizes, _of_codes(getattr(wrapper, sizes)))
        if hasattr(home, "get_tp_plan_and_mesh"):  # since 0.21
            home.get_tp_plan_and_mesh = _but_for_parameters(home.get_tp_plan_and_mesh)
        tuner: Any = home.LoraModel
        tuner._check_merge_allowed = _refusing_codes(tuner._check_merge_allowed, wrapper)


def _but_for_parameters(theirs: Any) -> Any:
    """peft's reading of transformers' rules for tensor parallelism, and none for the experts' weights that we run.

    It would shard B or A of a weight that has a rule by `base_layer.weight`, and a module of stacked weights has none.
    """

    def rule(model: nn.Module, key: str) -> tuple[Any, Any]:
        path, _, name = key.rpartition(".")
        holder: Any = model.get_submodule(path) if name in WEIGHTS else None
        experts = holder.get_base_layer() if hasattr(holder, "get_base_layer") else holder
        return (None, None) if isinstance(experts, nn.Module) and is_ours(experts) else theirs(model, key)

    return rule


def _of_codes(theirs: Any) -> Any:
    """peft's reading of a weight's sizes, and of codes those of what they stand for."""

    def sizes(self: Any, module: nn.Module) -> tuple[int, int]:
        found, experts = theirs(self, module), self.get_base_layer()
        if not hasattr(experts, MARK) or self.parameter_name not in WEIGHTS:
            return found  # type: ignore[no-any-return]
        outs, ins = dequantized_shape(experts, self.parameter_name)
        return (ins, outs) if experts.is_transposed else (outs, ins)  # as a weight [E, ., .] has them

    return sizes


def _refusing_codes(theirs: Any, wrapper: Any) -> Any:
    """peft's check before anything is merged: into codes nothing can be."""

    def check(self: Any) -> None:
        for name, module in self.model.named_modules():
            if isinstance(module, wrapper) and hasattr(module.get_base_layer(), MARK):
                raise ConfigError(
                    f"{name}: codes take no adapter in; save it beside them, or put the weights that they stand for in "
                    "their place by trimtab.transformers.dequantize_experts(model), then merge"
                )
        theirs(self)

    return check


def _as_the_weight_lies(theirs: Any) -> Any:
    """peft's delta of a weight, which merges add to it; of one that is sharded, laid out as it is."""

    def delta(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        whole, weight = theirs(self, *args, **kwargs), self.get_param()
        if not isinstance(weight, DTensor) or isinstance(whole, DTensor):
            return whole  # type: ignore[no-any-return]
        mesh = weight.device_mesh
        alike = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
        return alike.redistribute(mesh, weight.placements)

    return delta


def _attaching(theirs: Any) -> Any:
    """peft's `_activate_lora`, and for our experts' weights what attaches the factors instead."""

    @contextmanager
    def activate(self: Any, active_adapters: list[str]) -> Iterator[None]:
        experts, name = self.get_base_layer(), self.parameter_name
        if name not in WEIGHTS or not is_ours(experts):
            with theirs(self, active_adapters):
                yield
            return
        found = [factors_of(self, adapter) for adapter in active_adapters if adapter in self.lora_A]
        attached: dict[str, LoraFactors] = experts.__dict__.setdefault(ATTACHED, {})
        if (lora := stack_factors(found)) is not None:
            attached[name] = cut_over_tensor_ranks(lora, self.get_param(), bool(experts.is_transposed))
        try:
            yield
        finally:
            attached.pop(name, None)

    activate.of_trimtab = True  # type: ignore[attr-defined]
    return activate


def factors_of(wrapper: Any, adapter: str) -> LoraFactors:
    """peft's A [E * r, in] and B [out, r * E] as a [E, r, in] and b [E, out, r], without a copy.

    Before 0.19 peft took the second dimension of any weight [E, ., .] for the input: then its A is our b.
    """
    a: Tensor = wrapper.lora_A[adapter].weight
    b: Tensor = wrapper.lora_B[adapter].weight
    experts = wrapper.num_experts
    a, b = a.view(experts, -1, a.shape[1]), b.view(b.shape[0], -1, experts).permute(2, 0, 1)
    last_is_input = bool(getattr(wrapper, "_did_swap_in_out_features", False))
    if last_is_input == bool(wrapper.get_base_layer().is_transposed):
        a, b = b.mT, a.mT
    return LoraFactors(a=a, b=b, scale=wrapper.scaling[adapter])


def cut_over_tensor_ranks(lora: LoraFactors, weight: Tensor, transposed: bool) -> LoraFactors:
    """Cut LoRA that every rank holds whole to this rank's share of F, for a `weight` that `DistributedConfig(tp_size=)`
    cut over F: the rows of b, or the columns of a. Any other weight's LoRA is returned as it is.

    The other matrix and the rank's part of the result are what its base has: a share, or a part of a sum. So each
    rank's gradient is a part, and they are summed over the group: one all-reduce in the backward.

    transposed: whether the weight is [E, in, out].
    """
    names = (weight.device_mesh.mesh_dim_names or ()) if isinstance(weight, DTensor) else ()
    if not isinstance(weight, DTensor) or "tp" not in names:
        return lora
    tp, cut = weight.device_mesh["tp"], weight.placements[names.index("tp")]
    dim: int = getattr(cut, "dim", 0) % 3
    if dim == 0 or tp.size() == 1:
        return lora
    runs: int = getattr(cut, "split_factor", 1)  # gate and up lie one behind the other, and each is cut
    a, b = forward_of(SumGradients, tp.get_group(), lora.a, lora.b)
    of_inputs = dim == (1 if transposed else 2)

    def own(matrix: Tensor, dim: int) -> Tensor:
        mine = [run.chunk(tp.size(), dim)[tp.get_local_rank()] for run in matrix.chunk(runs, dim)]
        return torch.cat(mine, dim)

    return replace(lora, a=own(a, 2) if of_inputs else a, b=b if of_inputs else own(b, 1))
