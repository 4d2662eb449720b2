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
from typing import Any

from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    MergeModulelist,
    PrefixChange,
    Transpose,
    WeightConverter,
    WeightRenaming,
    apply_converters,
    apply_renamings,
    dot_natural_key,
    rename_source_key,
)

from trimtab.convert.store import TensorInfo, TensorStore
from trimtab.errors import InputError


@dataclass(kw_only=True, eq=False)
class MappingStep:
    """One group: the tensors that make one target, or the several that come of one.

    Attributes:
        target: the name that the group is known by.
        transform: transformers' own, never run itself but in a copy: it collects tensors.
        members: (name, pattern that it matched), in the order in which they are stacked.
        renamings: applied to the names that come out.
    """

    target: str
    transform: Any
    model: Any
    members: list[tuple[str, str]] = field(default_factory=list)
    renamings: tuple[Any, ...] = ()

    @property
    def sources(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.members)

    def run(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Raises InputError where the tensors do not fit together."""
        transform = deepcopy(self.transform)
        for name, pattern in self.members:
            transform.add_tensor(self.target, name, pattern, tensors[name])
        try:
            made = transform.convert(self.target, model=self.model, config=self.model.config)
        except Exception as error:
            shapes = sorted({f"{t.dtype} {list(t.shape)}" for t in tensors.values()})
            raise InputError(
                f"{self.target}: transformers cannot make it of {len(tensors)} tensors ({', '.join(shapes)}, first "
                f"{self.members[0][0]}): {error}"
            ) from error
        whole = {name: value[0] if isinstance(value, list) else value for name, value in made.items()}
        return {apply_renamings(name, self.renamings): tensor for name, tensor in whole.items()}


def mapping_of(model: Any) -> list[Any]:
    """What `from_pretrained` would apply to a checkpoint of this model."""
    return list(get_model_conversion_mapping(model))


def saved_mapping_of(model: Any) -> list[Any]:
    """What `save_pretrained` reverts for a model that no checkpoint was loaded into."""
    mapping = get_model_conversion_mapping(model, add_legacy=False)
    return [transform for transform in mapping if not isinstance(transform, PrefixChange)]


def loading_steps(model: Any, mapping: Iterable[Any], store: TensorStore) -> list[MappingStep]:
    """Groups that make the model's state of a checkpoint's tensors.

    Marks the transforms of `mapping` that were used, which is what `saving_steps` then needs to give the same names.

    Raises:
        InputError: experts missing, too many or of different kinds; layouts that shapes alone cannot tell apart.
    """
    mapping = list(mapping)
    renamings = [t for t in mapping if isinstance(t, WeightRenaming)]
    converters = [t for t in mapping if isinstance(t, WeightConverter)]
    owner = {pattern: t for t in converters for pattern in t.source_patterns}
    state, prefix = model.state_dict(), model.base_model_prefix
    steps: dict[str, MappingStep] = {}
    for name in sorted(store.infos, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, state)
        if target not in state and name in state:
            target, pattern = name, None  # it bears the model's own name already
        if pattern is None:
            step = MappingStep(target=target, transform=WeightRenaming(name, target), model=model)
            step = steps.setdefault(target, step)
            if step.members:
                raise InputError(f"{step.members[0][0]} and {name} are both {target} in the model; one must go")
            step.members.append((name, name))
            continue
        step = steps.setdefault(target, MappingStep(target=target, transform=owner[pattern], model=model))
        if step.members and step.transform is not owner[pattern]:
            raise InputError(f"{step.members[0][0]} and {name} are in different layouts, but both go into {target}")
        step.members.append((name, pattern))
    for step in steps.values():
        _check_group(step, store.infos)
        _check_stack(step, store.infos, state, renamings)
    return list(steps.values())


def saving_steps(model: Any, mapping: Iterable[Any], store: TensorStore) -> list[MappingStep]:
    """Groups that make a checkpoint's tensors of the model's state, as `save_pretrained` does: `mapping` reversed.

    Raises:
        InputError: layouts that shapes alone cannot tell apart.
    """
    reversed_mapping = [transform.reverse_transform() for transform in reversed(list(mapping))]
    renamings = tuple(t for t in reversed_mapping if isinstance(t, WeightRenaming))
    converters = [t for t in reversed_mapping if isinstance(t, WeightConverter)]
    owner = {pattern: t for t in converters for pattern in t.source_patterns}
    steps: dict[str, MappingStep] = {}
    for name in sorted(store.infos, key=dot_natural_key):
        target, pattern = apply_converters(name, converters)
        if pattern is None:
            target = apply_renamings(name, renamings)
            step = MappingStep(target=target, transform=WeightRenaming(name, target), model=model)
        else:
            step = MappingStep(target=target, transform=owner[pattern], model=model, renamings=renamings)
        step = steps.setdefault(target, step)
        step.members.append((name, name if pattern is None else pattern))
    for step in steps.values():
        _check_group(step, store.infos)
    return list(steps.values())


def used(mapping: Iterable[Any]) -> list[Any]:
    """The transforms that `loading_steps` had a use for."""
    return [transform for transform in mapping if transform.was_used()]


def _check_group(step: MappingStep, infos: Mapping[str, TensorInfo]) -> None:
    """What joining would hide: a promoted dtype, a shape that fits both ways."""
    operations = getattr(step.transform, "operations", ())
    kinds = {infos[name].dtype for name in step.sources}
    if len(kinds) > 1:
        names = ", ".join(sorted(map(str, kinds)))
        raise InputError(f"{step.target}: its {len(step.members)} tensors are of different dtypes: {names}")
    for operation in operations:
        square = [n for n in step.sources if isinstance(operation, Transpose) and _square(infos[n].shape, operation)]
        if square and operation.check_dims:
            raise InputError(
                f"{square[0]} is {list(infos[square[0]].shape)}: transformers tells its two layouts apart by the shape "
                "alone, and this one fits both, so it could come out transposed without a word"
            )


def _check_stack(
    step: MappingStep, infos: Mapping[str, TensorInfo], state: Mapping[str, Tensor], renamings: Any
) -> None:
    """Whether experts that are to be stacked are all there, each once, and alike."""
    operations = getattr(step.transform, "operations", ())
    if not operations or not isinstance(operations[0], MergeModulelist):
        return
    target = state.get(step.target)
    wanted = None if target is None or operations[0].dim != 0 else int(target.shape[0])
    matched = {pattern for _, pattern in step.members}
    if absent := [pattern for pattern in step.transform.source_patterns if pattern not in matched]:
        raise InputError(f"{step.target}: the checkpoint has no {absent[0]}, only {step.members[0][0]} and the like")
    for pattern in matched:
        names = [name for name, of in step.members if of == pattern]
        _check_experts(step.target, pattern, names, [apply_renamings(n, renamings) for n in names], wanted, infos)


def _square(shape: Sequence[int], operation: Any) -> bool:
    one, other = int(operation.dim0), int(operation.dim1)
    return max(one, other) < len(shape) and shape[one] == shape[other]


def _check_experts(
    target: str, pattern: str, names: list[str], renamed: list[str], wanted: int | None, infos: Mapping[str, TensorInfo]
) -> None:
    numbered = re.compile(pattern.replace("*.", r"(\d+)\."))
    found = [numbered.search(name) for name in renamed]
    ids = [int(match.group(1)) for match in found if match and match.groups()]
    count = len(names) if wanted is None else wanted
    if len(ids) == len(names) and ids != list(range(count)):
        lacks, more = sorted(set(range(count)) - set(ids)), sorted(set(ids) - set(range(count)))
        words = [f"lacks {_some(lacks)}"] * bool(lacks) + [f"has {_some(more)} as well"] * bool(more)
        raise InputError(
            f"{target}: the configuration says {count} experts, the checkpoint has {len(ids)} of {pattern}: it "
            f"{' and '.join(words) or 'counts some twice'}"
        )
    shapes = {infos[name].shape for name in names}
    if len(shapes) > 1:
        odd = min(names, key=lambda n: sum(infos[m].shape == infos[n].shape for m in names))
        rest = sorted(list(shape) for shape in shapes - {infos[odd].shape})
        raise InputError(f"{odd} is {list(infos[odd].shape)}, the other experts' are {', '.join(map(str, rest))}")


def _some(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:8]))
    return f"expert {shown}" if len(numbers) == 1 else f"experts {shown}{' ...' if len(numbers) > 8 else ''}"
