"""Merging adapters of peft: a model's state with one added as it is read, and `trimtab convert --merge`.

A stack of experts [E, ., .] has A [E * r, in] and B [out, r * E]. Of several parameters of one module the first lies
innermost: its tensors have the most `.base_layer` in their names.

Legend: E experts, r rank.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from trimtab.convert import source as opened
from trimtab.convert.convert import Converted, OnTensor, write_converted
from trimtab.convert.files import SHARD_BYTES
from trimtab.convert.layouts import Blocks
from trimtab.convert.steps import loading_steps, mapping_of
from trimtab.convert.tensors import Mapped, TensorStore
from trimtab.errors import ConfigError, InputError

CONFIG, TENSORS = opened.ADAPTER, "adapter_model.safetensors"
_PREFIX = "base_model.model."
_NAME = re.compile(r"(.+)\.lora_(A|B)\.weight")
_INSIDE = ".base_layer"
_UNKNOWN = (
    "use_dora", "lora_bias", "fan_in_fan_out", "alora_invocation_tokens", "layer_replication", "modules_to_save",
    "trainable_token_indices", "use_qalora", "arrow_config", "velora_config", "kasa_config",
)  # fmt: skip
"""Options under which a merged weight is another than W + s B A, or more than that."""
_BEGINNINGS = (True, False, None, "gaussian", "orthogonal", "eva", "mica")
"""Values of `init_lora_weights` that leave the base model as it is; others take the adapter's first value out of it."""


@dataclass(frozen=True, kw_only=True)
class WeightAdapter:
    """One adapter, added to the weight `name` of the model: scale B A, [E, ., .] of a stack or [out, in].

    second_is_input: A reads the second dimension of a stack; its third if not.
    """

    name: str
    a: Tensor
    b: Tensor
    scale: float
    experts: int | None
    second_is_input: bool

    def delta(self, experts: slice) -> Tensor:
        """scale B A, of a stack for these experts, bit for bit as peft sums it, in their dtype, float32 at least."""
        if self.experts is None:
            return self.b @ self.a * self.scale
        a, b = self.a.view(self.experts, -1, self.a.shape[1]), self.b.view(self.b.shape[0], -1, self.experts)
        a, b = a[experts], b[..., experts]
        order = "e i o" if self.second_is_input else "e o i"
        return torch.einsum(f"o r e, e r i -> {order}", b, a) * self.scale


class WithAdapters(TensorStore):
    """A model's state with the adapters added as it is read. changed: by weight, a flag for each expert."""

    def __init__(self, inner: TensorStore, adapters: dict[str, WeightAdapter]) -> None:
        self.inner, self.infos, self.adapters = inner, inner.infos, adapters
        self.changed: dict[str, list[bool]] = {}

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        return {n: self._merged(n, t, slice(0, *t.shape[:1])) for n, t in self.inner.read(names).items()}

    def read_rows(self, name: str, rows: slice) -> Tensor:
        if name in self.adapters and self.adapters[name].experts is None:
            return super().read_rows(name, rows)
        return self._merged(name, self.inner.read_rows(name, rows), rows)

    def _merged(self, name: str, weight: Tensor, rows: slice) -> Tensor:
        adapter = self.adapters.get(name)
        if adapter is None:
            return weight
        delta = adapter.delta(rows)  # peft rounds that of experts before it is added, and that of linear layers after
        whole = (weight + (delta if adapter.experts is None else delta.to(weight.dtype))).to(weight.dtype)
        if not whole.isfinite().all():
            raise InputError(f"{name}: with its adapter it is not finite")
        stacks, before = (t if adapter.experts is not None else t[None] for t in (whole, weight))
        changed = [not torch.equal(a, b) for a, b in zip(stacks, before, strict=True)]
        self.changed.setdefault(name, [False] * (adapter.experts or 1))[rows] = changed
        return whole


@dataclass(frozen=True, kw_only=True)
class Merged:
    """The result of a merge. weights: those of the adapter; experts: by stack of experts, (changed experts, all)."""

    written: Converted
    weights: int
    experts: dict[str, tuple[int, int]]


