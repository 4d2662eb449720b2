"""The grid of pairs: every kind of weights with every way to deliver its gradients, on every backend; output and every
gradient, alone and with the others, against dense autograd in float64. A pair that is refused is a row of `REFUSED`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest

from helpers.comparing import assert_close
from helpers.pairs import Pair, Subject
from trimtab.errors import ConfigError

KERNELS = ("torch", "cpu", "grouped_mm")
SINKS = [("off", False), ("accumulate", False), ("overwrite", False), ("off", True), ("accumulate", True)]
LORA = ("lora", "lora+a", "lora+b", "lora+whole", "lora+shared+whole+bias")
CODES = ("nf4", "int8", "fp8", "mxfp4", "nf4+lora", "mxfp4+lora+a+bias")
TRANSPOSED = ("transposed", "transposed+bias", "transposed+lora+whole")
SEPARATE = ("separate", "separate+bias", "separate+lora+whole")
WEIGHTS = {
    "mlp": ("plain", "bias", *LORA, *CODES, *TRANSPOSED),
    "linear": ("plain", "bias", *LORA, *SEPARATE),
    "megatron": ("bias", "separate", "separate+bias"),
}


def pairs() -> Iterator[Pair]:
    for module, kernels, (main_grad, delayed) in product(WEIGHTS, KERNELS, SINKS):
        if module == "megatron" and main_grad == "overwrite":  # it has one flag, which accumulates
            continue
        options = {"module": module, "kernels": kernels, "main_grad": main_grad, "delayed": delayed}
        for weights in WEIGHTS[module]:
            yield Pair(**options, weights=weights)
            if kernels == "torch" and module != "megatron":
                yield Pair(**options, weights=weights, recipe=True)
        if module == "megatron":
            continue
        for weights in ("lora", "lora+whole+bias" if module == "mlp" else "lora+whole"):
            yield Pair(**options, weights=weights, dropout=0.5)
        for own, weights in product(("activation", "norm") if module == "mlp" else (), ("bias", "lora+whole", "nf4")):
            yield Pair(**options, weights=weights, own=own)
            if kernels == "torch":
                yield Pair(**options, weights=weights, own=own, recipe=True)


REFUSED: list[tuple[set[str], str]] = [
    ({"lora", "separate"}, "no module of GroupedLinear has weights"),
    ({"linear", "lora", "recipe"}, "recipe or delay_wgrad takes no adapters"),
    ({"linear", "lora", "delayed"}, "recipe or delay_wgrad takes no adapters"),
    ({"own", "main_grad"}, "take no function of one's own"),
    ({"own", "delayed"}, "take no function of one's own"),
    ({"own", "recipe"}, "take no function of one's own"),
    ({"transposed", "recipe"}, "a recipe takes no transposed weights"),
]
"""Words of a pair that meet nowhere yet, and what is said then; the first that fits."""


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("pair", pairs(), ids=str)
def test_pair(pair: Pair) -> None:
    says = next((says for words, says in REFUSED if words <= pair.words), None)
    if says is not None:
        with pytest.raises(ConfigError, match=says):
            Subject(pair).run(["x"])
        return
    subject = Subject(pair)
    truth = subject.truth()
    calls = [(subject.trained, ""), *(([name], "") for name in subject.trained)]
    calls += [] if pair.delayed else [(subject.trained, name) for name in subject.trained]
    for wanted, asked in calls:
        for name, value in subject.run(wanted, asked).items():
            if name == "y" or name == asked or (name in wanted and not asked):
                assert value is not None, f"{name} of {asked or wanted}"
                assert_close(value, truth[name], pair.bound, f"{name} of {asked or wanted}")
            else:
                assert value is None, f"{name} has a gradient, and {asked or wanted} was asked for"
