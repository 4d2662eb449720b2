"""The two directions of a conversion, each with the way back that it is proved by."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from trimtab.convert.layouts_moe import BlockLayout, from_moe, to_moe
from trimtab.convert.model import check_state, shared_names, with_ties, without
from trimtab.convert.steps import loading_steps, mapping_of, saved_mapping_of, saving_steps, used
from trimtab.convert.store import Mapped, TensorStore


class Way(Protocol):
    """One direction, for one source."""

    view: TensorStore
    """What is to be written."""

    def back(self, written: TensorStore) -> TensorStore:
        """The source's tensors, made of those that were written."""
        ...


class Blocks:
    """The MoE blocks of a model's state under another layout; none where `layout` is not given."""

    def __init__(self, layout: BlockLayout | None, names: tuple[str, ...]) -> None:
        self.layout, self.names = layout, names

    def ours(self, state: TensorStore, like: TensorStore | None = None) -> TensorStore:
        """Under trimtab's names, in the dtypes of `like` where that is given."""
        if self.layout is None:
            return state
        return Mapped(state, to_moe(self.layout, self.names, state.infos, _dtypes(like)))

    def theirs(self, store: TensorStore, like: TensorStore | None = None) -> TensorStore:
        """Under transformers' names, in the dtypes of `like` where that is given."""
        if self.layout is None:
            return store
        return Mapped(store, from_moe(self.layout, self.names, store.infos, _dtypes(like)))


class ToDcp:
    """A folder of transformers to a DCP checkpoint. Raises InputError where the source does not fit the model."""

    def __init__(self, model: Any, blocks: Blocks, source: TensorStore, where: Path) -> None:
        mapping = mapping_of(model)
        loaded = Mapped(source, loading_steps(model, mapping, source))
        check_state(model, loaded, where)
        shared_names(model, loaded)  # two that are one weight and differ would not come back
        self.model, self.blocks, self.used = model, blocks, used(mapping)
        self.state, self.ties = with_ties(model, loaded)
        self.view: TensorStore = blocks.ours(self.state)

    def back(self, written: TensorStore) -> TensorStore:
        state = without(self.blocks.theirs(written, self.state), self.ties)
        return Mapped(state, saving_steps(self.model, self.used, state))


class ToSafetensors:
    """A DCP checkpoint to a folder of transformers. Raises InputError where the source does not fit the model."""

    def __init__(self, model: Any, blocks: Blocks, source: TensorStore, where: Path) -> None:
        state = blocks.theirs(source)
        check_state(model, state, where)
        self.model, self.blocks, self.source = model, blocks, source
        self.repeated = shared_names(model, state)
        once = without(state, self.repeated)
        self.view: TensorStore = Mapped(once, saving_steps(model, saved_mapping_of(model), once))

    def back(self, written: TensorStore) -> TensorStore:
        loaded = Mapped(written, loading_steps(self.model, mapping_of(self.model), written))
        state, added = with_ties(self.model, loaded)
        state = without(state, (name for name in added if name not in self.repeated))
        return self.blocks.ours(state, self.source)


def _dtypes(store: TensorStore | None) -> dict[str, Any] | None:
    return None if store is None else {name: info.dtype for name, info in store.infos.items()}
