"""All known failures of peers: the cases that each explains, what it is, and the lines that show it elsewhere."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from peers.judge import Judged
from peers.registry import Peer
from trimtab.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Failure:
    """peers: names that begin so. message: a pattern for what a case said. says: what happens, to whom, and what works.

    prelude: whose, of `PRELUDES`. lines: what every rank runs behind it, two as a rule. expected: a pattern for what
    each rank ends with, in turn. folders: of `.peers`.
    ours: run a second time with trimtab in Megatron's layer, and what each rank ends with there.
    fails: of Megatron's versions those in which it does; in the others all ranks end.
    gloo: it is of the CPU's backend or of what stands in here, and not to be expected on GPUs.
    """

    id: str
    peers: str
    message: str
    title: str
    says: str
    prelude: str
    lines: str
    expected: Sequence[str]
    folders: tuple[str, ...] = ()
    ours: Sequence[str] = ()
    fails: tuple[str, ...] = ()
    gloo: bool = False

    def explains(self, peer: Peer, case: Judged) -> bool:
        return bool(re.match(self.peers, peer.name)) and bool(re.search(self.message, case.said))

    def missed(self, found: Sequence[str], *, ours: bool = False, version: str = "") -> list[str]:
        """What did not come out as expected."""
        wanted = self.ours if ours else self.expected
        if self.fails and version and version not in self.fails and not ours:
            wanted = ["^ends"] * len(wanted)
        pairs = enumerate(zip(wanted, found, strict=True))
        return [f"rank {rank}: expected {w!r}, found {f!r}" for rank, (w, f) in pairs if not re.search(w, f)]


LIT = r"RuntimeError: element 0 of tensors does not require grad"
VIEW = r"RuntimeError: cannot reshape tensor of 0 elements"
STAYS = r"ends|waits|hangs|RuntimeError|dies"
"""What the other ranks of a group do, which depends on how far they came."""

KNOWN = (
    Failure(
        id="transformers-eager-no-tokens", peers="transformers-eager|peft-eager", message=LIT,
        title="transformers, eager experts: no gradient without tokens",
        says="A rank without tokens gets zeros that no parameter is part of. In a model where something else needs a "
        "gradient the experts' stay None there, which matters where ranks reduce them; where nothing else does, "
        "backward raises. `grouped_mm` is right, and over expert parallelism so is eager: all_to_all sends a row.",
        prelude="transformers", expected=(LIT,),
        lines='x = torch.zeros(1, 0, 16, requires_grad=True)\nblock("eager")(x).sum().backward()',
    ),
    Failure(
        id="peft-expert-parallel", peers="peft", message="mixed torch.Tensor and DTensor",
        title="peft: adapters of parameters over transformers' expert parallelism",
        says="peft adds scale * B A to the whole parameter, which is a DTensor there: PyTorch stops the first forward "
        "on every rank, with a clear message. peft supports its tensor parallelism; for parameters of experts "
        "under its expert parallelism we found no promise.",
        prelude="peft", folders=("peft",), expected=("mixed torch.Tensor and DTensor",) * 2,
        lines='mlp = adapted(laid_out(model("grouped_mm")))\nmlp(torch.randn(1, 4, 16))',
    ),
    Failure(
        id="llep-no-tokens", peers="llep", message=VIEW, title="LLEP: a rank without tokens",
        says="`.view(batch, -1, hidden)` of the result is ambiguous for no tokens. The other ranks wait in backward.",
        prelude="llep", folders=("llep",), expected=(VIEW, STAYS),
        lines="group = dist.group.WORLD\nexperts(4 * rank, group)",
    ),
    Failure(
        id="llep-second-group", peers="llep", message="is not part of group|waits|no answer",
        title="LLEP: an expert-parallel group that does not begin at rank 0",
        says="Weights are sent to ranks of the group, where `P2POp` takes ranks of the world: with more than one group "
        "the second fails as soon as a weight moves. With one group of all ranks, as its test has, all is right.",
        prelude="llep", folders=("llep",), expected=("ends", "ends", "not part of group", "not part of group"),
        lines="groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]\nexperts(4, groups[rank // 2], expert=0)",
    ),
)  # fmt: skip

BOTH = ("0.16", "0.19")
ENDS, FINITE, NAN = "^ends$", "^ends: router's gradient finite$", "^ends: router's gradient NaN$"
ENDED = r"dies|Connection reset|closed by peer"
WAITS = "waits|closed by peer|Connection reset"
"""What becomes of the others on a CPU: with NCCL they wait for the watchdog."""
ROUTER = ' The fault is in Megatron\'s losses, so with trimtab it takes `use(spec, router="trimtab")`.'


def _known(
    id: str, title: str, says: str, lines: str, expected: tuple[str, str], ours: str = ENDS, *,
    dispatchers: str = "megatron(-allgather)?-0", message: str = "^$", gloo: bool = False,
    fails: tuple[str, ...] = BOTH,
) -> Failure:  # fmt: skip
    return Failure(
        id=f"megatron-{id}", title=f"Megatron-Core: {title}", says=says, peers=dispatchers, message=message, gloo=gloo,
        prelude="megatron", lines=lines, expected=expected, ours=(ours, ours), fails=fails,
    )  # fmt: skip


def _of_losses() -> list[Failure]:
    """What balance losses do where a rank has no token, the router's line repaired."""
    step = "said = says_finite(step(layer, torch.randn(4 * rank, 1, 16)))"
    made = []
    for name, error in (
        ("aux_loss", "ZeroDivisionError"), ("global_aux_loss", "ZeroDivisionError"), ("seq_aux_loss", VIEW),
    ):  # fmt: skip
        options = f'moe_router_load_balancing_type="{name}", moe_aux_loss_coeff=0.1'
        made.append(_known(
            f"no-tokens-{name.replace('_', '-')}", f"a rank without tokens, {name}",
            "With the router's line repaired, the loss divides by its number of tokens, or reshapes none." + ROUTER,
            f'layer = no_view() or moe_layer(router="trimtab", {options})\n{step}', (error, WAITS), FINITE,
        ))  # fmt: skip
    return made


