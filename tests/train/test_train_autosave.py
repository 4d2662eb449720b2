"""What is lost when a run ends early: the step that was being taken, or half an hour; and nothing is left over."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from helpers.commands import DEADLINE, finish, ranks_of, run_cli, run_python, start_cli, wait_for
from helpers.train_runs import numbers
from trimtab.checkpoint import folder as on_disk
from trimtab.checkpoint.tensors import make_index
from trimtab.cli.main import main
from trimtab.errors import InputError, TrimtabError
from trimtab.integrations.transformers.summary import SHARDED
from trimtab.processes import Interrupted, signals_raise
from trimtab.train import autosave, launch
from trimtab.train.autosave import Autosave, first_signal_noted
from trimtab.train.config import TrainConfig
from trimtab.train.loop import MoETrainer
from trimtab.train.resume import Checkpoints

Run = Callable[..., tuple[int, Path]]
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def options(checkpoint: Path, text: Path) -> list[str]:
    """Four steps, evaluated after the third."""
    shared = ["--model", checkpoint, "--data", text, "--seq-len", 16, "--batch-size", 1, "--max-steps", 4]
    return ["train", *map(str, [*shared, "--eval-data", text, "--eval-every", 3])]


@pytest.fixture
def run(options: list[str], tmp_path: Path) -> Run:
    """Train in this process into a folder of that name; returns the exit code and the folder."""

    def trained(name: str, *more: object) -> tuple[int, Path]:
        return main([*options, "--out", str(tmp_path / name), *map(str, more)]), tmp_path / name

    return trained


@pytest.fixture(scope="module")
def whole(options: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nobody stops."""
    out = tmp_path_factory.mktemp("whole") / "run"
    assert main([*options, "--out", str(out)]) == 0
    return out


def checkpoints(out: Path) -> list[int]:
    found = out / "checkpoints"
    return sorted(on_disk.step_of(path) for path in found.iterdir()) if found.is_dir() else []


