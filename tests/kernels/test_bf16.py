"""Which products of bfloat16 are taken, what happens where they fail, and what the compiler makes of them."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import warnings
from itertools import product
from pathlib import Path

import pytest
import torch

from helpers.emulated import emulated
from trimtab.doctor import backends
from trimtab.errors import BackendError
from trimtab.kernels import compiled, compiler
from trimtab.kernels.bf16 import PRODUCTS, Bf16Products
from trimtab.kernels.choose import KernelChoice
from trimtab.kernels.compiled import SOURCES, CompiledKernels
from trimtab.kernels.expert_check import first_cpu_fault
from trimtab.kernels.selftest import self_test

pytestmark = pytest.mark.xdist_group("emulated")  # one process compiles what they share
CPU = torch.device("cpu")
ALL, NO_CPU, NO_COMPILER, NO_SYSTEM = 0, 1, 2, 3
"""What cpu/experts.cpp answers."""


@pytest.mark.parametrize(
    ("lacks", "chosen", "refused"),
    [
        ((0, ALL, ALL), "amx-bf16", {}),
        ((0, ALL, NO_SYSTEM), "avx512-bf16", {"amx-bf16": "the operating system does not permit it"}),
        ((0, NO_COMPILER, NO_CPU), "widened", {"amx-bf16": "this CPU", "avx512-bf16": "the compiler"}),
    ],
)
def test_the_fastest_that_can_run_is_taken_and_the_others_have_a_reason(
    lacks: tuple[int, ...], chosen: str, refused: dict[str, str]
) -> None:
    products = Bf16Products(lacks.__getitem__)
    assert products.name == chosen == PRODUCTS[products.number]
    assert products.refused.keys() == refused.keys()
    for name, why in refused.items():
        assert products.refused[name].startswith(why)
        assert f"not {name}: {why}" in str(products)


def test_what_is_asked_for_is_taken_or_refused() -> None:
    assert Bf16Products(lambda _: ALL, "avx512-bf16").name == "avx512-bf16"
    with pytest.raises(BackendError, match="amx-bf16: this CPU does not have it"):
        Bf16Products(lambda _: NO_CPU, "amx-bf16")
    with pytest.raises(BackendError, match="no products of bfloat16 called 'fast'"):
        Bf16Products(lambda _: ALL, "fast")


def test_this_machine_s_library_says_what_it_lacks() -> None:
    told = Path("/proc/cpuinfo").read_text().splitlines() if sys.platform == "linux" else []
    flags = next((line for line in told if line.startswith("flags")), "")
    here = CompiledKernels().bf16
    names = {"avx512-bf16": "avx512_bf16", "amx-bf16": "amx_bf16"}
    for name, flag in names.items():
        assert (flag in flags.split()) != (here.refused.get(name) == "this CPU does not have it")


@pytest.mark.parametrize("wrong", [("amx-bf16",), ("amx-bf16", "avx512-bf16")])
def test_wrong_products_are_found_and_the_next_taken(wrong: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    right = CompiledKernels.backward

    def sometimes(self: CompiledKernels, fields: dict[str, torch.Tensor]) -> None:
        right(self, fields)
        if self.bf16.name in wrong and fields["type"]:
            fields["dx"][3, 7] += 2

    kernels = emulated(poison=False)
    assert kernels.bf16.name == "amx-bf16"
    choice = KernelChoice(kernels)
    monkeypatch.setattr(CompiledKernels, "backward", sometimes)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert choice.on(CPU, torch.bfloat16) is kernels
    for name, warning in zip(wrong, said, strict=True):
        start = f"{name} products: fused experts in torch.bfloat16: dx is wrong. Those called"
        assert str(warning.message).startswith(start)
    assert kernels.bf16.name == ("avx512-bf16" if len(wrong) == 1 else "widened")
    assert set(kernels.bf16.refused) == set(wrong)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert first_cpu_fault(kernels) is None  # said once


def test_a_fault_that_all_products_have_is_the_kernels_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    right = CompiledKernels.forward

    def wrong(self: CompiledKernels, fields: dict[str, torch.Tensor]) -> None:
        right(self, fields)
        if fields["type"]:
            fields["y"][0, 0] += 2

    monkeypatch.setattr(CompiledKernels, "forward", wrong)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = self_test(emulated(poison=False), CPU, torch.bfloat16)
    assert report.fault == "fused experts in torch.bfloat16: y is wrong"


def test_the_doctor_says_which_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = emulated(poison=False)
    monkeypatch.setattr(backends, "get_backend", lambda name, device: kernels)
    found = backends.judge_kernels("cpu", CPU, [backends._try("cpu", CPU, torch.bfloat16, True)])
    assert "\nbfloat16 products: amx-bf16" in found.what
    here = backends.judge_kernels("cpu", CPU, [backends._try("cpu", CPU, torch.float32, True)]).what
    assert str(kernels.bf16) in here


def assembly(march: str) -> dict[str, list[str]]:
    """Instructions of each function that the compiler makes for that machine, by demangled name."""
    if shutil.which("objdump") is None:
        pytest.skip("there is no objdump here")
    probe = [*compiler.find_compiler(), f"-march={march}", "-E", "-x", "c++", "/dev/null"]
    if subprocess.run(probe, capture_output=True, check=False).returncode:
        pytest.skip(f"this compiler, or this kind of machine, does not know -march={march}")
    library = compiler.made(SOURCES / "experts.cpp", list(SOURCES.iterdir()), march=march)
    command = ["objdump", "-dC", "--no-show-raw-insn", str(library)]
    told = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    found: dict[str, list[str]] = {}
    for part in re.split(r"\n(?=[0-9a-f]+ <)", told):
        head, *lines = part.splitlines()
        if match := re.match(r"[0-9a-f]+ <(.*)>:$", head):
            found[match[1]] = [line.strip() for line in lines if "\t" in line]
    return found


def loop_around(function: list[str], instruction: str) -> list[str]:
    """The innermost loop that holds the last `instruction`: to the next jump back over it."""
    addresses = [int(line.split(":")[0], 16) for line in function]
    at = max(i for i, line in enumerate(function) if re.search(rf"\t{instruction}\b", line))
    for i in range(at, len(function)):
        jump = re.search(r"\tj\w+ +([0-9a-f]+) ", function[i])
        if jump and int(jump[1], 16) <= addresses[at]:
            return function[addresses.index(int(jump[1], 16)) : i + 1]
    raise AssertionError(f"no loop around {instruction}")


def only(functions: dict[str, list[str]], start: str) -> list[str]:
    (found,) = (lines for name, lines in functions.items() if name.startswith(start))
    return found


@pytest.mark.parametrize("march", ["cooperlake", "sapphirerapids", "native"])
def test_dot_products_of_pairs_keep_their_sums_in_registers(march: str) -> None:
    functions = assembly(march)
    if march == "native" and not any(name.startswith("void tile<Dots") for name in functions):
        pytest.skip("this machine has no AVX512-BF16")
    tiles = [(f"tile<Dots, {rows}, 2>", 2 * rows, 0) for rows in range(1, 15)]
    # Of a weight's rows two may lie on the stack meanwhile, or three where the compiler tunes for Zen.
    moved = 5 if march == "native" else 4
    turned = [(f"swapped_rows<Dots, bf16, {rows}>", 16 * rows, moved) for rows in range(1, 9)]
    for name, sums, moves in [*tiles, ("tile<Dots, 8, 1>", 8, 0), *turned]:
        loop = loop_around(only(functions, f"void {name}"), "vdpbf16ps")
        found = sum("\tvdpbf16ps" in line for line in loop)
        assert found
        assert found % sums == 0
        stack = [line for line in loop if "%rsp" in line or "%rbp" in line]
        assert sum("zmm" in line or not moves for line in stack) <= moves


@pytest.mark.parametrize("march", ["haswell", "znver3", "cooperlake", "native"])
def test_float_products_are_added_in_one_rounding(march: str) -> None:
    """A compiler that makes two of one of them changes a row's bits with the number of rows."""
    if march == "native" and compiled.compiled_kernels().instructions == "generic":
        pytest.skip("this machine has no such instruction, or another one than is looked for")
    functions = assembly(march)
    found = {name: lines for name, lines in functions.items() if re.match(r"void (tile|swapped_rows)<Floats, ", name)}
    assert {"tile", "swapped_rows"} == {re.split(r"[ <]", name)[1] for name in found}
    for name, lines in found.items():
        assert any("\tvfmadd" in line for line in lines), name
        assert not [line for line in lines if "\tvmulps" in line], name


