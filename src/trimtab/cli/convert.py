"""`trimtab convert`: the options, and what is printed of a conversion."""

from __future__ import annotations

import argparse
import math
from collections import Counter
from typing import TYPE_CHECKING

from trimtab.cli import Progress
from trimtab.errors import ConfigError
from trimtab.extras import required

if TYPE_CHECKING:
    from trimtab.convert.convert import Converted
    from trimtab.convert.merge import Merged

HELP = "convert a checkpoint to safetensors of transformers, or back"
DESCRIPTION = """\
Convert a checkpoint (trimtab's, torch.distributed.checkpoint) to a folder that plain transformers opens, or back.
Which tensor goes where is transformers' own mapping. Every tensor and every expert is accounted for before anything
is written; what was written is read back through the inverse, and each tensor's hash must be the source's.

  trimtab convert runs/moe/checkpoints ./model --to safetensors
  trimtab convert ./Qwen3-30B-A3B ./start --to dcp
  trimtab convert ./Qwen3-30B-A3B ./start --to dcp --layout qwen3_moe    for a model of trimtab.MoE layers
  trimtab convert ./Qwen3-30B-A3B ./merged --to safetensors --merge ./adapter    of peft; SRC in either form

With a family's layout a router's weight and bias of 16 bits become float32, and stay it on the way back to safetensors:
the same values in another dtype. Every other tensor comes back bit for bit.

Optimizer state has no place in safetensors and is left behind. Needs one process, no GPU, and memory for the largest
tensor, as a layer's gate and up of all experts.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's options."""
    add = parser.add_argument
    add("src", metavar="SRC", help="a checkpoint folder; of several in one folder the latest")
    add("dst", metavar="DST", help="a folder that is not there yet, or empty")
    add("--to", required=True, metavar="safetensors|dcp", help="the form that is written")
    add("--layout", metavar="NAME", help="of the checkpoint's MoE blocks: transformers (default), or the family's name")
    add("--merge", metavar="ADAPTER", help="a LoRA adapter of peft, merged into the weights that are written")
    add("--shard-size", type=float, default=4.0, metavar="GB", help="of a file of safetensors (default 4)")


def run(options: argparse.Namespace) -> int:
    """Convert and print what was done; returns 0. Errors are raised."""
    if not 0 < options.shard_size < math.inf:
        raise ConfigError("--shard-size must be more than 0, and a number")
    transformers = required("transformers", "trimtab convert")
    from trimtab.convert.convert import convert
    from trimtab.convert.merge import merge

    transformers.logging.set_verbosity_error()
    progress = Progress(0, unit="tensor")

    def on_tensor(done: int, total: int) -> None:
        progress.total = total
        progress.step()

    shard_bytes = int(options.shard_size * 1e9)
    to, layout = options.to, options.layout
    if options.merge is None:
        done = convert(options.src, options.dst, to=to, layout=layout, shard_bytes=shard_bytes, on_tensor=on_tensor)
        said = describe(done)
    elif to != "safetensors":
        raise ConfigError("--merge writes what transformers opens: --to safetensors")
    else:
        said = describe_merged(
            merge(options.src, options.merge, options.dst, layout=layout, shard_bytes=shard_bytes, on_tensor=on_tensor)
        )
    progress.close()
    print(said, flush=True)
    return 0


def describe(done: Converted) -> str:
    """The lines that report a conversion: converted, left behind, written, proved."""
    kinds = Counter(", ".join(f"{n} {shape}" for n, shape in shapes.items()) for shapes in done.experts.values())
    lines = [f"{done.tensors} tensors, {_size(done.nbytes)}, converted; layout {done.record.layout}"]
    lines += [f"{count} layers of experts: {kind}" for kind, count in kinds.items()]
    if done.optimizer[0]:
        entries, nbytes = done.optimizer
        lines.append(f"left behind: optimizer state, {entries} tensors, {_size(nbytes)}")
    lines += [
        f"source   {done.record.source_hash}" + (", as its record says" if done.recorded else ""),
        f"written  {done.record.hash}",
        "read back through the inverse mapping: every tensor's hash is the source's",
        f"{done.folder}: {', '.join(name for name in done.files if not name.endswith('.distcp'))}",
    ]
    return "\n".join(lines)


def describe_merged(done: Merged) -> str:
    """The lines that report a merge, with the number of experts that it changed."""
    kinds = Counter((name.rpartition(".")[2], *counts) for name, counts in done.experts.items())
    lines = [f"{done.weights} weights of {done.written.tensors} tensors have the adapter merged"]
    lines += [f"{n} layers of {name}: {some} of {all_} experts changed" for (name, some, all_), n in kinds.items()]
    lines += ["read back from disk: every tensor is the merged one, bit for bit"]
    lines += [f"{done.written.folder}: {', '.join(done.written.files)}"]
    return "\n".join(lines)


def _size(nbytes: int) -> str:
    units = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
    return next((f"{nbytes / size:.1f} {unit}" for unit, size in units if nbytes >= size), f"{nbytes} bytes")
