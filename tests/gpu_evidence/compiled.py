"""Layers of real models forward and backward on fake CUDA tensors, and each kernel of Triton that they launch compiled
for GPUs that are not here. Prints a table, or with --json an object; ends with 1 where a row has a fault.

    PYTHONPATH=tests:. python -m gpu_evidence.compiled [--json] [--brief] [GPU/LAYER[/DTYPE] ...]

A process of its own: guard.cpp must be loaded before PyTorch. Without cases it compiles all: some five minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Iterator
from typing import Any

LAYERS: dict[str, tuple[str, int, int, int, int]] = {
    "qwen3": ("Qwen3-30B-A3B", 2048, 768, 128, 8), "mixtral": ("Mixtral 8x7B", 4096, 14336, 8, 2),
    "deepseek": ("DeepSeek-V3", 7168, 2048, 256, 8), "next": ("Qwen3-Next", 2048, 512, 512, 10),
    "odd": ("gpt-oss, F halved", 2880, 1440, 32, 4), "half": ("F 1408 halved", 2048, 704, 64, 6),
}  # fmt: skip
"""Model, D, F, experts of a rank, K. No tile divides the widths of the last two."""
GPUS = ("sm_80", "sm_90", "sm_100", "sm_120", "gfx942")
ALL = [f"{gpu}/{layer}" for gpu in GPUS for layer in LAYERS] + ["sm_90/qwen3/float16", "sm_90/qwen3/float32"]
EVEN = ("qwen3", "mixtral", "deepseek")
"""Their widths are multiples of each tile's."""
SPILLED = 64
"""Bytes of a thread at most. Hopper's GEMMs of even widths spill none."""
PLACES = ("count", "scan", "place")
"""They count slots, in 32 bits."""
COLUMNS = ("gpu", "layer", "dtype", "kernel", "tile", "warps", "stages", "registers", "spilled", "shared", "products")


def kernels_of(case: str, brief: bool = False, rows: int = 4096) -> dict[str, Any]:
    """What an ExpertMLP with each backend and a GroupedLinear launch forward and backward, by what is compiled for it.
    brief: an ExpertMLP in Triton alone, but for Hopper."""
    import torch

    from gpu_evidence import fake_cuda
    from gpu_evidence.ahead import DEVICES, Launched
    from trimtab import ExpertMLP, GroupedLinear
    from trimtab.kernels.triton.language import on

    class Recorder(fake_cuda.Watch):
        def kernel(self, kernel: Any, args: Any, options: Any) -> None:
            found.append(Launched.of(kernel, args, options))

    found: list[Launched] = []
    gpu, layer, dtype = (*case.split("/"), "bfloat16")[:3]
    device, (_, dim, hidden, experts, top_k) = DEVICES[gpu], LAYERS[layer]
    given: Any = {"dtype": getattr(torch, dtype), "device": "cuda"}
    with fake_cuda.FakeTensorMode(allow_non_fake_inputs=True), fake_cuda.fake_cuda(watch := Recorder()), watch:
        torch.cuda.get_device_properties = lambda *_: device.properties  # type: ignore[assignment]
        torch.version.hip = "6" if device.gfx else None  # type: ignore[assignment]
        on.cache_clear()
        packed = torch.empty(rows, dim + 32, **given)[:, :dim]  # as rows come out of an exchange
        x = torch.empty(rows, dim, requires_grad=True, **given)
        ids, w = fake_cuda.slots(rows, top_k)
        for kernels in (
            ("triton",) if dtype != "bfloat16" or (brief and gpu != "sm_90") else ("triton", "grouped_mm+triton")
        ):
            module = ExpertMLP(experts, dim, hidden, kernels=kernels, **given)
            for there in (x,) if brief else (x, packed.requires_grad_()):
                y = module(there, ids, w)
                y.backward(torch.empty_like(y))
        if not brief:
            y = GroupedLinear(experts, dim, hidden, kernels="triton", **given)(x, ids.new_empty(experts))
            y.backward(torch.empty_like(y))
    return {launched.key(device): launched for launched in found}