def test_tiles_keep_their_sums_in_registers() -> None:
    functions = assembly("sapphirerapids")
    beside = ("EachRow>", "SomeLines>", "SomeRows<float>", "SomeRows<bf16>")
    for (two, products, loads), what in product([("true", 4, 4), ("false", 2, 3)], beside):
        function = only(functions, f"void tile_block<{two}, {what}")
        loop = loop_around(function, "tdpbf16ps")
        assert sum("\ttdpbf16ps" in line for line in loop) == products
        assert sum("\ttileloadd" in line for line in loop) == loads
        assert not [line for line in loop if "tilestored" in line]
        if what == "EachRow>":  # the others have more to remember than there are registers
            stack = ["%rsp"] + ["%rbp"] * any(re.search(r"\tmov +%rsp,%rbp", line) for line in function)
            assert not [line for line in loop if any(register in line for register in stack)]
    assert not [line for line in only(functions, "multiply(Amx") if "\tldtilecfg" in line]
    for instruction in ("ldtilecfg", "tilerelease"):  # once for all products of a thread
        where = [name for name, lines in functions.items() if any(f"\t{instruction}" in line for line in lines)]
        passes = [f"{name}<bf16, {stored}" for name in ("forward", "backward") for stored in ("bf16", "rounded")]
        for name in (*passes, "weight_gradients<bf16"):
            assert any(f"{name}, Amx>" in one for one in where)
