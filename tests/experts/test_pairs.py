"""The grid of pairs: every kind of weights with every way to deliver its gradients, on every backend; output and every
gradient, alone and with the others, against dense autograd in float64. A pair that is refused is a row of `REFUSED`."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from zlib import crc32

import pytest
import torch

from helpers.comparing import assert_close
from helpers.pair_modules import EMPTY
from helpers.pair_truth import BOUNDS, HALVES, INTERLEAVED, LOW, TRUTHS
from helpers.pairs import KERNELS, WIDTH, Pair, Subject
from trimtab.errors import ConfigError
from trimtab.experts.quantized import misfit

SINKS = [("off", False), ("accumulate", False), ("overwrite", False), ("off", True), ("accumulate", True)]
LORA = ("lora", "lora+a", "lora+b", "lora+whole", "lora+shared+whole+bias")
CODES = ("nf4", "int8", "fp8", "mxfp4", "nf4+lora", "mxfp4+lora+a+bias")
PACKED = ("packed", "packed+lora+bias")
TRANSPOSED = ("transposed", "transposed+bias", "transposed+lora+whole")
SEPARATE = ("separate", "separate+bias", "separate+lora+whole")
WEIGHTS = {
    "mlp": ("plain", "bias", *LORA, *CODES, *TRANSPOSED),
    "linear": ("plain", "bias", *LORA, *SEPARATE),
    "te": ("bias", "separate+bias", "separate_weight+bias", "separate_bias+bias"),
    "megatron": ("bias", "separate", "separate+bias"),
}
RECIPES = {"mlp": ("bias", "plain", "lora+whole", "nf4", "transposed"), "linear": ("bias", "separate", "lora+whole")}
DTYPES = {
    "torch": (torch.float64, torch.float32, torch.bfloat16, torch.float16),
    "cpu": (torch.float32, torch.bfloat16, torch.float32, torch.float16),
    "grouped_mm": (torch.float32, torch.bfloat16, torch.float16),
}


def pairs() -> list[Pair]:
    """Every kind of weights, and every recipe, with every sink on every backend; who is empty, how many experts there
    are and dtypes go round, so that each meets each of the others somewhere."""
    made = []
    for module, kernels, (main_grad, delayed) in product(WEIGHTS, KERNELS, SINKS):
        one = Pair(module=module, weights="plain", kernels=kernels, main_grad=main_grad, delayed=delayed)
        if module == "megatron" and main_grad == "overwrite":  # it has one flag, which accumulates
            continue
        made += [replace(one, weights=weights) for weights in WEIGHTS[module]]
        if module in RECIPES:
            lora = "lora+whole+bias" if module == "mlp" else "lora+whole"
            made += [
                replace(one, weights=w, dropout=0.5, activation="relu_squared", rank=WIDTH) for w in ("lora", lora)
            ]
        if module in RECIPES and kernels != "cpu":
            low = product(enumerate(RECIPES[module]), enumerate(LOW))
            turn = SINKS.index((main_grad, delayed))
            made += [replace(one, weights=w, recipe=name) for (i, w), (k, name) in low if (i + k + turn) % 3 == 0]
        for own, weights in product(("activation", "norm") if module == "mlp" else (), ("bias", "lora+whole", "nf4")):
            own = replace(one, weights=weights, own=own, activation="relu_squared")
            made += [own, replace(own, recipe="fp8_blockwise")] if kernels == "torch" else [own]
    for weights, kernels, (main_grad, delayed) in product(PACKED, KERNELS, SINKS):
        made.append(Pair(module="mlp", weights=weights, kernels=kernels, main_grad=main_grad, delayed=delayed))
    return [_placed(pair, i) for i, pair in enumerate(made)]


def _placed(pair: Pair, i: int) -> Pair:
    """Recipes in float32 where stand-ins multiply in it, or where a sum of two rounded terms would fall on the other
    side of one of bfloat16's few values."""
    narrow = "hardware" in pair.recipe or pair.words & {"lora", "own"}
    low = (torch.float32,) if narrow else (torch.float32, torch.float32, torch.bfloat16)
    dtypes = low if pair.recipe else DTYPES[pair.kernels][: 1 if pair.own else None]
    dtypes = tuple(dtype for dtype in dtypes if "packed" not in pair.words or not misfit("packed", 32, 32, dtype))
    dtype = dtypes[i // 5 % len(dtypes)]
    main = (torch.promote_types(dtype, torch.float32), dtype)[i // 3 % 2]
    empty = EMPTY[i % len(EMPTY)]
    pair = replace(pair, dtype=dtype, main_dtype=main, empty=empty, experts=(3, 3, 1, 6)[i // 7 % 4])
    plain = pair.module == "mlp" and not (pair.own or pair.dropout or pair.recipe)
    # Of two sums that are rounded to bfloat16 a limit may lie between: adapters meet those that cut nothing.
    words = [word for word in TRUTHS if "lora" not in pair.words or word not in (HALVES, INTERLEAVED)]
    return replace(pair, strided=i % 11 == 0, activation=words[i % len(words)] if plain else pair.activation)


REFUSED: list[tuple[set[str], str]] = [({"transposed", "recipe"}, "a recipe takes no transposed weights")]
"""Words of a pair that meet nowhere yet, and what is said then; the first that fits."""


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("pair", pairs(), ids=str)
def test_pair(pair: Pair) -> None:
    says = next((says for words, says in REFUSED if words <= pair.words), None)
    if says is not None:
        with pytest.raises(ConfigError, match=says):
            Subject(pair).run(["x"])
        return
    truth, trained = Subject(pair).truth(), Subject(pair).trained
    calls, some = [(trained, "")], trained[crc32(str(pair).encode()) % 3 :: 3]  # each in its turn
    if pair.recipe != "nvfp4":  # its noise counts its calls
        calls += [(wanted, "") for wanted in (*([name] for name in some), some) if wanted]
        calls += [] if pair.delayed else [(trained, name) for name in some]
    for wanted, asked in calls:
        for name, value in Subject(pair).run(wanted, asked).items():
            if name == "y" or name == asked or (name in wanted and not asked):
                assert value is not None, f"{name} of {asked or wanted}"
                assert_close(value, truth[name], BOUNDS[pair.dtype], f"{name} of {asked or wanted}")
            else:
                assert value is None, f"{name} has a gradient, and {asked or wanted} was asked for"