def signal_in_step(monkeypatch: pytest.MonkeyPatch, step: int, *numbers: int) -> None:
    """Send them to this process while it takes that step."""
    compute_loss = MoETrainer.compute_loss

    def signaled(self: MoETrainer, *args: Any, **options: Any) -> Any:
        if self.state.global_step == step - 1:
            for number in numbers:
                os.kill(os.getpid(), number)
        return compute_loss(self, *args, **options)

    monkeypatch.setattr(MoETrainer, "compute_loss", signaled)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_run_with_a_checkpoint_and_no_step_is_lost(
    run: Run, whole: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Twice at once, as a terminal and a launcher send it. What goes on from there is the run that nobody stopped."""
    with monkeypatch.context() as patch:
        signal_in_step(patch, 2, number, number)
        code, out = run("run")
    assert code == 128 + number
    said = capfd.readouterr().err
    assert said.count("the run ends once this step is done and saved; a second signal ends it at once") == 1
    assert (
        f"interrupted by {number.name} after 2 step(s); go on from step 2 with: trimtab train --resume {out};" in said
    )
    assert checkpoints(out) == [2]
    assert not (out / "final").exists()
    assert main(["train", "--resume", str(out)]) == 0
    assert numbers(out) == numbers(whole)
    assert (out / "final" / "model.safetensors").read_bytes() == (whole / "final" / "model.safetensors").read_bytes()
    assert checkpoints(out) == []


def test_a_signal_in_the_last_step_or_while_the_model_is_written_costs_no_model(
    run: Run, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        signal_in_step(patch, 4, signal.SIGTERM)
        code, out = run("last")
    assert (code, checkpoints(out)) == (0, [])
    assert numbers(out) == numbers(whole)
    session: Any = sys.modules["trimtab.train.session"]
    write = session.write_model

    def signaled(*args: Any, **options: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        write(*args, **options)

    monkeypatch.setattr(session, "write_model", signaled)
    code, out = run("written")
    assert (code, (out / "final" / "model.safetensors").exists()) == (0, True)


def test_a_second_signal_ends_at_once(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autosave, "TWICE", -1.0)
    signal_in_step(monkeypatch, 2, signal.SIGTERM, signal.SIGINT)
    code, out = run("run")
    assert (code, checkpoints(out)) == (128 + signal.SIGINT, [])
    assert len(numbers(out)) == 1


def test_signals_that_are_set_aside_stay_so_and_handlers_come_back() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    came: list[int] = []
    hangup = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with first_signal_noted(came, lambda _: None):
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
        assert came == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGHUP, hangup)
    assert {number: signal.getsignal(number) for number in before} == before
    with pytest.raises(Interrupted), signals_raise(), first_signal_noted(came, lambda _: None):
        os.kill(os.getpid(), signal.SIGTERM)  # `came` has one, of long ago


@pytest.mark.parametrize(
    ("more", "written", "left"),
    [
        ([], [1, 2, 3], []), (["--keep", 2], [1, 2, 3], [2, 3]), (["--save-every", 3], [3], [3]),
        (["--save-every", 0], [], []), (["--stop-after", 3], [1, 2, 3], [3]),
    ],
    ids=lambda value: "-".join(map(str, value)) or "none",
)  # fmt: skip
def test_by_the_clock_one_at_a_time_is_kept_until_the_model_is_written(
    run: Run, whole: Path, more: list[object], written: list[int], left: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every step is late. One that is asked for stays."""
    monkeypatch.setattr(autosave, "EVERY", -1.0)
    monkeypatch.setattr(autosave, "SHARE", 0)
    save, seen = Checkpoints._save, []

    def recorded(self: Checkpoints, step: int, *args: Any) -> None:
        save(self, step, *args)
        seen.append(step)
        if not self.config.keep:
            assert [s for s in checkpoints(self.out) if s not in left] == ([] if step in left else [step])

    monkeypatch.setattr(Checkpoints, "_save", recorded)
    code, out = run("run", *more)
    assert (code, seen, checkpoints(out)) == (0, written, left)
    assert numbers(out) == numbers(whole)[: len(numbers(out))]


def test_it_is_late_by_half_an_hour_and_by_what_a_save_takes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    default, by_steps, never = (Autosave(every, tmp_path, 0) for every in (None, 5, 0))
    for waited, late in ((1799.0, False), (1801.0, True)):
        now = 1000.0 + waited
        assert [each.votes()[1] for each in (default, by_steps, never)] == [late, False, False]
    default.saved(began=now - 300)
    for waited, late in ((1801.0, False), (300 * autosave.SHARE + 1.0, True)):
        monkeypatch.setattr(time, "monotonic", lambda at=now + waited: at)
        assert default.votes()[1] == late
    for each, due in ((default, True), (by_steps, True), (never, False)):
        each.agree(stop=True, save=False)
        assert (each.stop, each.due) == (True, due)


def test_a_disk_without_room_for_one_says_so_and_the_run_goes_on(
    run: Run, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(autosave, "EVERY", -1.0)
    monkeypatch.setattr(autosave, "SHARE", 0)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=400_000))
    code, out = run("run")
    said = capfd.readouterr().err
    assert "and 0 checkpoint(s), 0.4 MB are free; 0.9 MB more, until then, for one every 30 minutes" in said
    assert "or at a signal, which are not free: none is written unless they are" in said
    assert "trimtab: no checkpoint of step 1: 0.6 MB are needed with the model, 0.4 MB are free" in said
    assert (code, checkpoints(out), (out / "final").exists()) == (0, [], True)