def row_of(case: str, launched: Any) -> dict[str, Any]:
    """Of the table."""
    from gpu_evidence.ahead import DEVICES

    gpu, layer, dtype = (*case.split("/"), "bfloat16")[:3]
    built, given = launched.compiled(DEVICES[gpu]), launched.options
    registers, spilled = built.numbers
    return {
        "gpu": gpu, "layer": layer, "dtype": dtype, "kernel": launched.name,
        "tile": "x".join(str(given[k]) for k in ("BM", "BN", "BK") if k in given),
        "warps": built.made.metadata.num_warps, "stages": given.get("num_stages", ""), "registers": registers,
        "spilled": spilled, "shared": built.shared, "fit": built.fit, "products": built.products,
        "atomics": built.atomics, "narrow": built.narrow(), "fused": given.get("enable_fp_fusion"),
        "ahead": bool(DEVICES[gpu].gfx) or "cp.async" in built.text, "by_16": "ld.global.v4" in built.text,
    }  # fmt: skip


def faults_of(row: dict[str, Any]) -> list[str]:
    """What a row of the table must not show."""
    gemm, nvidia = bool(row["tile"]), row["gpu"].startswith("sm_")
    by_cores, even = row["dtype"] != "float32", row["gpu"] == "sm_90" and row["layer"] in EVEN
    found = {
        "it spills": row["spilled"] > (0 if even else SPILLED) and nvidia,
        "its shared memory or its registers fit no multiprocessor": row["fit"] < 1,
        "its products are not those of the tensor cores": gemm and by_cores and not row["products"],
        "tensor cores round its float32": gemm and not by_cores and row["products"] > 0,
        "nothing is fetched ahead": gemm and not row["ahead"],
        "its products are rounded before they are added": not row["fused"],
        "atomics": row["atomics"] > 0,
        "rows are addressed by 32 bits": row["kernel"] not in PLACES and set(row["narrow"]) - {"%offsets"},
        "rows are not read 16 bytes at a time": nvidia and row["kernel"] == "gather" and not row["by_16"],
    }
    return [fault for fault, there in found.items() if there]


def table(cases: list[str], brief: bool) -> Iterator[dict[str, Any]]:
    done = set()
    for case in cases:
        for key, launched in kernels_of(case, brief).items():
            wanted = "BM" in launched.options or launched.name == "scan" or case == "sm_90/qwen3" or not brief
            if wanted and (case.split("/")[0], key) not in done:
                done.add((case.split("/")[0], key))
                yield row_of(case, launched)


def compiled_again() -> list[str]:
    """Kernels that a batch of another size would wait for."""
    known = kernels_of("sm_90/qwen3")
    return [k for rows in (1, 16, 37, 32768) for k in kernels_of("sm_90/qwen3", rows=rows) if k not in known]


def main() -> None:
    parser = argparse.ArgumentParser(prog="gpu_evidence.compiled")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--brief", action="store_true")
    parser.add_argument("cases", nargs="*")
    asked = parser.parse_args()
    from gpu_evidence.__main__ import load_guard

    load_guard()
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        faults, rows = compiled_again(), []
        if not asked.json:
            print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
        for row in table(asked.cases or ALL, asked.brief):
            rows.append(row)
            faults += [f"{row['gpu']} {row['layer']} {row['kernel']} {row['tile']}: {f}" for f in faults_of(row)]
            if not asked.json:
                print("| " + " | ".join(str(row[c]) for c in COLUMNS) + " |", flush=True)
        print(json.dumps({"rows": rows, "faults": faults}) if asked.json else "\n".join(faults), flush=True)
    os._exit(bool(faults))  # the threads of autograd's engine would wait for a device


if __name__ == "__main__":
    main()
