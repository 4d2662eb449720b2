"""Each finding from facts that are fed in, the kernels' self-test on broken kernels, and the command as run."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import trimtab as package
from helpers.commands import run_python
from helpers.ranks import run_ranks
from trimtab.cli.main import build_parser, main
from trimtab.dispatch.all_to_all import AllToAll
from trimtab.dispatch.dispatcher import Dispatcher
from trimtab.doctor import Finding, as_text, backends, machine
from trimtab.guard import record
from trimtab.guard.record import Place
from trimtab.kernels import choose
from trimtab.kernels.api import Block
from trimtab.kernels.choose import BACKENDS, KernelChoice
from trimtab.kernels.torch_mm import TorchBackend
from trimtab.validation import DTYPES
from trimtab.verify.cases import Case, plan_cases
from trimtab.verify.collect import Verdict


def by_where(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.where: finding for finding in findings}


def test_versions() -> None:
    assert machine.judge_torch("2.13.0+cu126", "CUDA 12.6, NCCL 2.29.3").severity == "ok"
    old = machine.judge_torch("2.9.1", "CUDA none")
    assert (old.severity, old.do) == ("broken", "install torch 2.11 or newer")
    for version, severity in (("5.22.1", "warn"), ("6.0", "warn"), ("5.23.0", "ok"), ("5.100.0", "ok"), (None, "note")):
        assert machine.judge_package("transformers", version).severity == severity


def test_transformers_that_cannot_be_imported_is_not_ok(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    found = by_where(machine.versions())["transformers"]
    assert found.severity == "warn"
    assert "is installed and cannot be imported: ModuleNotFoundError" in found.what


def test_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.judge_cores(8, 8).severity == "ok"
    crowded = machine.judge_cores(8, 64)
    assert crowded.severity == "warn"
    assert "OMP_NUM_THREADS" in crowded.do
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(socket, "gethostname", lambda: "no such host.")
    found = by_where(machine.environment())
    assert found["gpu"].severity == "note"
    assert found["host name"].severity == "warn"
    assert "interface of lo" in found["host name"].do


@pytest.mark.parametrize(
    ("name", "value", "severity", "says"),
    [
        ("GLOO_SOCKET_IFNAME", "eth0", "ok", ""), ("GLOO_SOCKET_IFNAME", "eth", "broken", "lo, eth0"),
        ("GLOO_SOCKET_IFNAME", "ib0", "broken", "no such network interface"), ("NCCL_SOCKET_IFNAME", "eth", "ok", ""),
        ("NCCL_SOCKET_IFNAME", "=eth", "broken", "no such network interface"),
        ("NCCL_SOCKET_IFNAME", "^docker", "ok", ""), ("NCCL_P2P_DISABLE", "1", "warn", "do not talk directly"),
        ("NCCL_P2P_DISABLE", "0", "ok", ""), ("NCCL_IB_DISABLE", "1", "warn", "InfiniBand"),
        ("CUDA_LAUNCH_BLOCKING", "1", "warn", "every kernel"), ("TORCH_DISTRIBUTED_DEBUG", "DETAIL", "warn", "slowly"),
        ("TORCH_DISTRIBUTED_DEBUG", "OFF", "ok", ""),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0", "warn", "waits for ever"),
        ("TORCH_FR_BUFFER_SIZE", "0", "warn", "leaves no trace"), ("TORCH_FR_BUFFER_SIZE", "2000", "ok", ""),
        ("OMP_NUM_THREADS", "4", "ok", "4"), ("MALLOC_TRIM_THRESHOLD_", "268435456", "ok", "268435456"),
    ],
)  # fmt: skip
def test_environment(name: str, value: str, severity: str, says: str) -> None:
    (one,) = machine.judge_environment({name: value}, ("lo", "eth0"))
    assert one.where.startswith(name)
    assert one.severity == severity
    assert says in one.what + one.do


def test_only_variables_that_matter_are_shown() -> None:
    (shown,) = machine.judge_environment({"MY_TOKEN": "secret", "NCCL_DEBUG": "INFO"}, ())
    assert (shown.where, shown.what) == ("NCCL_DEBUG", "INFO")


@pytest.mark.parametrize(
    ("gloo", "nccl", "gpus", "severities"),
    [(True, True, 8, ["ok", "ok"]), (True, True, 0, ["ok", "note"]), (False, False, 1, ["broken", "broken"])],
)
def test_process_groups(gloo: bool, nccl: bool, gpus: int, severities: list[str], monkeypatch: Any) -> None:
    monkeypatch.setattr(dist, "is_gloo_available", lambda: gloo)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: nccl)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert [finding.severity for finding in backends.process_groups()] == severities


class Wrong(TorchBackend):
    name = "wrong"

    def grouped_mm(self, x_RA: Tensor, w_eAB: Tensor, block: Block, out: Tensor | None = None) -> Tensor:
        return super().grouped_mm(x_RA, w_eAB, block, out).mul_(2)


def test_kernels_are_tested_and_wrong_ones_named(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    found = by_where(backends.kernels())
    assert found.keys() == {f"kernels {name}" for name in ("auto", *BACKENDS)}
    assert all(finding.severity in ("ok", "note") for finding in found.values())
    for dtype in DTYPES:
        kernels = KernelChoice("auto").on(cpu, dtype).name
        taken = next(line for line in found["kernels auto"].what.splitlines() if str(dtype)[6:] in line)
        assert f": {kernels}: " in taken
    bad = backends.Tried(dtype="float32", chosen=True, fault="output with a NaN tail: wrong values")
    broken = backends.judge_kernels("a", cpu, [bad])
    assert broken.severity == "broken"
    assert "WRONG: output with a NaN tail" in broken.what
    spare = backends.judge_kernels("a", cpu, [dataclasses.replace(bad, chosen=False)])
    assert spare.severity == "warn"
    never = backends.judge_kernels("a", cpu, [dataclasses.replace(bad, fault=None, refused="the CPU only")])
    assert (never.severity, never.what, never.do) == ("note", "cannot run on cpu: the CPU only", "")
    monkeypatch.setitem(BACKENDS, "wrong", Wrong)

    def auto_is(*names: str) -> None:
        for module in (choose, backends):
            monkeypatch.setattr(module, "names_for", lambda name, _: names if name == "auto" else (name,))

    auto_is("wrong", "torch")
    found = by_where(backends.kernels())
    assert found["kernels wrong"].what.count("WRONG: ") == len(DTYPES)
    assert found["kernels auto"].what.count(": torch: what comes before it in the order wrong, torch ") == 1
    assert found["kernels wrong"].severity == "broken"
    auto_is("wrong")
    assert by_where(backends.kernels())["kernels auto"].severity == "broken"


def test_a_layer_over_two_processes() -> None:
    gloo, shared = plan_cases("full", 2, only=backends.LAYER)

    def judged(status: Any, *details: str, case: Case = gloo) -> Finding:
        return backends.judge_layer(Verdict(case=case, status=status, errors={"y": 1e-16}, details=list(details)))

    assert judged("ok").severity == "ok"
    assert judged("mismatch", "rank 0: y[0]").severity == "broken"
    assert judged("lacking", "no shared memory").severity == "note"
    assert "GLOO_SOCKET_IFNAME=lo" in judged("hang", "rank(s) 0: no answer within 60 s").do
    own = judged("error", "rank 0: TypeError: forward() missing an argument")
    assert own.severity == "broken"
    assert "GLOO_SOCKET_IFNAME" not in own.do
    assert [judged("error", "BackendError: no", case=case).severity for case in (gloo, shared)] == ["broken", "note"]


def test_text_is_aligned_and_narrow() -> None:
    findings = [
        Finding("ok", "torch", "2.13"),
        Finding("broken", "a longer place", "word " * 60 + "\n  indented", "do this\nthen that"),
    ]
    lines = as_text(findings).splitlines()
    assert max(map(len, lines)) <= 90
    assert lines[0] == "ok     torch           2.13"
    margin = " " * 23
    assert all(line.startswith(margin) for line in lines[2:])
    assert margin + "  indented" in lines
    assert lines[-2:] == [margin + "-> do this", margin + "-> then that"]


def trimtab(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return run_python("-m", "trimtab", "doctor", *arguments, env=os.environ | environment)


def test_the_command_on_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert told["ok"] is True
    assert {finding["part"] for finding in told["findings"]} == {
        "versions", "machine and environment", "process groups", "kernels, self-tested", "a layer over two processes",
    }  # fmt: skip
    said = {f["where"]: f["what"] for f in told["findings"] if f["part"] == "a layer over two processes"}
    assert list(said) == ["2 ranks, gloo", "2 ranks, shared_memory"]
    assert all("from the truth" in what for what in said.values())


def test_the_command_finds_a_bad_interface_and_says_what_to_do() -> None:
    done = trimtab(GLOO_SOCKET_IFNAME="nothing0", OMP_NUM_THREADS="1")
    assert done.returncode == 1
    assert "broken GLOO_SOCKET_IFNAME=nothing0" in done.stdout
    assert done.stdout.splitlines()[-1] == "2 broken: see the lines that begin so"
    assert "set GLOO_SOCKET_IFNAME=lo and run this again" in " ".join(done.stdout.split())


KERNELS_WITH = """
import sys
from trimtab.doctor import backends
from trimtab.doctor import as_text
found = backends.kernels()
print(as_text(found))
sys.exit(any(f.severity == "broken" for f in found))
"""


@pytest.mark.parametrize(
    ("compiler", "code", "says"),
    [
        ("/bin/false", 1, "broken kernels cpu cannot run on cpu: the C++ compiler failed: /bin/false"),
        ("no-cxx", 1, "broken kernels cpu cannot run on cpu: "),
        ("", 0, "note kernels cpu cannot run on cpu: no C++ compiler"),
    ],
)
def test_a_compiler_that_was_named_and_fails_is_broken_and_none_is_a_note(
    compiler: str, code: int, says: str, tmp_path: Path
) -> None:
    path = {} if compiler else {"PATH": str(tmp_path)}
    environment = os.environ | path | {"CXX": compiler, "XDG_CACHE_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = run_python("-c", KERNELS_WITH, env=environment)
    said = " ".join(done.stdout.split())
    assert done.returncode == code, done.stderr
    assert says in said
    assert ("-> unset CXX, or let it name a C++ compiler that works" in said) == bool(code)
    assert ("'no-cxx' is no program" in said) == (compiler == "no-cxx")
    assert "UserWarning" not in done.stdout + done.stderr


def test_the_command_on_traces(tmp_path: Path) -> None:
    for rank in (0, 1):
        entry = {
            "process_group": ("0", "default_pg"), "collective_seq_id": 3 - rank, "profiling_name": "gloo:all_reduce",
            "state": "scheduled", "retired": rank == 1, "input_sizes": [[4]], "input_dtypes": ["Float"], "frames": [],
        }  # fmt: skip
        (tmp_path / f"rank_{rank}").write_bytes(pickle.dumps({"version": "2.10", "entries": [entry]}))
    done = trimtab("--trace", str(tmp_path))
    assert done.returncode == 1
    assert "stopped at its collective 3: all_reduce" in done.stdout
    assert "find out why rank 1 did not come" in done.stdout
    assert trimtab("--trace", str(tmp_path / "gone")).returncode == 2


def waits_on_rank(folder: str) -> None:
    """Rank 0 waits in combine for rank 1, which stays with its experts until it is told to go on."""
    rank, release = dist.get_rank(), Path(folder, "release")
    dispatcher = Dispatcher(4, AllToAll(dist.group.WORLD), layer="model.layers.5")
    rows = dispatcher.dispatch(torch.randn(3, 8), torch.tensor([[0, 2]] * 3), torch.rand(3, 2))
    Path(folder, f"{rank}.tmp").write_text(str(os.getpid()))
    Path(folder, f"{rank}.tmp").rename(Path(folder, f"{rank}.pid"))
    while rank == 1 and not release.exists():
        time.sleep(0.02)
    dispatcher.combine(rows.x_MD, rows)


def test_the_command_says_where_the_ranks_of_a_job_stand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files, told = [tmp_path / "0.pid", tmp_path / "1.pid"], {}
    end = time.monotonic() + 40
    with ThreadPoolExecutor(1) as pool:
        ranks = pool.submit(run_ranks, waits_on_rank, 2, str(tmp_path), deadline=60.0)
        try:
            while time.monotonic() < end and not any("waiting in combine" in what for what in told.values()):
                time.sleep(0.05)
                if all(file.exists() for file in files):
                    pids = [file.read_text() for file in files]
                    code = main(["doctor", "--places", "--json"])
                    found = json.loads(capsys.readouterr().out)["findings"]
                    # Other jobs of this host are told of too: another test may hold stopped ranks.
                    assert code == int(any(f["severity"] == "broken" for f in found))
                    mine = [f for f in found if any(f"pid {pid}," in f["where"] for pid in pids)]
                    assert all(f["severity"] == "ok" for f in mine), mine
                    told = {f["where"]: f["what"] for f in mine}
        finally:
            (tmp_path / "release").touch()
        ranks.result()
    waiting, busy = (told[f"pid {pid}, rank {rank} of its group"] for rank, pid in enumerate(pids))
    assert re.fullmatch(r"waiting in combine forward of layer model\.layers\.5, call 0, for \d+ s", waiting)
    assert re.fullmatch(r"in experts forward of layer model\.layers\.5, call 0, for \d+ s", busy)


def test_a_stopped_process_is_broken_and_none_at_all_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        monkeypatch.setattr(record, "time", SimpleNamespace(monotonic=lambda: 100.0))
        place = Place(layer="a", phase="count", direction="forward", call=2, since=92.8)
        (stopped,) = machine.judge_places([(process.pid, 3, place)])
    finally:
        process.kill()
        process.wait()
    assert (stopped.severity, stopped.where) == ("broken", f"pid {process.pid}, rank 3 of its group")
    assert stopped.what.startswith("in count forward of layer a, call 2, for 7 s: the process is stopped")
    (none,) = machine.judge_places([])
    assert none.severity == "note"


def test_the_page_on_hangs_names_commands_and_modules_that_are_there() -> None:
    page = (Path(__file__).parents[2] / "docs" / "hangs.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```(\w+)\n(.*?)```", page, re.DOTALL)
    commands = [line for kind, text in blocks if kind == "sh" for line in text.splitlines() if "trimtab doctor" in line]
    assert len(commands) == 3
    for command in commands:
        arguments = command.partition("trimtab doctor")[2].partition("||")[0].split()
        assert build_parser().parse_args(["doctor", *arguments]).command == "doctor"
    scripts = [text for kind, text in blocks if kind == "python"]
    assert len(scripts) == 3
    for script in scripts:
        compile(script, "hangs.md", "exec")
        for module, name in re.findall(r"^from (trimtab\S*) import (\w+)", script, re.MULTILINE):
            assert hasattr(importlib.import_module(module), name)
        assert all(hasattr(package, name) for name in re.findall(r"\btrimtab\.([A-Z]\w+)", script))
    for module, name in re.findall(r"`(trimtab(?:\.[a-z_]+)+)\.(\w+)`", page):
        assert hasattr(importlib.import_module(module), name)
