"""The house keeps its floors and its budgets, which are here; `make house` prints what it measures now."""

from __future__ import annotations

import os
from operator import gt
from pathlib import Path

import pytest

import trimtab
from helpers import house
from helpers.commands import run_python

FLOORS = (
    ("cli",), ("plan",), ("train",), ("doctor",), ("verify",), ("optim",), ("integrations",),
    ("convert",), ("checkpoint",), ("parallel",), ("moe",), ("dispatch", "experts"),
    ("routing",), ("guard",), ("kernels",), ("layout", "processes", "atomic_write"), ("autograd", "operators"),
    ("graph_break",), ("lazy_names",), ("validation", "extras"), ("errors",),
)  # fmt: skip
"""From the top down; the rooms of one floor do not know each other. The oracle stands beside the house."""
ROOMS = {
    "(root)": (1182, 14), "checkpoint": (1055, 6), "cli": (725, 7), "convert": (1775, 9), "dispatch": (2800, 20),
    "doctor": (855, 5), "experts": (5111, 30), "guard": (835, 5), "integrations": (5655, 40), "kernels": (5979, 37),
    "optim": (955, 9), "parallel": (1385, 10), "plan": (1320, 13), "routing": (2375, 15), "train": (4045, 21),
    "verify": (1875, 12),
}  # fmt: skip
NEW = (1200, 12)
"""Lines and files that each room may have, Python and C++; NEW: one that has no line here yet."""
PACKAGE = (37899, 253)
"""Lines and files of all rooms together."""
LAYER = (5050, 37)
"""Lines and files that `import trimtab.moe` loads."""
FORWARD = 15
"""Statements in `MoE.forward`."""
PRIVATE = 25
"""Lines that touch a private name of torch. Each name has a reason:"""
REASONS = {
    "DataDependentOutputException": "what an operator raises that would read a value where there is none",
    "FakeStore": "a group of ranks that are not there has no public way in",
    "FakeTensorMode": "tensors without values lie in a private module",
    "ShardingPropagator": "DTensor tries operators out on tensors that a ledger must not count",
    "TorchDispatchMode": "the base of every dispatch mode lies in a private module",
    "_assert_async": "a check on the device without a sync",
    "_storage_Use_Count": "memory without values that a pool has lent is back when nothing else refers to it",
    "is_fake": "whether a parameter, a DTensor too, has values",
    "_cdata": "which storage it is, while it lives, with values or without: a fake one has no address",
    "_current_graph_task_id": "whether a backward runs: no public question",
    "_current_level": "whether forward-mode AD, or a transform of torch.func, is on: both are refused in one sentence",
    "_distributed_c10d": "the Flight Recorder's dump has no public reader",
    "_execution_engine": "what is to run at the end of a backward: no public way to ask for it",
    "_get_backend": "which backend a group has on the CPU, and its time-out",
    "_get_current_dispatch_mode_stack": "which modes see an operator: no public question",
    "_get_fsdp_state": "FSDP2 has no public way to shard one parameter over another mesh",
    "_grouped_mm": "on fake tensors torch's grouped GEMM takes bfloat16 alone, unlike the real one",
    "_orig_mod": "what torch.compile wraps",
    "_parameters": "a parameter as it is kept, without what parametrize computes",
    "_register_namedtuple": "an exported program gives named tuples back",
    "_schema": "what the arguments of an operator are called, and whether it writes into them",
    "_set_params_and_buffers_to_ignore_for_model": "DDP's only way to leave parameters to somebody else",
    "_will_engine_execute_node": "whether a backward comes by a node: no public question",
}
ASKS = 13
"""Calls of is_compiling() and is_exporting()."""
WORDS = {"lora|adapter": 42, "quantiz|codes": 34, "replic|copies|balanced": 48}
"""Files of the package, in Python, that speak of a capability: it enters at one place."""
CALLS = (164, 24)
"""Calls of our functions in one forward of a layer, and the files that they lie in."""
UPWARD, CIRCLES, LONG = 0, 0, 0
"""Imports of a room above or beside; groups of modules that import each other; files of more than 300 lines."""
TESTS = 44347
"""Lines of tests and helpers."""


