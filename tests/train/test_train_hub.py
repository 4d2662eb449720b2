"""`--model org/name` and `--data org/name`: read where the hub's cache has them, else answered by the command."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import huggingface_hub
import pytest

from helpers.commands import run_cli
from trimtab.cli.main import main
from trimtab.errors import ConfigError
from trimtab.train.hub import on_this_disk

COMMIT = "5f0b02c75b57c5855da9ae460ce51323ea669d8a"


def put(cache: Path, kind: str, name: str, files: dict[str, bytes], ref: str = "main", commit: str = COMMIT) -> Path:
    """Files of a repository as the hub's cache holds them: blobs, and links to them in a snapshot."""
    repo = cache / f"{kind}s--{name.replace('/', '--')}"
    snapshot = repo / "snapshots" / commit
    for path, content in files.items():
        blob = repo / "blobs" / hashlib.sha256(content).hexdigest()
        blob.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(content)
        link = snapshot / path
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(blob)
    (repo / "refs").mkdir(exist_ok=True)
    (repo / "refs" / ref).write_text(commit)
    return snapshot


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty one, in its usual place in a home, for this process and those that it starts; here nothing is a path."""
    made = tmp_path / "home" / ".cache" / "huggingface" / "hub"
    made.mkdir(parents=True)
    monkeypatch.setenv("HF_HOME", str(made.parent))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(made))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return made


def chats(*words: str) -> bytes:
    turns = [[{"role": "user", "content": "?"}, {"role": "assistant", "content": word}] for word in words]
    return "".join(json.dumps({"messages": turn}) + "\n" for turn in turns).encode()


def test_a_model_and_data_of_the_cache_are_trained(cache: Path, checkpoint: Path, tmp_path: Path) -> None:
    """And gone on with, by their names; what the run ends with has no links into the cache."""
    model = put(cache, "model", "org/tiny.moe-2", {path.name: path.read_bytes() for path in checkpoint.iterdir()})
    data = {f"data/{split}-0000{n}-of-00002.jsonl": chats(split) for split in ("train", "test") for n in (0, 1)}
    files = put(cache, "dataset", "org/set", {**data, "README.md": b"# no data"})
    out = tmp_path / "run"
    shared = ["--seq-len", 64, "--batch-size", 1, "--out", out]
    given = ["--model", "org/tiny.moe-2", "--data", "org/set", "--eval-data", "org/set:test", "--max-steps", 2]
    done = run_cli("train", *given, *shared, "--stop-after", 1)
    assert done.returncode == 0, done.stderr
    assert "data: 2 conversation(s)" in done.stderr
    config = json.loads((out / "run.json").read_text())
    assert config["model"] == str(model)
    assert (config["data"], config["eval_data"]) == ([str(files)], [f"{files}:test"])
    done = run_cli("train", "--resume", out, "--model", "org/tiny.moe-2", "--data", "org/set")
    assert done.returncode == 0, done.stderr
    assert not any(path.is_symlink() for path in (out / "final").iterdir())


def test_revisions_splits_and_weights(cache: Path) -> None:
    main_, tagged = (
        put(cache, "dataset", "org/set", {"a.jsonl": chats(ref)}, ref, commit * 40)
        for ref, commit in (("main", "a"), ("v1", "b"))
    )
    names = ("org/set", "org/set:test", "org/set=0.3", "org/set@v1:test=0.7", f"org/set@{'b' * 40}")
    read = [f"{main_}", f"{main_}:test", f"{main_}=0.3", f"{tagged}:test=0.7", f"{tagged}"]
    assert on_this_disk({"data": names, "lr": 1.0}) == {"data": tuple(read), "lr": 1.0}
    assert on_this_disk({"eval_data": ["org/set@v1"]}) == {"eval_data": (str(tagged),)}
    with pytest.raises(ConfigError, match=r"--revision v2 --local-dir set`, and give --data set:test"):
        on_this_disk({"data": ["org/set@v2:test"]})


@pytest.mark.parametrize(
    ("option", "name", "command", "given"),
    [
        ("--model", "Qwen/Qwen3-30B-A3B", "hf download Qwen/Qwen3-30B-A3B --local-dir Qwen3-30B-A3B", "Qwen3-30B-A3B"),
        ("--model", "o/m@v1.0", "hf download o/m --revision v1.0 --local-dir m", "m"),
        ("--data", "org/set", "hf download org/set --repo-type dataset --local-dir set", "set"),
        ("--data", "org/set:test=0.3", "hf download org/set --repo-type dataset --local-dir set", "set:test=0.3"),
        ("--eval-data", "org/set", "hf download org/set --repo-type dataset --local-dir set", "set"),
        ("--data", "org/no..name", "hf download org/no..name --repo-type dataset --local-dir no..name", "no..name"),
    ],
)
def test_what_the_cache_lacks_is_answered_with_the_command_that_fetches_it(
    cache: Path, option: str, name: str, command: str, given: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before the output folder or anything else is looked at."""
    assert main(["train", option, name, "--out", "/proc/none", "--ep", "7"]) == 2
    said = capsys.readouterr().err
    assert f"trimtab: {option} {name}: is no path here, nor in the hub's cache; fetch it with `{command}`" in said
    assert said.endswith(f", and give {option} {given}\n")
    assert list(Path().iterdir()) == []


def test_what_lies_there_in_part_is_not_taken_for_all_of_it(cache: Path) -> None:
    """A configuration that was fetched alone, three files of weights of four, a data set that was read as a stream."""
    put(cache, "model", "org/config", {"config.json": b"{}"})
    weights = {f"model-0000{n}-of-00004.safetensors": b"" for n in (1, 2, 4)}
    put(cache, "model", "org/three", {"config.json": b"{}", "model-00003-of-00004.bin": b"", **weights})
    put(cache, "dataset", "org/stream", {"data/train-00000-of-00008-0a1b2c.parquet": b""})
    (cache / "datasets--org--none" / "snapshots" / COMMIT).mkdir(parents=True)
    (cache / "datasets--org--none" / "refs").mkdir()
    (cache / "datasets--org--none" / "refs" / "main").write_text(COMMIT)
    wanted = {"org/config": "model", "org/three": "model", "org/stream": "data", "org/none": "data"}
    for name, option in wanted.items():
        given = {"model": name} if option == "model" else {"data": [name]}
        with pytest.raises(ConfigError, match=rf"^--{option} {name}: is in the hub's cache in part .*`hf download"):
            on_this_disk(given)


def test_paths_stay_paths(cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also where one of that name is in the cache, and a wrong one below a folder that is there."""
    put(cache, "dataset", "org/set", {"a.jsonl": chats("a")})
    names = ["a.jsonl", "./org/set", "../x/y", "/x/y", "org/set/more", "~/x", "C:\\x", "org/set:a:b", "qwen3_moe"]
    assert on_this_disk({"data": names, "model": "qwen3_moe"}) == {"data": tuple(names), "model": "qwen3_moe"}
    Path("org").mkdir()
    for name in ("org/set", "org/sett=0.5", "org/x.jsonl"):
        assert on_this_disk({"data": [name]}) == {"data": (name,)}
    assert main(["train", "--data", "org/x.jsonl", "--out", str(tmp_path / "run")]) == 2
    assert "--data org/x.jsonl: no such file or directory" in capsys.readouterr().err