def merge(
    src: Path | str, adapter: Path | str, dst: Path | str, *, layout: str | None = None, shard_bytes: int = SHARD_BYTES,
    on_tensor: OnTensor = lambda done, total: None,
) -> Merged:  # fmt: skip
    """Write the model in `src` with the adapter in the folder `adapter` merged, as transformers opens it, to `dst`.

    Args and errors as of `convert` and `read_adapter`; `src` may be in either form. Memory: as there, and
    a linear layer that has an adapter four times in float32.
    """
    source = opened.open_source(Path(src), layout)
    model = source.model
    if source.form == "dcp":
        state = source.blocks.mapped(source.store, to_ours=False)
    else:
        state = Mapped(source.store, loading_steps(model, mapping_of(model), source.store))
    opened.check_state(model, state, source.folder)
    merged = WithAdapters(state, read_adapter(Path(adapter), model))
    if lost := sorted(merged.adapters.keys() - state.infos.keys()):
        raise InputError(f"{adapter}: {len(lost)} of its weights are not in {src}, first {lost[0]}")
    plain = replace(source, store=merged, blocks=Blocks(), record=None)
    written = write_converted(plain, Path(dst), "safetensors", shard_bytes, on_tensor)
    experts = {n: (sum(merged.changed[n]), a.experts) for n, a in merged.adapters.items() if a.experts is not None}
    return Merged(written=written, weights=len(merged.adapters), experts=experts)


def read_adapter(folder: Path, model: Any) -> dict[str, WeightAdapter]:
    """The adapters of a folder, by the model's names of their weights.

    Raises:
        InputError: the folder is not whole; a tensor has no place in the model, or none of its kind in the folder;
            ranks and shapes that are not the weight's; weights that the configuration names and the folder lacks;
            two orientations fit, and the configuration does not say which peft wrote it.
        ConfigError: it is not LoRA, or a kind whose merged weight is not W + s B A, W as the folder of the base has
            it; or it is of the embeddings.
    """
    config, tensors = _read(folder)
    if config.get("peft_type") != "LORA" or config.get("bias", "none") != "none":
        raise ConfigError(f"{folder}: {config.get('peft_type')} with bias={config.get('bias')!r}: only LoRA is merged")
    if odd := [key for key in _UNKNOWN if config.get(key)]:
        raise ConfigError(f"{folder}: {odd[0]}={config[odd[0]]!r}: only plain LoRA is merged, W + s B A")
    if (kind := config.get("init_lora_weights")) not in _BEGINNINGS:
        raise ConfigError(
            f"{folder}: init_lora_weights={kind!r} changes the base model before training, so that the adapter does "
            "not belong to the weights in a folder. Save what it added to them: model.save_pretrained(FOLDER, "
            "path_initial_model_for_weight_conversion=START), START the adapter as it was saved before training; or "
            "merge it in memory, by peft's merge_and_unload"
        )
    embeddings = [model.get_input_embeddings(), model.get_output_embeddings()]
    heads = [name for name, module in model.named_modules() if any(module is other for other in embeddings)]
    if changed := [h for h in heads if any(key.removeprefix(_PREFIX).startswith(f"{h}.") for key in tensors)]:
        raise ConfigError(
            f"{folder}: it changes {', '.join(changed)}: adapters of embeddings, and of the head over them, are not "
            "merged from files; merge it in memory, by peft's merge_and_unload"
        )
    found: dict[str, dict[str, Tensor]] = {}
    state, targets = model.state_dict(), _targets(model, config)
    lost = []
    for key, tensor in tensors.items():
        match = _NAME.fullmatch(key.removeprefix(_PREFIX))
        name = _weight(match[1], targets) if match else None
        if match is None or name not in state:
            lost.append(key)
        else:
            found.setdefault(str(name), {})[match[2]] = tensor
    absent = sorted({name for names in targets.values() for name in names} - found.keys())
    half = [name for name, pair in found.items() if len(pair) < 2]
    for names, what in (
        (lost, f"tensors have no place in {type(model).__name__}"),
        (absent, "weights that it names have no adapter in it"),
        (half, "weights have only one of lora_A and lora_B"),
    ):
        if names:
            raise InputError(f"{folder}: {len(names)} {what}, first {names[0]}")
    made = {}
    for name, pair in found.items():
        turned = bool(getattr(model.get_submodule(name.rpartition(".")[0]), "is_transposed", False))
        made[name] = _adapter(folder, config, name, tuple(state[name].shape), pair, turned)
    return made


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    try:
        return json.loads((folder / CONFIG).read_text(encoding="utf-8")), load_file(folder / TENSORS)
    except (OSError, ValueError, SafetensorError) as error:
        raise InputError(f"{folder}: not a whole adapter of peft, {CONFIG} and {TENSORS}: {error}") from None


