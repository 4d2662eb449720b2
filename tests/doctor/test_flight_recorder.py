"""Dumps of real Gloo ranks of which one is late, and made ones for what Gloo cannot show (NCCL's states, desyncs)."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import trimtab as package
from helpers.ranks import run_ranks
from trimtab.dispatch.all_to_all import AllToAll
from trimtab.dispatch.dispatcher import Dispatcher
from trimtab.doctor.flight_recorder import dump, dump_on_signal, read_trace, read_traces
from trimtab.doctor.flight_recorder_diagnosis import diagnose
from trimtab.errors import BackendError, InputError

LATE = 1


def late_on_rank(folder: str) -> None:
    """One layer, several times; each time one rank comes to one exchange only after all have dumped."""
    rank, group = dist.get_rank(), dist.new_group([0, 1, 2], group_desc="experts")
    guarded, plain = (Dispatcher(6, AllToAll(group, guard=on), layer="model.layers.3") for on in (True, False))

    def come_late(scenario: str) -> None:
        where = Path(folder) / scenario
        where.mkdir(exist_ok=True)
        if rank != LATE:
            when_waiting(rank, lambda: dump(where, rank))
        else:
            wait_for(where, 2)
            dump(where, rank)

    def layer(scenario: str, dispatcher: Dispatcher) -> None:
        x = torch.randn(4, 8, requires_grad=True)
        ids = torch.tensor([[0, 2], [1, 4], [3, 5], [5, -1]])
        if scenario == "count":
            come_late(scenario)
        rows = dispatcher.dispatch(x, ids, torch.rand(4, 2))
        if scenario in ("combine", "check"):
            come_late(scenario)
        y = dispatcher.combine(rows.x_MD * 2, rows)
        if scenario == "backward":
            come_late(scenario)
        y.sum().backward()

    for scenario in ("none", "check", "count", "combine", "backward"):
        layer(scenario, guarded if scenario in ("none", "check") else plain)
        dist.barrier()
    where = Path(folder) / "signal"
    dump_on_signal(where, rank=rank)
    mine = Path(folder, f"{os.getpid()}.pid{rank}")
    if rank != LATE:
        when_waiting(rank, mine.touch)
    else:
        mine.touch()
        wait_for(Path(folder), 3, "*.pid*")
        for file in Path(folder).glob("*.pid*"):
            os.kill(int(file.stem), signal.SIGUSR2)
        wait_for(where, 3)
    layer("none", plain)


def when_waiting(rank: int, then: Callable[[], object]) -> None:
    """`then`, in a thread, once this rank is in its next exchange, which the late one keeps from its end."""

    def done() -> list[bool]:
        with tempfile.TemporaryDirectory() as folder:
            return [entry.done for entry in read_trace(dump(folder, rank)).entries if entry.desc == "experts"]

    def watch() -> None:
        while len(now := done()) == before or not all(now[:-1]):
            time.sleep(0.02)
        then()

    before = len(done())
    threading.Thread(target=watch, daemon=True).start()


def wait_for(folder: Path, files: int, pattern: str = "*rank*") -> None:
    end = time.monotonic() + 30
    while len(list(folder.glob(pattern))) < files:
        assert time.monotonic() < end, f"{files} files {pattern} expected in {folder}"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dumps")
    run_ranks(late_on_rank, 3, str(folder), deadline=90)
    return folder


@pytest.mark.parametrize(
    ("scenario", "stopped", "last"),
    [
        ("count", "exchange of counts, forward, layer model.layers.3", "barrier"),
        ("check", "check before combine, forward, layer model.layers.3", "dispatch, forward, layer model.layers.3"),
        ("combine", "combine, forward, layer model.layers.3", "dispatch, forward, layer model.layers.3"),
        ("backward", "combine, backward, layer model.layers.3", "combine, forward, layer model.layers.3"),
        ("signal", "exchange of counts, forward, layer model.layers.3", "barrier"),
    ],
)
def test_a_late_rank_is_named_with_phase_direction_and_layer(
    dumps: Path, scenario: str, stopped: str, last: str
) -> None:
    stop, late = diagnose(read_traces([dumps / scenario]))
    assert stop.severity == late.severity == "broken"
    assert "'experts'" in stop.where
    assert f": {stopped} (test_flight_recorder.py:" in stop.what
    assert "waiting: rank 0, 2, since " in stop.what
    assert f"not there: rank 1, whose last collective is over: {last}" in stop.what
    assert late.where == "rank 1"
    assert "py-spy dump" in late.do


def unwritable_at_first_on_rank(folder: str) -> str:
    said, where = io.StringIO(), Path(folder) / "dumps"
    where.touch()  # a file, where the folder should be
    with contextlib.redirect_stderr(said):
        dump_on_signal(where, rank=0)
        os.kill(os.getpid(), signal.SIGUSR2)
        while "\n" not in said.getvalue():
            time.sleep(0.02)
        where.unlink()
        os.kill(os.getpid(), signal.SIGUSR2)
        wait_for(where, 1)
    return said.getvalue()


def test_a_dump_that_cannot_be_written_is_said_and_the_next_one_is(tmp_path: Path) -> None:
    (said,) = run_ranks(unwritable_at_first_on_rank, 1, str(tmp_path), deadline=60)
    assert said.startswith(f"trimtab: no Flight Recorder dump in {tmp_path}/dumps: ")


def test_a_torch_without_recorder_is_refused_before_any_signal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("_dump_nccl_trace", "_dump_fr_trace"):
        monkeypatch.delattr(torch._C._distributed_c10d, name, raising=False)
    before = signal.getsignal(signal.SIGUSR2)
    with pytest.raises(BackendError, match=r"has no Flight Recorder that can be read here: take torch 2\.13"):
        dump_on_signal(tmp_path)
    assert signal.getsignal(signal.SIGUSR2) is before


def frames(*places: str) -> list[dict[str, Any]]:
    made = [place.split(":") for place in places]
    return [{"filename": file, "name": name, "line": 7} for file, name in made]


STACKS = {
    "count": frames("/x/trimtab/dispatch/all_to_all.py:handshake", "/x/trimtab/dispatch/dispatcher.py:dispatch"),
    "dispatch": frames("/x/trimtab/dispatch/route.py:dispatch", "/x/trimtab/dispatch/route.py:forward"),
    "dispatch backward": frames("/x/trimtab/dispatch/route.py:combine", "/x/trimtab/dispatch/route.py:backward"),
    "recomputed": frames(
        "/x/trimtab/dispatch/route.py:dispatch", "/x/trimtab/dispatch/route.py:forward",
        "/p/torch/utils/checkpoint.py:recompute_fn", "/p/torch/autograd/graph.py:_engine_run_backward",
        "/p/torch/_tensor.py:backward",
    ),
    "check": frames(
        "/x/trimtab/dispatch/all_to_all.py:handshake",
        "/x/trimtab/dispatch/route.py:combine",
        "/x/trimtab/dispatch/route.py:forward",
    ),
    "ordered": frames("/x/trimtab/dispatch/route.py:combine", "/x/trimtab/dispatch/route.py:forward"),
    "slots": frames("/x/trimtab/dispatch/all_to_all.py:combine", "/x/trimtab/dispatch/replica_route.py:gather"),
    "copies": frames("/x/trimtab/dispatch/all_to_all.py:dispatch", "/x/trimtab/dispatch/replica_route.py:send"),
    "home": frames(
        "/x/trimtab/dispatch/all_to_all.py:combine",
        "/x/trimtab/dispatch/replica_route.py:add_home",
        "/x/trimtab/experts/replicated.py:backward",
    ),
    "check of copies": frames(
        "/x/trimtab/dispatch/all_to_all.py:handshake", "/x/trimtab/dispatch/replica_route.py:send"
    ),
    "fsdp": frames("/p/torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py:foreach_all_gather"),
    "hook": frames("/p/torch/autograd/graph.py:_engine_run_backward", "/p/torch/_tensor.py:backward", "/me.py:step"),
}  # fmt: skip


def test_stacks_are_of_functions_that_are_there() -> None:
    """A dump is read by the names of our files and functions."""
    for frame in (frame for stack in STACKS.values() for frame in stack):
        _, ours, path = frame["filename"].partition("/x/trimtab/")
        assert not ours or f"def {frame['name']}(" in (Path(package.__file__).parent / path).read_text(), frame


def entry(seq: int, op: str, stack: str, state: str, size: list[int], group: str = "1") -> dict[str, Any]:
    """An entry as NCCL's recorder writes it (version 2.10)."""
    return {
        "process_group": (group, "ep"), "collective_seq_id": seq, "p2p_seq_id": 0, "op_id": seq, "is_p2p": False,
        "profiling_name": f"nccl:{op}", "state": state, "retired": state == "completed", "input_sizes": [size],
        "input_dtypes": ["BFloat16"], "frames": STACKS[stack], "time_created_ns": 10**18 + seq,
    }  # fmt: skip


