"""The server that ranks are forked from: what they inherit, and a folder for temporary files whose path no socket
takes, as job managers and test runners make them."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import time
from collections.abc import Hashable
from pathlib import Path

import pytest
import torch

from helpers.commands import run_python
from helpers.forks import start
from helpers.ranks import run_ranks
from trimtab.errors import BackendError
from trimtab.kernels import compiled


def inherited() -> dict[Hashable, str | None]:
    """What was found wrong with the kernels before this rank began, by what was asked."""
    kernels = compiled._shared.get("cpu")
    return {"there are": "none"} if kernels is None else kernels._faults


def test_ranks_inherit_tested_kernels() -> None:
    try:
        compiled.compiled_kernels()  # the server compiles none
    except BackendError as error:
        pytest.skip(str(error))
    asked = ("experts", torch.float32, torch.bfloat16, torch.float64)
    assert run_ranks(inherited, 2) == [dict.fromkeys(asked)] * 2


def imported_again(cache: str) -> list[list[object]]:
    """What a server would keep for its ranks, where kernels fail or have to be compiled; its number of threads."""
    from trimtab.verify import tested_kernels  # as the server alone does

    torch.set_num_threads(2)
    kept = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "compiled_kernels", lambda: 1 / 0)
        patch.setattr(compiled, "are_made", lambda: True)
        kept.append([*importlib.reload(tested_kernels).KEPT, torch.get_num_threads()])
    for name, path in (("XDG_CACHE_HOME", cache), ("CXX", "no such")):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(name, path)
            kept.append([*importlib.reload(tested_kernels).KEPT, torch.get_num_threads()])
    return kept


def test_no_server_is_ended_by_kernels_nor_waits_for_a_compiler(tmp_path: Path) -> None:
    assert run_ranks(imported_again, 1, str(tmp_path)) == [[[2]] * 3]
    assert not list(tmp_path.iterdir())


def test_a_long_tmpdir(tmp_path: Path) -> None:
    long = tmp_path / ("long" * 20)
    long.mkdir()
    command = ("-m", "trimtab", "verify", "--quick", "--only", "2r-ep2/zipf1/float32", "--out", "out")
    more = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"), "TMPDIR": str(long)}  # a cache that torch leaves
    done = run_python(*command, cwd=tmp_path, env=os.environ | more)
    assert done.returncode == 0, done.stderr
    assert not any(long.iterdir())


def leaves_traces() -> None:
    import torch.distributed.pipelining  # nobody else does

    os.environ["LEFT"] = "behind"
    torch.set_default_dtype(torch.float64)


def what_is_there() -> tuple[bool, str | None, torch.dtype]:
    return "torch.distributed.pipelining" in sys.modules, os.environ.get("LEFT"), torch.get_default_dtype()


def test_a_rank_begins_with_what_earlier_ones_imported_and_nothing_else_of_them() -> None:
    run_ranks(leaves_traces, 1)
    assert run_ranks(what_is_there, 2) == [(True, None, torch.float32)] * 2


def test_how_a_fork_ended_is_known() -> None:
    left, killed = start(os._exit, 7), start(time.sleep, 60.0)
    left.join()
    killed.kill()
    assert (left.exitcode, killed.exitcode) == (7, -signal.SIGKILL)
    with pytest.raises(AssertionError, match="no_such_module"):
        start(Unknown())  # type: ignore[arg-type]


class Unknown:
    """Of a module that the server cannot find."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return importlib.import_module, ("no_such_module",)