KNOWN_MEGATRON: tuple[Failure, ...] = (
    _known(
        "no-tokens", "a rank without tokens",
        "`RouterGatingLinearFunction` ends with `output.view(*inp_shape[:-1], -1)`, which is ambiguous for no tokens. "
        "The rank raises, the others wait for it in their exchange. With `.view(*inp_shape[:-1], weight.shape[0])` in "
        "that one line alltoall is right.",
        "layer = moe_layer()\nstep(layer, torch.randn(4 * rank, 1, 16))", (VIEW, WAITS),
        message=VIEW,
    ),
    _known(
        "allgather-uneven", "allgather, ranks with unequal numbers of tokens",
        "It gathers as if every rank had as many as this one. Here Gloo notices and ends a process; alltoall is right.",
        'layer = moe_layer(moe_token_dispatcher_type="allgather")\nstep(layer, torch.randn(6 - 3 * rank, 1, 16))',
        (ENDED, ENDED), dispatchers="megatron-allgather", message="died|mismatch|gloo|Gloo|no answer|Connection reset",
    ),
    _known(
        "allgather-no-tokens", "allgather, a rank without tokens, the router's line repaired",
        "The rank without tokens gathers as many from the others, none, and comes to its end without having "
        "computed theirs; the other waits. With alltoall the same lines are right.",
        'layer = no_view() or moe_layer(moe_token_dispatcher_type="allgather")\n'
        "step(layer, torch.randn(4 * rank, 1, 16))", (ENDS, "hangs|waits"),
    ),
    *_of_losses(),
    _known(
        "no-tokens-z-loss", "a rank without tokens, z-loss",
        "With the router's line repaired gradients are finite, and what is logged of the loss is a mean of nothing."
        + ROUTER,
        'layer = no_view() or moe_layer(router="trimtab", moe_z_loss_coeff=0.1)\n'
        'step(layer, torch.randn(4 * rank, 1, 16)); said = logged("z_loss")', ("logged NaN", "logged finite"),
        "logged (finite|nothing)",
    ),
    _known(
        "all-padding", "aux_loss on a rank whose tokens are all padding",
        "The loss divides by the rank's number of real tokens." + ROUTER,
        'layer = moe_layer(router="trimtab", moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=0.1)\n'
        "said = says_finite(step(layer, torch.randn(4, 1, 16), padding_mask=torch.full((1, 4), rank == 0)))",
        (NAN, FINITE), FINITE,
    ),
    _known(
        "bias-padding", "expert bias and a padding mask",
        "The map [T, E] and the mask [T] meet without a new axis; where E happens to be T nothing is said. Fixed on "
        "Megatron's main branch. The fault is in its router, so with trimtab it takes another one as well.",
        'layer = moe_layer(router="trimtab", moe_router_enable_expert_bias=True, moe_router_score_function="sigmoid")\n'
        "said = says_finite(step(layer, torch.randn(6, 1, 16), padding_mask=torch.arange(6)[None] > 3))",
        ("must match the size", "must match the size"), FINITE,
    ),
    _known(
        "fewer-than-k", "alltoall, a router that gives a token fewer than K experts",
        "The number of rows is taken as T * K, unless tokens are dropped by capacity. Megatron's own router always "
        "gives K, so this meets those who put in one of their own. allgather is right.",
        "layer = moe_layer(); layer.router.register_forward_hook(fewer)\nstep(layer, torch.randn(4, 1, 16))",
        ("Split sizes doesn't match", "Split sizes doesn't match"), dispatchers="megatron-0", fails=("0.19",),
        message="Split sizes doesn't match|split_sizes to sum exactly",
    ),
    _known(
        "wanted-on-one-rank", "gradients wanted on one rank alone",
        "The exchange of the backward is entered by ranks whose tokens or experts need a gradient: with frozen experts "
        "and inputs that need one on some ranks alone, they wait for the rest.",
        "layer = moe_layer().requires_grad_(False)\nstep(layer, torch.randn(4, 1, 16), wanted=rank == 0)",
        ("hangs", ENDS),
    ),
    _known(
        "capacity-pad", "pad to capacity, ranks with unequal numbers of tokens",
        "The capacity comes from the rank's own tokens, the splits are equal. Refused by name with trimtab, when the "
        "layer is built.",
        "layer = moe_layer(moe_expert_capacity_factor=1.0, moe_pad_expert_input_to_capacity=True)\n"
        "step(layer, torch.randn(8 - 4 * rank, 1, 16))", (ENDED, ENDED), "ConfigError: .*pad_expert_input_to_capacity",
    ),
    _known(
        "etp-gloo", "expert tensor parallelism, ranks that receive unequal numbers of rows",
        "Gloo's all-gather of a list takes equal sizes alone. Megatron's code allows for unequal ones, and NCCL takes "
        "them.",
        "layer = moe_layer(ep=1, etp=2)\nstep(layer, torch.randn(6 - 3 * rank, 1, 16))",
        ("Gloo::allgather: invalid tensor size", "Gloo::allgather: invalid tensor size"), gloo=True,
        message="Gloo::allgather: invalid tensor size",
    ),
)  # fmt: skip

FAILURES: Sequence[Failure] = (*KNOWN, *KNOWN_MEGATRON)


def failure_named(name: str) -> Failure:
    """The failure of that id. Raises ConfigError where there is none."""
    found = [failure for failure in FAILURES if failure.id == name]
    if not found:
        raise ConfigError(f"--reproduce {name}: must be one of {', '.join(f.id for f in FAILURES)}")
    return found[0]
