"""trimtab in transformers: one call adds it to both registries, for all MoE families at once."""

from __future__ import annotations

from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Literal
from weakref import WeakSet

from trimtab.errors import ConfigError
from trimtab.extras import install
from trimtab.lazy_names import lazy_names

if TYPE_CHECKING:
    from trimtab.convert.export import save_pretrained as save_pretrained
    from trimtab.integrations.transformers.callbacks import LoadBalancerCallback as LoadBalancerCallback
    from trimtab.integrations.transformers.callbacks import LoadCallback as LoadCallback
    from trimtab.integrations.transformers.lora import lora_config as lora_config
    from trimtab.integrations.transformers.quantized.quantizer import QuantizedExpertsConfig as QuantizedExpertsConfig
    from trimtab.integrations.transformers.quantized.quantizer import dequantize_experts as dequantize_experts
    from trimtab.integrations.transformers.quantized.quantizer import quantize_experts as quantize_experts
    from trimtab.integrations.transformers.routers.load_balancer import LoadBalancer as LoadBalancer


def register(
    name: str = "trimtab", *, combine: Literal["sum", "ordered"] = "sum", transport: str = "alltoall",
    replicate_experts: Literal["off", "auto"] | float = "off", copy_cost: int | None = None, kernels: str = "auto",
) -> None:  # fmt: skip
    """Add trimtab to transformers' experts registry and to its EP-implementation registry, both as `name`.

    Args:
        name: what `experts_implementation=` and `ep_implementation=` will call it.
        combine: "sum", or "ordered" for bits that do not depend on the number of ranks
            (see `trimtab.dispatch.dispatcher.Dispatcher`).
        transport: how rows travel, by a name that `trimtab.parallel.expert_parallel.ExpertParallel` knows.
        replicate_experts: copy hot experts, for one call, to ranks that have room: "off"; "auto", where that is worth
            `copy_cost`; or how far above the mean the busiest rank may be, 0.1 for 10 %. See `ExpertParallel`.
            The experts must be run by the same name then: another `experts_implementation` is refused when it is first
            called.
        copy_cost: how many slots a replica must take off the busiest rank to be worth its way; 1000 if not given.
        kernels: what multiplies, by a name of `trimtab.kernels.choose.BACKENDS`.

    Models whose experts are stacked refuse, in `load_state_dict`, a checkpoint with a key per expert that would change
    them: transformers 5.24's Trainer would go on with the experts that it began with.

    Calling it again with the same options is harmless; other options live under another name beside the first. A rank
    waits 300 s for the others before it says who is missing, or 9/10 of `init_process_group(timeout=)` if that is less.

    Raises:
        BackendError: transformers is missing or too old to have the registries.
        ConfigError: there is no transport, combine or kernels of that name or no such `replicate_experts`,
            transformers has another implementation of that name, or it was registered with other options.
    """
    from trimtab.dispatch.options import COPY_COST, ExchangeOptions
    from trimtab.errors import BackendError

    options = ExchangeOptions(
        transport=transport, combine=combine, replicate_experts=replicate_experts,
        copy_cost=COPY_COST if copy_cost is None else copy_cost,
    )  # fmt: skip
    if not isinstance(name, str) or not name:
        raise ConfigError(f"name={name!r}: must be a word that experts_implementation= can have")

    try:
        from transformers.distributed.expert_parallel import EPImplementationInterface
        from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
        from transformers.modeling_utils import PreTrainedModel
    except ImportError as error:
        raise BackendError(
            f"trimtab.integrations.transformers needs transformers >= 5.23 ({install('transformers')}): {error}"
        ) from error
    from trimtab.experts.quantized import refuse_others
    from trimtab.integrations.transformers.expert_parallel import TrimtabEP
    from trimtab.integrations.transformers.experts import experts_forward
    from trimtab.integrations.transformers.lora.peft import teach_peft
    from trimtab.integrations.transformers.quantized import as_weights
    from trimtab.integrations.transformers.quantized.prequantized import add_prequantized
    from trimtab.integrations.transformers.quantized.quantizer import add_quantizer
    from trimtab.integrations.transformers.resuming import refuse_unstacked
    from trimtab.kernels.choose import KernelChoice

    choice = KernelChoice(kernels)  # one for all layers: tested once
    teach_peft()
    add_quantizer()
    add_prequantized()
    refuse_unstacked(PreTrainedModel, as_weights, refuse_others)
    known = dict(ALL_EXPERTS_FUNCTIONS.items()).get(name)
    known_ep = dict(EPImplementationInterface().items()).get(name)
    if isinstance(known_ep, type) and issubclass(known_ep, TrimtabEP):
        there, theirs = known_ep.options, known_ep.kernels.candidates
        if (there, theirs) != (options, choice.candidates):
            raise ConfigError(
                f"name={name!r} is registered with {there} and kernels {theirs[0]!r}: give these a name of their own"
            )
        return
    if name == "eager" or known is not None or known_ep is not None:
        raise ConfigError(f"name={name!r}: transformers has an implementation of that name; choose another")
    for registry in (ALL_EXPERTS_FUNCTIONS, ALL_FP8_EXPERTS_FUNCTIONS):  # by the second it says what it refuses
        registry.register(name, partial(experts_forward, kernels=choice))
    own = {"experts_name": name, "options": options, "kernels": choice, "built": count(), "living": WeakSet()}
    EPImplementationInterface.register(name, type("TrimtabEP", (TrimtabEP,), own))


if not TYPE_CHECKING:
    __getattr__, __dir__, __all__ = lazy_names(__name__)
    __all__ += ["register"]
