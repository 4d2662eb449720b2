"""torchtitan's own unit tests with our dispatcher in the place of its all-to-all one:

    python -m helpers.upstream FOLDER/OF/torchtitan/tests/unit_tests        (with tests/ and torchtitan on the path)

Every name under which torchtitan or its tests hold the class is replaced before a test runs. Its tests of a helper of
that class are answered by our plan. Not collected by pytest: torchtitan does not install its tests.
"""

from __future__ import annotations

import importlib
import sys
import unittest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchtitan.models.common import config_utils, token_dispatcher

from trimtab.experts.plan import plan_experts
from trimtab.integrations.torchtitan import TokenDispatcher
from trimtab.integrations.torchtitan.exchange import ToExperts

FILES = ("test_expert_parallel", "test_moe", "test_inference_moe")


class InTheirPlace(TokenDispatcher):
    """Ours, with the helper that torchtitan's tests look at."""

    Config = TokenDispatcher.Config

    def _permute(self, rows: Tensor, counts_Pe: Tensor) -> tuple[Any, Tensor, Tensor, Tensor]:
        """Rows grouped by (rank, expert), as counted, in the order in which our plan lays them out."""
        experts = counts_Pe.shape[0] // self.ep_mesh.size()
        ids = torch.arange(experts).repeat(self.ep_mesh.size()).repeat_interleave(counts_Pe)
        plan = plan_experts(ids[:, None], experts)
        return rows.shape, ToExperts.apply(rows, plan, False), plan.row_R, plan.offsets_e.diff()


def main(folder: str) -> bool:
    token_dispatcher.AllToAllTokenDispatcher = config_utils.AllToAllTokenDispatcher = InTheirPlace
    sys.path.insert(0, folder)
    suite = unittest.TestSuite()
    for name in FILES:
        if not (Path(folder) / f"{name}.py").exists():
            raise FileNotFoundError(f"{folder} has no {name}.py: is it torchtitan's tests/unit_tests?")
        suite.addTests(unittest.defaultTestLoader.loadTestsFromModule(importlib.import_module(name)))
    return unittest.TextTestRunner(verbosity=2).run(suite).wasSuccessful()


if __name__ == "__main__":
    sys.exit(not main(sys.argv[1]))