def written(folder: Path, ranks: dict[int, list[dict[str, Any]]], members: str = "[0, 1]") -> list[Any]:
    config = {"1": {"name": "1", "desc": "ep", "ranks": members}}
    for rank, entries in ranks.items():
        made = {"version": "2.10", "pg_config": config, "entries": entries}
        (folder / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(made))
    return diagnose(read_traces([folder]))


def test_ranks_in_different_calls_are_a_desync(tmp_path: Path) -> None:
    ranks = {
        0: [entry(4, "all_to_all", "dispatch", "started", [3, 64])],
        1: [entry(4, "_all_gather_base", "fsdp", "scheduled", [128])],
    }
    (found,) = written(tmp_path, ranks)
    assert "not in the same call at collective 4: different collectives" in found.what
    assert "rank 0: dispatch, forward, [3, 64] BFloat16" in found.what
    assert "rank 1: FSDP gathers parameters (_all_gather_base), [128] BFloat16" in found.what


@pytest.mark.parametrize(
    ("one", "other", "says"),
    [
        (("dispatch", [3, 64]), ("dispatch", [9, 64]), "all ranks came and it does not end"),
        (("dispatch", [3, 64]), ("dispatch", [3, 32]), "sizes that do not fit"),
        (("count", [2, 6]), ("count", [2, 7]), "sizes that do not fit"),
        (("check", [2, 15]), ("check", [2, 14]), "sizes that do not fit"),
        (("check", [2, 15]), ("count", [2, 15]), "different phases"),
        (("dispatch", [3, 64]), ("dispatch backward", [3, 64]), "different phases"),
        (("dispatch", [3, 64]), ("ordered", [3, 64]), "different phases"),
        (("dispatch", [3, 64]), ("recomputed", [9, 64]), "all ranks came and it does not end"),
        (("dispatch backward", [3, 64]), ("recomputed", [3, 64]), "different phases"),
        (("slots", [2, 64]), ("count", [2, 21]), "rank 0: slots of each expert, forward, [2, 64] BFloat16"),
        (("slots", [2, 64]), ("slots", [2, 32]), "sizes that do not fit"),
        (("copies", [0, 64]), ("copies", [2, 64]), "all ranks came and it does not end"),
        (("copies", [2, 64]), ("check of copies", [2, 64]), "rank 1: check before replicas of experts, forward"),
        (("copies", [2, 64]), ("home", [2, 64]), "rank 0: replicas of experts, forward, [2, 64] BFloat16"),
        (("home", [2, 64]), ("dispatch backward", [2, 64]), "rank 0: replicas of experts, backward"),
    ],
)
def test_rows_may_differ_between_ranks_but_not_their_width_nor_their_phase(
    tmp_path: Path, one: tuple[str, list[int]], other: tuple[str, list[int]], says: str
) -> None:
    ranks = {r: [entry(2, "all_to_all", s, "started", size)] for r, (s, size) in enumerate((one, other))}
    (found,) = written(tmp_path, ranks)
    assert says in found.what + found.do


