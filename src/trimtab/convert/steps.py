"""transformers' own checkpoint mapping, cut into groups that can be run one at a time.

`from_pretrained` and `save_pretrained` go through a list of renamings and converters (stack the experts, concatenate
gate and up, transpose ...). The same list is used here, forwards and reversed, so there is no table per family and
what is written is what plain transformers reads. Planned on names and shapes alone, before any value is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor
from transformers import core_model_loading as loading
from transformers.conversion_mapping import get_model_conversion_mapping

from trimtab.checkpoint.state import some
from trimtab.convert.tensors import Step, TensorInfo, TensorStore, infos_of
from trimtab.errors import InputError


@dataclass(kw_only=True, eq=False)
class Group:
    """Tensors that are converted together: those that make one target, or one that makes several.

    target: the name that the group is known by. transform: transformers' own, run in a copy, as it collects tensors.
    members: (name, pattern that it matched), in the order in which they are stacked.
    """

    target: str
    transform: Any
    members: list[tuple[str, str]] = field(default_factory=list)

    @property
    def sources(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.members)

    def steps(self, model: Any, infos: Mapping[str, TensorInfo], renamings: Sequence[Any] = ()) -> list[Step]:
        """The steps that convert the group and then rename what comes out: one, or one for each expert's matrix."""
        plain = isinstance(self.transform, loading.WeightRenaming)
        stack = self._stack()
        by_rows = plain or bool(stack) or self._keeps_experts(apart=False)
        whole = Step(self.sources, partial(self._convert, model, renamings), by_rows=by_rows, stack=stack)
        if plain or not self._keeps_experts(apart=True):
            return [whole]
        made = infos_of(whole.run({name: infos[name].meta() for name in self.sources}))
        experts = infos[self.sources[0]].shape[0]
        return [
            Step(
                self.sources, partial(self._convert, model, renamings, expert=i % experts),
                rows=slice(i % experts, i % experts + 1), made={name: info},
            )
            for i, (name, info) in enumerate(made.items())
        ]  # fmt: skip

    def _keeps_experts(self, *, apart: bool) -> bool:
        """True if an expert's part of what is made of one stack is made of its row alone; apart: a tensor for each."""
        operations = list(getattr(self.transform, "operations", ()))
        split = bool(operations) and isinstance(operations[-1], loading.SplitModulelist) and operations.pop().dim == 0
        return split == apart and len(self.members) == 1 and all(map(_within_experts, operations))

    def _stack(self) -> list[tuple[str, ...]]:
        """The sources that are stacked, of each expert; none where what is made of one is not its row."""
        operations = list(getattr(self.transform, "operations", ()))
        if not operations or not isinstance(first := operations.pop(0), loading.MergeModulelist) or first.dim != 0:
            return []
        experts = [[name for name, of in self.members if of == key] for key in self.transform.source_patterns]
        return list(zip(*experts, strict=True)) if all(map(_within_experts, operations)) else []

    def _convert(
        self, model: Any, renamings: Sequence[Any], tensors: Mapping[str, Tensor], expert: int | None = None
    ) -> dict[str, Tensor]:
        transform, target = deepcopy(self.transform), self.target
        if expert is not None:
            targets = transform.target_patterns
            targets[:], target = [t.replace("*", str(expert)) for t in targets], target.replace("*", str(expert))
        for name, pattern in self.members:
            if name in tensors:
                transform.add_tensor(target, name, pattern, tensors[name])
        try:
            made = transform.convert(target, model=model, config=model.config)
        except Exception as error:
            shapes = sorted({f"{t.dtype} {list(t.shape)}" for t in tensors.values()})
            raise InputError(
                f"{self.target}: transformers cannot make it of {len(tensors)} tensors ({', '.join(shapes)}, first "
                f"{self.members[0][0]}): {error}"
            ) from error
        whole = {name: value[0] if isinstance(value, list) else value for name, value in made.items()}
        return {loading.apply_renamings(name, renamings): tensor for name, tensor in whole.items()}


def mapping_of(model: Any) -> list[Any]:
    """The transforms that `from_pretrained` applies to a checkpoint of this model."""
    return list(get_model_conversion_mapping(model))


def saved_mapping_of(model: Any) -> list[Any]:
    """The transforms that `save_pretrained` reverts for a model that no checkpoint was loaded into."""
    mapping = get_model_conversion_mapping(model, add_legacy=False)
    return [transform for transform in mapping if not isinstance(transform, loading.PrefixChange)]


def moved_rows(mapping: Iterable[Any]) -> list[str]:
    """Names that transforms make of other rows than those at their own place, experts apart: transformers runs them on
    a rank's shard of each source as on the whole, and such a shard comes out wrong, or of another shape."""

    def moves(converter: Any) -> bool:
        first, several = converter.operations[0], len(converter.source_patterns) > 1
        turned = any(
            isinstance(each, loading.Transpose) or getattr(each, "dim", None) == 0 for each in converter.operations
        )
        return not isinstance(first, loading.MergeModulelist) and (turned or several)

    return [t.target_patterns[0] for t in mapping if isinstance(t, loading.WeightConverter) and moves(t)]


