"""Megatron-Core's own unit tests of its MoE on a CPU, with its MoE layer or with ours put in its place.

    python -m helpers.megatron_units CHECKOUT [FILE ...]      with PYTHONPATH=tests; CHECKOUT: Megatron-LM's sources
    RANKS=8 ... CHECKOUT FILE::TEST                           one test on so many ranks

Their test files run as they are, without their conftest.py, which downloads data. CUDA is stood in for by
`helpers.megatron_cpu`; besides, while tests are collected a GPU is there, so that marks do not skip them, NCCL is Gloo,
and what `megatron.training` takes from Python 3.12 is there on 3.11. Loaded into their pytest as a plugin.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import typing
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.ports import free_port

LAYERS = ("megatron", "trimtab-dispatcher", "trimtab")
"""Whose MoE layer runs: Megatron's; ours around its experts; ours with our experts."""
FILES = (
    "test_moe_layer", "test_routers", "test_token_dispatcher", "test_a2a_token_dispatcher", "test_shared_experts",
    "test_router_replay", "test_qb_routing", "test_sequential_mlp", "test_latent_moe_layer", "test_aux_loss",
)  # fmt: skip
FOLDER = "tests/unit_tests/transformer/moe"
SECONDS = 400


def pytest_configure(config: Any) -> None:
    """Before their modules are imported."""
    import torch
    import torch.distributed as dist
    import typing_extensions

    typing.override = typing_extensions.override  # type: ignore[attr-defined, unused-ignore]
    from helpers.megatron_cpu import cuda_stood_in

    stood_in = cuda_stood_in()
    stood_in.__enter__()
    config.add_cleanup(lambda: stood_in.__exit__(None, None, None))
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: int(os.environ.get("WORLD_SIZE", "1"))
    torch.cuda.set_device = lambda device: None
    begin: Callable[..., None] = dist.init_process_group
    dist.init_process_group = lambda backend, **options: begin("gloo", **options)


def pytest_collection_finish(session: Any) -> None:
    """The name MoELayer is ours in their tests and where specs are made; Megatron's own module keeps its own."""
    import torch

    torch.cuda.is_available = lambda: False
    layer = os.environ["MEGATRON_UNITS_LAYER"]
    if layer == "megatron":
        return
    from megatron.core.models.gpt import moe_module_specs

    ours = _ours(whole=layer == "trimtab")
    theirs = [module for name, module in sys.modules.items() if name.startswith("tests.unit_tests.")]
    for module in [*theirs, moe_module_specs]:
        if hasattr(module, "MoELayer"):
            module.MoELayer = ours


def _ours(*, whole: bool) -> Any:
    from trimtab.integrations.megatron import Experts, MoELayer
    from trimtab.integrations.megatron.protocol import ModuleSpec

    class Ours(MoELayer):
        """What `use` puts into a spec, called as Megatron's layer is."""

        def __init__(self, config: Any, submodules: Any = None, *args: Any, **options: Any) -> None:
            if whole:
                submodules = dataclasses.replace(submodules, experts=ModuleSpec(module=Experts))
            super().__init__(config, submodules, *args, **options)

    return Ours


@pytest.fixture(scope="session")
def tmp_path_dist_ckpt(tmp_path_factory: Any) -> Path:
    """Their fixture, for one rank."""
    made: Path = tmp_path_factory.mktemp("checkpoints")
    return made


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: Any, call: Any) -> Iterator[None]:
    """One line a test that ran: its name, its outcome, and in one line why it failed."""
    made = yield
    report = made.get_result()  # type: ignore[attr-defined]
    if report.when == "call" or not report.passed:
        why = str(call.excinfo.value).strip().splitlines()[:1] if call.excinfo else []
        line = {"test": item.nodeid.rpartition("/")[2], "outcome": report.outcome, "why": "".join(why)[:150]}
        with Path(os.environ["MEGATRON_UNITS_TO"]).open("a") as file:
            print(json.dumps(line), file=file)


def run(checkout: Path, layer: str, what: str, ranks: int = 1) -> dict[str, tuple[str, str]]:
    """Outcome, and why, of each test of a file (or one test of it); on several ranks the worst, which all must give."""
    here = Path(__file__).parents[1]
    with tempfile.TemporaryDirectory() as folder:
        port, processes = str(free_port()), []
        for rank in range(ranks):
            path = os.pathsep.join([str(checkout), str(here.parent / "src"), str(here)])
            env = os.environ | {"PYTHONPATH": path, "MEGATRON_UNITS_LAYER": layer, "OMP_NUM_THREADS": "1"}
            env |= {"MEGATRON_UNITS_TO": f"{folder}/{rank}", "RANK": str(rank), "LOCAL_RANK": str(rank)}
            env |= {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "localhost", "MASTER_PORT": port}
            command = [sys.executable, "-m", "pytest", "-q", "--noconftest", "-p", "helpers.megatron_units"]
            command += ["-p", "no:cacheprovider", "-p", "no:xdist", "--rootdir", str(checkout), f"{FOLDER}/{what}"]
            log = Path(folder, f"{rank}.log").open("w")  # noqa: SIM115
            processes.append(subprocess.Popen(command, cwd=checkout, env=env, stdout=log, stderr=subprocess.STDOUT))
        for process in processes:
            try:
                process.wait(SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
        found: dict[str, tuple[str, str]] = {}
        for rank in range(ranks):
            path = Path(folder, str(rank))
            for line in map(json.loads, path.read_text().splitlines() if path.exists() else []):
                if found.get(line["test"], ("passed",))[0] != "failed":
                    found[line["test"]] = line["outcome"], line["why"]
        if not found:
            last = Path(folder, "0.log").read_text().splitlines()[-8:]
            print("\n".join(last), file=sys.stderr)
        return found


def main(checkout: Path, given: list[str]) -> None:
    """Print the table, and what passes with Megatron's layer alone."""
    ranks = int(os.environ.get("RANKS", "1"))
    print(f"| {ranks} rank(s) | " + " | ".join(LAYERS) + " |\n|---|" + "---|" * len(LAYERS))
    lost = []
    for what in given or [f"{name}.py" for name in FILES]:
        found = {layer: run(checkout, layer, what, ranks) for layer in LAYERS}
        counts = [Counter(outcome for outcome, _ in tests.values())["passed"] for tests in found.values()]
        print(f"| {what.removesuffix('.py')} | " + " | ".join(map(str, counts)) + " |", flush=True)
        for test, (outcome, _) in found["megatron"].items():
            for layer in LAYERS[1:]:
                other, why = found[layer].get(test, ("missing", ""))
                if outcome == "passed" != other:
                    lost.append(f"* `{test}`, {layer}: {other}: {why}")
    print("\n" + "\n".join(lost))


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), sys.argv[2:])