@pytest.mark.parametrize("project", ["/u/me/trimtab", "/trimtab/src/trimtab", "/u/me/run"])
@pytest.mark.parametrize("package", ["/x/src/trimtab", "/u/me/trimtab/src/trimtab", "/v/site-packages/trimtab"])
def test_a_user_s_file_is_named_in_a_folder_of_any_name(tmp_path: Path, project: str, package: str) -> None:
    stack = frames(f"{package}/dispatch/all_to_all.py:handshake", f"{package}/moe.py:forward")
    stack += frames(f"{project}/model.py:block", f"{project}/pretrain.py:step")
    ranks = {r: [entry(1, "all_to_all", "count", "started", [2, 6]) | {"frames": stack}] for r in (0, 1)}
    (found,) = written(tmp_path, ranks)
    assert "exchange of counts, forward (model.py:7 block)" in found.what


def test_a_rank_that_waits_elsewhere_is_not_the_one_to_look_at(tmp_path: Path) -> None:
    ranks = {
        0: [entry(1, "all_to_all", "dispatch backward", "started", [3, 8])],
        1: [entry(1, "all_reduce", "hook", "started", [3, 8], group="2")],
        2: [],
    }
    one, two, look = written(tmp_path, ranks, members="[0, 1, 2]")
    assert "dispatch, backward" in one.what
    assert "not there: rank 1, itself waiting in group 2: all-reduce issued from backward" in one.what
    assert "not there: rank 2, which has recorded no collective at all" in one.what
    assert "DDP's gradients" in two.what
    assert look.where == "rank 2"