def test_rooms_import_only_from_rooms_below() -> None:
    rooms = {module.partition(".")[0] for module in house.imports()}
    assert rooms - {room for floor in FLOORS for room in floor} == {"", "__main__", "oracle"}, "in no room"
    assert not house.imports()["oracle"]
    found = house.upward(FLOORS)
    assert len(found) <= UPWARD, found


def test_modules_do_not_import_each_other_in_circles() -> None:
    assert len(house.circles()) <= CIRCLES, house.circles()


def test_rooms_keep_their_budgets() -> None:
    found = house.rooms()
    over = {room: size for room, size in found.items() if any(map(gt, size, ROOMS.get(room, NEW)))}
    assert not over, f"(lines, files): {over}; budgets: {ROOMS}"
    together = tuple(map(sum, zip(*found.values(), strict=True)))
    assert not any(map(gt, together, PACKAGE)), f"(lines, files) together {together}, budget {PACKAGE}"
    assert len(house.longest()) <= LONG, house.longest()
    assert house.test_lines() <= TESTS


def test_a_layer_loads_little_and_reads_on_one_screen() -> None:
    loaded = house.loaded_by("trimtab.moe")
    assert not any(map(gt, loaded, LAYER)), loaded
    assert house.statements_of("moe", "MoE", "forward") <= FORWARD


def test_a_capability_is_spoken_of_where_it_enters() -> None:
    found = {words: len(house.files_with(words)) for words in WORDS}
    assert not {words: count for words, count in found.items() if count > WORDS[words]}, (found, WORDS)


def test_a_forward_passes_few_functions() -> None:
    found = house.functions_of_a_forward()
    size = sum(found.values()), len({name.partition(":")[0] for name in found})
    assert not any(map(gt, size, CALLS)), (size, found)


def test_what_torch_keeps_private_is_touched_seldom() -> None:
    found = house.private_lines()
    assert len(found) <= PRIVATE, found
    assert not [name for name in found.values() if name.rpartition(".")[2] not in REASONS], found


def test_few_places_ask_who_runs_them() -> None:
    found = house.asks(("is_compiling", "is_exporting"))
    assert sum(found.values()) <= ASKS, found


@pytest.mark.parametrize("module", ["trimtab", "trimtab.cli.main"])
def test_importing_trimtab_and_its_command_imports_neither_torch_nor_transformers(module: str) -> None:
    script = f"import sys, {module}; print(sorted({{'torch', 'transformers'}} & set(sys.modules)))"
    assert run_python("-c", script, check=True).stdout.strip() == "[]"


def test_the_core_needs_torch_alone() -> None:
    block = "import sys; sys.modules['transformers'] = sys.modules['matplotlib'] = None; import trimtab; "
    script = block + "print([getattr(trimtab, n).__name__ for n in trimtab.__all__])"
    assert "GroupedLinear" in run_python("-c", script, check=True).stdout


@pytest.mark.skipif("PYTEST_XDIST_WORKER" not in os.environ, reason="about several workers")
@pytest.mark.xdist_group("house")
def test_tests_of_a_group_stay_together(request: pytest.FixtureRequest) -> None:
    """Tests of many ranks would disturb each other, and an xdist that does not know its pytest says nothing."""
    assert request.node.nodeid.endswith("@house")


def test_what_make_check_names_is_there() -> None:
    root = Path(__file__).parents[1]
    assert not [line for line in (root / "tests/check.txt").read_text().split() if not (root / line).exists()]


def test_a_star_imports_the_public_names() -> None:
    found: dict[str, object] = {}
    exec("from trimtab import *", found)
    assert set(trimtab.__all__) <= set(found)


def test_every_public_name_is_on_the_page_of_the_api() -> None:
    page = (house.TESTS.parent / "docs" / "api.md").read_text(encoding="utf-8")
    assert not [name for name in trimtab.__all__ if f":: trimtab.{name}\n" not in page]
