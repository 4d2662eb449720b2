"""`python -m benchmarks quantized --loading`: the most memory held while a checkpoint is loaded with experts as codes.

A Qwen3-MoE of 2 GB in bfloat16 is written to a temporary folder, and loaded to NF4 and to panels in fresh processes.
Held at most: all pages (VmHWM), and those of this process alone (RssAnon, sampled). The rest are pages of files:
transformers maps a checkpoint, and what was read of it stays until the kernel wants the memory for something else.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

SIZES = {
    "vocab_size": 8192, "hidden_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 8, "head_dim": 128,
    "num_key_value_heads": 2, "num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 1280,
}  # fmt: skip
RUNS = 3
SHARE = {"nf4": 0.3, "packed": 1.0}
"""Of the checkpoint's bytes, that a format leaves."""
LAYER = 32 * 3 * 1280 * 1024 * 2
"""Bytes of a layer's experts in bfloat16."""


def report() -> str:
    """The table, a row for each run."""
    with tempfile.TemporaryDirectory() as folder:
        _fresh("write", folder)
        size = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))
        rows = [(name, _fresh(name, folder)) for name in SHARE for _ in range(RUNS)]
    bars = (f"{name} {(share * size + LAYER) / 1e9 + 0.5:.2f}" for name, share in SHARE.items())
    lines = [f"A checkpoint of {size / 1e9:.2f} GB, GB; bars: {', '.join(bars)}", ""]
    lines += ["| experts | VmHWM | RssAnon | at imports | result | seconds |", "|---|---|---|---|---|---|"]
    for name, row in rows:
        held = (f"{row[key] / 1e9:.2f}" for key in ("peak", "anonymous", "imports", "result"))
        lines.append(f"| {name} | {' | '.join(held)} | {row['seconds']:.1f} |")
    return "\n".join(lines)


def _fresh(what: str, folder: str) -> dict[str, Any]:
    """One step in a process of its own, with our own path."""
    code = f"import sys; sys.path[:] = {sys.path!r}; from benchmarks.loading import step; step({what!r}, {folder!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def step(what: str, folder: str) -> None:
    """Write the checkpoint, or load it to a format and print what was held."""
    import torch
    import transformers

    from benchmarks.memory import status
    from trimtab.integrations.transformers import QuantizedExpertsConfig, register

    register()
    if what == "write":
        config = transformers.AutoConfig.for_model("qwen3_moe", **SIZES)
        transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
        print("{}")
        return
    done, anonymous, imports, begin = threading.Event(), [0], status("VmRSS"), time.monotonic()

    def watch() -> None:
        while not done.wait(0.005):
            anonymous[0] = max(anonymous[0], status("RssAnon"))

    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, experts_implementation="trimtab", quantization_config=QuantizedExpertsConfig(what)
    )
    seconds = time.monotonic() - begin
    done.set()
    watching.join()
    result = sum(p.numel() * p.element_size() for p in model.parameters())
    held = {"peak": status("VmHWM"), "anonymous": anonymous[0], "imports": imports, "result": result}
    print(json.dumps(held | {"seconds": seconds}))