def test_one_that_cannot_be_written_is_said_and_one_that_is_asked_for_an_error(
    run: Run, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A quota, for one, of which a disk does not tell."""
    from trimtab.checkpoint import save_load

    def failing(root: Path, *args: Any, step: int, **options: Any) -> None:
        (on_disk.begin(root, step) / "half").touch()
        raise InputError("quota exceeded")

    monkeypatch.setattr(save_load, "save", failing)
    with monkeypatch.context() as patch:
        signal_in_step(patch, 2, signal.SIGTERM)
        code, out = run("run")
    said = capfd.readouterr().err
    assert "trimtab: no checkpoint of step 2: quota exceeded\n" in said
    assert "interrupted by SIGTERM after 2 step(s); no model was saved" in said
    assert (code, checkpoints(out)) == (143, [])
    assert run("asked", "--save-every", 2)[0] == 2
    assert "trimtab: quota exceeded" in capfd.readouterr().err


@pytest.mark.parametrize("whom", ["launcher", "all", "scheduler", "torchrun", "a rank"])
def test_all_ranks_save_and_end_in_the_same_step(options: list[str], whole: Path, tmp_path: Path, whom: str) -> None:
    """Whoever is told to: our launcher alone, all by a terminal or a scheduler, torchrun, or one rank of it."""
    out = tmp_path / "run"
    given = [*options[1:], "--max-steps", 100_000, "--batch-size", 1, "--out", out]
    ours = whom in ("launcher", "all", "scheduler")
    if ours:
        process = start_cli("train", *given, "--nproc", 2)
    else:
        command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, "-m", "trimtab", "train"]
        process = subprocess.Popen(
            [sys.executable, *map(str, [*command, *given])], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=ONE_THREAD,
        )  # fmt: skip
    metrics = out / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.read_bytes().count(b"\n") > 2, process)
    ranks = ranks_of(out) if ours else children_of(process.pid)
    assert len(ranks) == 2
    number = signal.SIGINT if whom == "all" else signal.SIGTERM
    everyone = [*ranks, process.pid]
    for pid in {"all": everyone, "scheduler": everyone, "a rank": ranks[1:]}.get(whom, [process.pid]):
        os.kill(pid, number)
    result = finish(process)
    (step,) = checkpoints(out)
    assert len(numbers(out)) == step, "no step is lost"
    assert f"go on from step {step} with: trimtab train --resume {out} --nproc 2" in result.stderr
    assert f"interrupted by {number.name}" in result.stderr
    assert "trimtab: rank" not in result.stderr
    if ours:
        assert (result.returncode, ranks_of(out)) == (128 + number, [])
        assert "Traceback" not in result.stderr
    else:
        assert result.returncode != 0


@pytest.fixture
def endless(options: list[str], tmp_path: Path) -> Callable[..., tuple[subprocess.Popen[Any], Path]]:
    """Two ranks of our launcher that take steps, and their folder; given what `subprocess.Popen` takes."""

    def started(**streams: Any) -> tuple[subprocess.Popen[Any], Path]:
        out = tmp_path / "run"
        given = [*options, "--max-steps", "100000", "--nproc", "2", "--out", str(out)]
        process = subprocess.Popen([sys.executable, "-m", "trimtab", *given], env=ONE_THREAD, **streams)
        metrics = out / "metrics.jsonl"
        wait_for(lambda: metrics.exists() and metrics.read_bytes().count(b"\n") > 2, process)
        return process, out

    return started


def test_a_rank_behind_one_that_was_killed_takes_that_for_no_signal_of_the_user(endless: Any) -> None:
    process, out = endless(stderr=subprocess.PIPE, text=True)
    os.kill(ranks_of(out)[1], signal.SIGKILL)
    result = finish(process)
    assert (result.returncode, ranks_of(out)) == (1, [])
    assert "was ended by SIGKILL" in result.stderr
    assert "the run ends once this step is done" not in result.stderr


CHILDREN = """
import multiprocessing, os, signal, subprocess, sys, time
from trimtab.processes import heard_by, signals_told

told = signals_told()
children = [multiprocessing.get_context(way).Process(target=time.sleep, args=(600,)) for way in ("fork", "spawn")]
for child in children:
    child.start()
program = subprocess.Popen(["sleep", "600"])
time.sleep(3)  # until the spawned one sleeps
for child in (*children, program):
    child.terminate()
assert [child.join(30) or child.exitcode for child in children] == [-signal.SIGTERM] * 2
assert program.wait(30) == -signal.SIGTERM
with heard_by(lambda *_: sys.exit(3)):
    os.kill(os.getpid(), signal.SIGTERM)
assert os.read(told, 64) == bytes([signal.SIGTERM])  # of this process alone
"""


def test_a_rank_hears_of_sigterm_and_what_it_starts_ends_by_it() -> None:
    result = run_python("-c", CHILDREN)
    assert result.returncode == 0, result.stderr


def test_where_the_terminal_is_gone_no_rank_writes_to_it(endless: Any) -> None:
    leader, follower = pty.openpty()
    process, out = endless(stdout=follower, stderr=follower)
    os.close(follower)
    taken = len(numbers(out))
    os.close(leader)
    wait_for(lambda: len(numbers(out)) > taken + 5, process)
    process.send_signal(signal.SIGHUP)
    assert process.wait(DEADLINE) == 128 + signal.SIGHUP
    assert checkpoints(out) == [len(numbers(out))]


@pytest.mark.parametrize("crashed", [False, True])
def test_a_crash_after_a_signal_is_a_crash(tmp_path: Path, crashed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank ends as it was told to, the other so or by an error of its own."""
    words = ({"message": "interrupted", "expected": True, "follows": True}, {"message": "KeyError: 'x'"})
    failures = {}
    for rank, (word, code) in enumerate(zip((words[crashed], words[0]), (1 if crashed else 143, 143), strict=True)):
        (file := tmp_path / f"error-{rank}.json").write_text(json.dumps({"timestamp": 7, **word}))
        failures[rank] = ProcessFailure(rank, 0, code, str(file))

    def elastic(*_: object) -> Callable[..., None]:
        os.kill(os.getpid(), signal.SIGTERM)
        raise ChildFailedError("rank", failures)

    monkeypatch.setattr("torch.distributed.launcher.api.elastic_launch", elastic)
    plan: Any = SimpleNamespace(out=tmp_path, asked=TrainConfig(), config=TrainConfig())
    expected = pytest.raises(TrimtabError, match="rank 0 failed: KeyError") if crashed else pytest.raises(Interrupted)
    with expected:
        launch._launch_ranks(plan, 2)


def test_no_checkpoint_that_nobody_asked_for_stays_behind_one_that_somebody_did(tmp_path: Path) -> None:
    for step, unasked in enumerate([False, True, False, True, True, False]):
        (folder := on_disk.step_folder(tmp_path, step)).mkdir()
        on_disk.write_index(folder, make_index(step=step, world=1, experts={}, extra={autosave.MARK: unasked}))
    autosave.remove_unasked(tmp_path, 4)
    assert [on_disk.step_of(path) for path in on_disk.whole_checkpoints(tmp_path)] == [0, 2, 4, 5]


def children_of(parent: int) -> list[int]:
    found = (Path("/proc") / str(parent) / "task" / str(parent) / "children").read_text()
    return [int(pid) for pid in found.split()]


def test_a_finished_run_has_nothing_to_resume_and_that_is_no_error(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    out = shutil.copytree(whole, tmp_path / "run")
    words = f"finished at step 4, nothing to resume; the model is in {out / 'final'}\n"
    for more in ([], ["--out", str(out)], ["--nproc", "2"], ["--dry-run"], ["--data-report"], ["--max-steps", "4"]):
        assert main(["train", "--resume", str(out), *more]) == 0
        assert capfd.readouterr().out == words
    monkeypatch.setenv("RANK", "1")
    assert (main(["train", "--resume", str(out)]), capfd.readouterr().out) == (0, "")
    monkeypatch.delenv("RANK")
    assert main(["train", "--resume", str(out), "--max-steps", "8"]) == 2
    assert f"--max-steps 8: the run of {out} is finished and had 4; begin another from" in capfd.readouterr().err
    for given in (["--out", str(tmp_path / "other")], ["--overwrite"]):  # which is to go on from a checkpoint
        assert main(["train", "--resume", str(out), *given]) == 2
        assert "no checkpoint there" in capfd.readouterr().err
    for step in (2, 4):
        (folder := on_disk.step_folder(out / "checkpoints", step)).mkdir(parents=True)
        (folder / "trimtab.json").write_text("{}")
    for asked in (out / "checkpoints", out / "checkpoints" / "step-00000004"):
        assert (main(["train", "--resume", str(asked)]), capfd.readouterr().out) == (0, words)
    assert main(["train", "--resume", str(out / "checkpoints" / "step-00000002")]) == 2
    (out / "final").rename(out / "final.unfinished")
    assert main(["train", "--resume", str(out)]) == 2
    assert words not in capfd.readouterr().out


@pytest.mark.parametrize("report", ["--data-report", "--dry-run"])
def test_reports_look_at_no_output_folder(
    whole: Path, options: list[str], tmp_path: Path, report: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """A finished run's, somebody else's, a file, one that cannot be made: nothing is written there."""
    (tmp_path / "file").touch()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis").touch()
    before = sorted(tmp_path.rglob("*")), sorted(whole.rglob("*"))
    for out in (whole, tmp_path / "full", tmp_path / "file", tmp_path / "file" / "below", Path("/proc/none")):
        assert main([*options, "--out", str(out), report]) == 0, capfd.readouterr().err
    assert (sorted(tmp_path.rglob("*")), sorted(whole.rglob("*"))) == before


def test_in_a_pipe_there_are_lines_and_on_a_terminal_a_bar(options: list[str], tmp_path: Path) -> None:
    """Tables in many files, whose names are resolved under a bar of its own."""
    import pyarrow as pa
    from pyarrow import parquet

    folder = tmp_path / "data"
    folder.mkdir()
    for n in range(40):
        parquet.write_table(pa.table({"text": ["word " * 20]}), folder / f"train-{n:05d}-of-00040.parquet")
    given = [*options[1:], "--data", folder, "--max-steps", 23]
    piped = run_cli("train", *given, "--nproc", 2, "--out", tmp_path / "piped")
    assert piped.returncode == 0, piped.stderr
    for stream in (piped.stdout, piped.stderr):
        assert "\r" not in stream
        assert "%|" not in stream
    assert f"\n{SHARDED}\n" in piped.stdout
    steps = [int(line.split()[1]) for line in piped.stderr.splitlines() if line.startswith("step ")]
    assert steps == [1, 3, 6, 9, 10, 12, 15, 18, 20, 21, 23]  # and those that are evaluated
    assert "step 23 of 23: loss " in piped.stderr
    assert all(line.partition(" ")[0] != "step" for line in piped.stdout.splitlines())

    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))
    command = [sys.executable, "-m", "trimtab", "train", *given, "--out", tmp_path / "shown"]
    process = subprocess.Popen([*map(str, command)], stdout=subprocess.PIPE, stderr=follower, text=True)
    os.close(follower)
    shown = b""
    while True:
        try:
            part = os.read(leader, 1 << 16)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        shown += part
    os.close(leader)
    assert finish(process).returncode == 0, shown
    assert b"23/23" in shown
    assert b"Loading weights" in shown
    assert b"\rstep " not in shown
    assert b"\nstep " not in shown


def test_every_bar_asks_whether_there_is_a_terminal() -> None:
    found = run_python("-c", "import trimtab, pathlib; print(pathlib.Path(trimtab.__file__).parent)").stdout.strip()
    calls = [line for path in Path(found).rglob("*.py") for line in path.read_text().splitlines() if "tqdm(" in line]
    assert calls
    assert all("disable=" in call for call in calls)