def test_where_members_are_not_recorded_a_rank_never_seen_is_named(tmp_path: Path) -> None:
    stop, look = written(tmp_path, {0: [entry(1, "all_to_all", "count", "started", [2, 6])], 1: []}, members="[]")
    assert "never seen in this group: rank 1, which has recorded no collective at all" in stop.what
    assert "if rank 1 belongs to the group" in stop.do
    assert look.where == "rank 1"


def test_a_rank_without_a_dump_is_the_suspect(tmp_path: Path) -> None:
    stop, missing = written(tmp_path, {0: [entry(2, "all_to_all", "ordered", "started", [3, 8])]})
    assert "combine, forward" in stop.what
    assert "unknown: rank 1, without a dump" in stop.what
    assert missing.where == "rank 1"


def test_what_nccl_gave_up_is_not_done(tmp_path: Path) -> None:
    given_up = entry(2, "all_to_all", "count", "started", [2, 6]) | {"retired": True}
    stop, *_ = written(tmp_path, {0: [given_up], 1: []})
    assert "waiting: rank 0" in stop.what


def test_dumps_made_after_the_fact_say_so(tmp_path: Path) -> None:
    (found,) = written(tmp_path, {r: [entry(2, "all_to_all", "count", "completed", [2, 6])] for r in (0, 1)})
    assert found.severity == "note"
    assert "rank 0: exchange of counts, forward" in found.what


def test_json_dumps_are_read_and_have_no_frames(tmp_path: Path) -> None:
    for rank in (0, 1):
        e = entry(5 - rank, "all_to_all", "count", "completed" if rank else "scheduled", [2, 6])
        del e["frames"]
        dumped = {"version": "2.10", "pg_config": {}, "entries": [e]}
        (tmp_path / f"trace_{rank}.json").write_text(json.dumps(dumped))
    stop, late = diagnose(read_traces([tmp_path]))
    assert "stopped at its collective 5: all_to_all\n" in stop.what
    assert late.where == "rank 1"


class _Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("was-run",)


def test_a_pickle_that_names_code_is_refused_and_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nccl_trace_rank_0").write_bytes(pickle.dumps({"version": _Evil()}))
    with pytest.raises(InputError, match=r"refused: it asks for posix\.mkdir.*Make the dump again"):
        read_traces([tmp_path])
    assert not (tmp_path / "was-run").exists()


def test_what_is_no_dump_is_said(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no Flight Recorder dumps"):
        read_traces([tmp_path])
    (tmp_path / "a_rank_0").write_text("hello")
    with pytest.raises(InputError, match="a_rank_0 is"):
        read_traces([tmp_path])
    (tmp_path / "notes").touch()
    with pytest.raises(InputError, match="ends in its rank"):
        read_traces([tmp_path / "notes"])
    made = pickle.dumps({"version": "2.10", "entries": []})
    for name in ("a_rank_0", "b_rank_0"):
        (tmp_path / name).write_bytes(made)
    with pytest.raises(InputError, match="rank 0 has more than one dump"):
        read_traces([tmp_path])
