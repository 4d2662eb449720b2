"""A checkpoint with an adapter of peft merged into its weights, every expert accounted for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from trimtab.convert import source as opened
from trimtab.convert.adapter_files import WeightAdapter, read_adapter
from trimtab.convert.convert import new_folder, unfinished
from trimtab.convert.safetensors_files import SHARD_BYTES, SafetensorsFolder, write_safetensors
from trimtab.convert.source import FORMS, Source, first_difference
from trimtab.convert.steps import loading_steps, mapping_of, saved_mapping_of, saving_steps
from trimtab.convert.tensors import Hashed, Mapped, TensorInfo, TensorStore
from trimtab.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Merged:
    """What was merged. weights: how many of the adapter. experts: by stack of experts, how many of how many changed."""

    folder: Path
    files: list[str]
    tensors: int
    weights: int
    experts: dict[str, tuple[int, int]]


@dataclass
class WithAdapters:
    """A model's state with the adapters added as it is read."""

    inner: TensorStore
    adapters: dict[str, WeightAdapter]
    changed: dict[str, list[bool]] = field(default_factory=dict)

    @property
    def infos(self) -> dict[str, TensorInfo]:
        return dict(self.inner.infos)

    def read(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        tensors = self.inner.read(names)
        return {name: self._merged(name, tensor) for name, tensor in tensors.items()}

    def _merged(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        adapter = self.adapters.get(name)
        if adapter is None:
            return weight
        delta = adapter.delta()  # peft rounds that of experts before it is added, and that of linear layers after
        whole = (weight + (delta if adapter.experts is None else delta.to(weight.dtype))).to(weight.dtype)
        if not whole.isfinite().all():
            raise InputError(f"{name}: with its adapter it is not finite")
        stacks = whole if adapter.experts is not None else whole[None]
        before = weight if adapter.experts is not None else weight[None]
        self.changed[name] = [not torch.equal(a, b) for a, b in zip(stacks, before, strict=True)]
        return whole


def merge(
    src: Path | str, adapter: Path | str, dst: Path | str, *, layout: str | None = None, shard_bytes: int = SHARD_BYTES,
    on_tensor: Callable[[int, int], None] = lambda done, total: None,
) -> Merged:  # fmt: skip
    """Write the model in `src` with the adapter in the folder `adapter` merged, as transformers opens it, to `dst`.

    Args as of `trimtab.convert.convert.convert`; `src` may be in either form. Memory: as there, and a layer's stack of
    experts twice more. Read back from disk, every tensor is the merged one's bit for bit.

    Raises:
        ConfigError, InputError: as `convert` and `trimtab.convert.adapter_files.read_adapter` do.
    """
    src, dst = Path(src), Path(dst).resolve()
    form, _ = opened.form_of(src)
    source = opened.open_source(src, to=next(name for name in FORMS if name != form), layout=layout)
    new_folder(dst)
    model = source.model
    base = _state(source)
    state = Hashed(merged := WithAdapters(base, read_adapter(Path(adapter), model)))
    once = opened.without(state, opened.repeated_ties(model, base))
    view = Mapped(once, saving_steps(model, saved_mapping_of(model), once))
    done, total = 0, 2 * len(view.infos)

    def step(_: str) -> None:
        nonlocal done
        done += 1
        on_tensor(done, total)

    with unfinished(dst, "safetensors") as work:
        write_safetensors(view, work, shard_bytes=shard_bytes, done=step)
        if left := sorted(merged.adapters.keys() - merged.changed.keys()):
            raise InputError(f"{adapter}: {len(left)} of its weights were not written, first {left[0]}")
        folder = SafetensorsFolder(work)
        written = Hashed(Mapped(folder, loading_steps(model, mapping_of(model), folder)))
        for name in written.infos:
            written.read([name])
            step(name)
        expected = {name: state.hashes[name] for name in written.infos if name in state.hashes}
        if wrong := first_difference(expected, written.hashes):
            raise InputError(f"{dst}: what was written does not come back as it was: hash of {wrong}")
        opened.carry(source.folder, work, model)
        final = work.rename(dst)
    experts = {n: (sum(merged.changed[n]), a.experts) for n, a in merged.adapters.items() if a.experts is not None}
    files = sorted(path.name for path in final.iterdir())
    return Merged(folder=final, files=files, tensors=len(view.infos), weights=len(merged.adapters), experts=experts)


def _state(source: Source) -> TensorStore:
    """The model's state by its own names."""
    if isinstance(source.store, SafetensorsFolder):
        state: TensorStore = Mapped(source.store, loading_steps(source.model, mapping_of(source.model), source.store))
    else:
        state = source.blocks.to_theirs(source.store)
    opened.check_state(source.model, state, source.folder)
    return state