def loading_steps(model: Any, mapping: Iterable[Any], store: TensorStore) -> list[Step]:
    """Steps that make the model's state of a checkpoint's tensors.

    Marks the transforms of `mapping` that were used, which is what `saving_steps` then needs to give the same names.

    Raises:
        InputError: experts missing, too many or of different kinds; layouts that shapes alone cannot tell apart.
    """
    mapping = list(mapping)
    renamings, converters, owner = _sorted_out(mapping)
    state, prefix = model.state_dict(), model.base_model_prefix
    groups: dict[str, Group] = {}
    for name in sorted(store.infos, key=loading.dot_natural_key):
        target, pattern = loading.rename_source_key(name, renamings, converters, prefix, state)
        if target not in state and name in state:
            target, pattern = name, None  # it bears the model's own name already
        if pattern is None:
            group = groups.setdefault(target, Group(target=target, transform=loading.WeightRenaming(name, target)))
            if group.members:
                raise InputError(f"{group.members[0][0]} and {name} are both {target} in the model; one must go")
        else:
            group = groups.setdefault(target, Group(target=target, transform=owner[pattern]))
            if group.transform is not owner[pattern]:
                raise InputError(f"{group.members[0][0]} and {name} are in different layouts, both go into {target}")
        group.members.append((name, pattern or name))
    for group in groups.values():
        _check_group(group, store.infos)
        _check_experts(group, store.infos, state.get(group.target), renamings)
    return [step for group in groups.values() for step in group.steps(model, store.infos)]


def without_place(model: Any, store: TensorStore) -> list[str]:
    """Names of a checkpoint's tensors that the model has no place for."""
    renamings, converters, _ = _sorted_out(mapping_of(model))
    state, prefix = model.state_dict(), model.base_model_prefix
    targets = {name: loading.rename_source_key(name, renamings, converters, prefix, state)[0] for name in store.infos}
    return [name for name, target in targets.items() if target not in state and name not in state]


def saving_steps(model: Any, mapping: Iterable[Any], store: TensorStore) -> list[Step]:
    """Steps that make a checkpoint's tensors of the model's state, as `save_pretrained` does: `mapping` reversed.

    Raises:
        InputError: layouts that shapes alone cannot tell apart.
    """
    renamings, converters, owner = _sorted_out([t.reverse_transform() for t in reversed(list(mapping))])
    groups: dict[str, Group] = {}
    for name in sorted(store.infos, key=loading.dot_natural_key):
        target, pattern = loading.apply_converters(name, converters)
        target = loading.apply_renamings(name, renamings) if pattern is None else target
        transform = loading.WeightRenaming(name, target) if pattern is None else owner[pattern]
        group = groups.setdefault(target, Group(target=target, transform=transform))
        group.members.append((name, pattern or name))
    for group in groups.values():
        _check_group(group, store.infos)
    return [
        step
        for group in groups.values()
        for step in group.steps(
            model, store.infos, () if isinstance(group.transform, loading.WeightRenaming) else renamings
        )
    ]


def _sorted_out(mapping: Sequence[Any]) -> tuple[list[Any], list[Any], dict[str, Any]]:
    """(renamings, converters, converter by pattern) of a mapping."""
    converters = [t for t in mapping if isinstance(t, loading.WeightConverter)]
    owner = {pattern: t for t in converters for pattern in t.source_patterns}
    return [t for t in mapping if isinstance(t, loading.WeightRenaming)], converters, owner


def _within_experts(operation: Any) -> bool:
    """True if an operation leaves the first dim of a stack of experts alone, whatever is in it."""
    if isinstance(operation, loading.Transpose):
        return not operation.check_dims and min(operation.dim0, operation.dim1) > 0
    return isinstance(operation, (loading.Chunk, loading.Concatenate, loading.Interleave)) and operation.dim > 0


def _check_group(group: Group, infos: Mapping[str, TensorInfo]) -> None:
    """Raise InputError for a promoted dtype or a shape that fits both ways, which joining would hide."""
    kinds = {infos[name].dtype for name in group.sources}
    if len(kinds) > 1:
        names = ", ".join(sorted(map(str, kinds)))
        raise InputError(f"{group.target}: its {len(group.members)} tensors are of different dtypes: {names}")
    for operation in getattr(group.transform, "operations", ()):
        if not isinstance(operation, loading.Transpose) or not operation.check_dims:
            continue
        for name in group.sources:
            shape, dims = infos[name].shape, (int(operation.dim0), int(operation.dim1))
            if max(dims) < len(shape) and shape[dims[0]] == shape[dims[1]]:
                raise InputError(
                    f"{name} is {list(shape)}: transformers tells its two layouts apart by the shape alone, and this "
                    "one fits both, so it could come out transposed without a word"
                )


def _check_experts(group: Group, infos: Mapping[str, TensorInfo], target: Tensor | None, renamings: Any) -> None:
    """Raise InputError where experts to be stacked are not all there, each once, and alike."""
    operations = getattr(group.transform, "operations", ())
    if not operations or not isinstance(operations[0], loading.MergeModulelist):
        return
    wanted = None if target is None or operations[0].dim != 0 else int(target.shape[0])
    for pattern in group.transform.source_patterns:
        names = [name for name, of in group.members if of == pattern]
        if not names:
            raise InputError(f"{group.target}: the checkpoint has no {pattern}, only {group.sources[0]} and the like")
        numbered = re.compile(pattern.replace("*.", r"(\d+)\."))
        found = [numbered.search(loading.apply_renamings(name, renamings)) for name in names]
        ids = [int(match.group(1)) for match in found if match and match.groups()]
        expected = list(range(len(names) if wanted is None else wanted))
        if len(ids) == len(names) and ids != expected:
            lacks, more = set(expected) - set(ids), set(ids) - set(expected)
            raise InputError(
                f"{group.target}: the configuration says {len(expected)} experts, the checkpoint has {len(ids)} of "
                f"{pattern}; missing: {some(lacks)}; too many: {some(more)}"
            )
        shapes = [infos[name].shape for name in names]
        if len(set(shapes)) > 1:
            odd = min(names, key=lambda name: shapes.count(infos[name].shape))
            raise InputError(f"{odd} is {list(infos[odd].shape)}, other experts' are {sorted(set(shapes))}")