def _targets(model: nn.Module, config: Mapping[str, Any]) -> dict[str, list[str]]:
    """Parameters that `target_parameters` names, by module, in the order in which peft wraps them."""
    wanted = config.get("target_parameters") or []
    found: dict[str, list[str]] = {}
    for module, held in model.named_modules():
        for own, _ in held.named_parameters(recurse=False):
            name = f"{module}.{own}"
            if any(name == key or name.endswith(f".{key}") for key in wanted):
                found.setdefault(module, []).append(name)
    return found


def _weight(path: str, targets: Mapping[str, list[str]]) -> str | None:
    """The name of the weight that the tensors at a path belong to."""
    depth = path.count(_INSIDE)
    module = path.replace(_INSIDE, "")
    if module not in targets:
        return f"{module}.weight" if depth == 0 else None
    names = targets[module]
    return names[-1 - depth] if depth < len(names) else None


def _adapter(
    folder: Path, config: Mapping[str, Any], name: str, shape: tuple[int, ...], pair: Mapping[str, Tensor], turned: bool
) -> WeightAdapter:
    a, b = (pair[kind].to(torch.promote_types(pair[kind].dtype, torch.float32)) for kind in "AB")
    experts = shape[0] if len(shape) == 3 else None
    key = name if experts is not None else name.removesuffix(".weight")
    rank = int(_pattern(config.get("rank_pattern"), key, config["r"]))
    alpha = float(_pattern(config.get("alpha_pattern"), key, config["lora_alpha"]))
    sizes = shape[1:] if experts is not None else shape[::-1]  # (in, out), if the second dimension is the input
    rows = rank * (experts or 1)
    fits = [(a.shape, b.shape) == ((rows, i), (o, rows)) for i, o in (sizes, sizes[::-1])]
    if experts is None:
        fits[1] = False
    if not any(fits):
        raise InputError(
            f"{folder}: {name} is {list(shape)}, and with r = {rank} its A is {list(a.shape)} and its B {list(b.shape)}"
        )
    second = fits[0] if not all(fits) else turned or _before_swap(folder, config, name, shape)
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    return WeightAdapter(name=name, a=a, b=b, scale=scale, experts=experts, second_is_input=second)


def _before_swap(folder: Path, config: Mapping[str, Any], name: str, shape: Iterable[int]) -> bool:
    """True if a peft before 0.19 wrote it, which takes the second dimension of every stack for the input."""
    version = re.match(r"(\d+)\.(\d+)", str(config.get("peft_version") or ""))
    if version is None:
        raise InputError(
            f"{folder}: {name} is {list(shape)}: both orientations fit, and before 0.19 peft had the other; say which "
            f'one wrote it in {CONFIG}, "peft_version": "0.18" or "0.19"'
        )
    return (int(version[1]), int(version[2])) < (0, 19)


def _pattern(patterns: Mapping[str, Any] | None, key: str, default: Any) -> Any:
    """The value of the first pattern that matches the name, or its end behind a dot: peft's rule."""
    return next((value for p, value in (patterns or {}).items() if re.match(rf"(.*\.)?({p})$", key)), default)
