"""The compiled kernels are made once, by whoever comes first, and done without where they cannot be had."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from trimtab import errors
from trimtab.errors import BackendError
from trimtab.kernels import compiled, compiler
from trimtab.kernels.choose import KernelChoice, get_backend, names_for

CPU = torch.device("cpu")


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As in a process that has not loaded them yet, with temporary files of its own."""
    (tmp_path / "spare").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "spare"))
    monkeypatch.setattr(compiled, "_shared", {})
    monkeypatch.setattr(compiler, "_failed", {})


def test_auto_takes_them_and_says_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert KernelChoice("auto").on(CPU, torch.float32).name == "cpu"


@pytest.mark.usefixtures("alone")
def test_without_a_compiler_the_loop_runs_and_the_reason_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    choice = KernelChoice("auto")
    with pytest.warns(UserWarning, match=r"no C\+\+ compiler.*Kernels 'torch' are used instead"):
        assert choice.on(CPU, torch.float32).name == "torch"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        choice.on(CPU, torch.float32)  # said once
    assert get_backend("auto", CPU).name == "torch"
    with pytest.raises(BackendError, match=r"no C\+\+ compiler"):
        KernelChoice("cpu").on(CPU, torch.float32)


@pytest.fixture
def fails(alone: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Path]:
    """A compiler that says something and ends with a code, and notes its calls in the file that is returned."""

    def make(says: str, code: int = 3) -> Path:
        broken, calls = tmp_path / "c++", tmp_path / "calls"
        broken.write_text(f"#!/bin/sh\necho called >> {calls}\nprintf '{says}' >&2\nexit {code}\n")
        broken.chmod(0o755)
        monkeypatch.setenv("CXX", str(broken))
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        return calls

    return make


def test_a_compiler_that_fails_is_quoted(fails: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    fails("no room for AVX")
    with pytest.warns(UserWarning, match="no room for AVX"):
        assert KernelChoice("auto").on(CPU, torch.float32).name == "torch"
    for named in ("there-is-no-such-compiler", "  ", "'g++"):
        monkeypatch.setenv("CXX", named)
        with pytest.raises(BackendError, match=f"CXX={re.escape(repr(named))} is no program"):
            compiler.find_compiler()


def test_a_compiler_that_fails_is_asked_once(fails: Callable[..., Path]) -> None:
    """Not once per layer: 48 layers would wait for it 48 times."""
    calls, said = fails("line 1\nerror: two\nline 3"), []
    for dtype in (torch.float32, torch.bfloat16, torch.float32):
        with pytest.raises(BackendError) as caught:
            KernelChoice("cpu").on(CPU, dtype)
        said.append(str(caught.value))
    assert len(set(said)) == 1
    assert "\nerror: two" in said[0]
    assert not any(other in said[0] for other in ("line 1", "line 3"))
    assert calls.read_text().split() == ["called"]


def test_a_compiler_that_makes_nothing_is_asked_once(fails: Callable[..., Path]) -> None:
    calls = fails("", 0)
    for _ in range(2):
        with pytest.raises(BackendError, match=r"ended well and did not write .*made\.o"):
            KernelChoice("cpu").on(CPU, torch.float32)
    assert calls.read_text().split() == ["called"]


def test_a_disk_without_room_is_named(fails: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    fails("collect2: bad value")
    monkeypatch.setattr(errors, "LEAST_FREE", 1 << 62)
    with pytest.raises(BackendError, match=r"collect2: bad value; [0-9.]+ MB are free on the disk of .*cache/trimtab"):
        KernelChoice("cpu").on(CPU, torch.float32)


@pytest.mark.usefixtures("alone")
def test_they_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIMTAB_COMPILED", "0")
    assert names_for("auto", CPU) == ("torch",)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert KernelChoice("auto").on(CPU, torch.float32).name == "torch"
    with pytest.raises(BackendError, match="TRIMTAB_COMPILED=0"):
        get_backend("cpu", CPU)
    monkeypatch.setenv("TRIMTAB_COMPILED", "off")
    for name in ("auto", "cpu"):
        with pytest.raises(BackendError, match="TRIMTAB_COMPILED='off': 0 switches"):
            get_backend(name, CPU)


def test_a_relative_cache_folder_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for value, folder in (("here", Path.home() / ".cache"), ("", Path.home() / ".cache"), (str(tmp_path), tmp_path)):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert compiler.cache_folder() == folder / "trimtab"


@pytest.mark.parametrize("call", ["backward", "weight_gradients"])
@pytest.mark.usefixtures("alone")
def test_wrong_numbers_are_found_before_they_are_used(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = getattr(compiled.CompiledKernels, call)

    def wrong(self: compiled.CompiledKernels, fields: dict[str, torch.Tensor]) -> None:
        right(self, fields)
        fields["d_down"][1, 3, 5] += 0.5

    monkeypatch.setattr(compiled.CompiledKernels, call, wrong)
    with pytest.warns(UserWarning, match="'cpu' failed their self-test.*d_down is wrong"):
        assert KernelChoice("auto").on(CPU, torch.float32).name == "torch"


def test_processes_that_start_together_compile_once(tmp_path: Path) -> None:
    (tmp_path / "tiny.cpp").write_text(
        'extern "C" __attribute__((visibility("default"))) int answer() { return 42; }\n'
    )
    (real,), counted = compiler.find_compiler(), tmp_path / "counted"
    counted.write_text(f'#!/bin/sh\necho x >> "{tmp_path}/log"\nsleep 0.3\nexec "{real}" "$@"\n')
    counted.chmod(0o755)
    script = (
        "import sys; from pathlib import Path; from trimtab.kernels.compiler import load; "
        "p = Path(sys.argv[1]) / 'tiny.cpp'; print(load(p, [p]).answer())"
    )
    environment = {**os.environ, "CXX": str(counted), "XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, "-c", script, str(tmp_path)]
    ranks = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert [rank.communicate(timeout=120)[0].strip() for rank in ranks] == ["42"] * 3
    assert (tmp_path / "log").read_text().split() == ["x", "x"]  # one compiles and links
    assert [f.suffix for f in (tmp_path / "trimtab").iterdir()].count(".so") == 1


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source, and an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = tmp_path / "tiny.cpp"
    source.write_text('extern "C" __attribute__((visibility("default"))) int answer() { return 42; }\n')
    return source


@pytest.mark.parametrize("left", [0, 1000], ids=["empty", "cut off"])
def test_a_library_that_is_not_whole_is_made_again(left: int, tiny: Path) -> None:
    library = compiler.made(tiny, [tiny])
    whole = library.read_bytes()
    library.write_bytes(whole[:left])
    left = library.parent / f"{library.stem}.making-left"  # by a process that was killed
    left.mkdir()
    os.utime(left, (0, 0))
    assert compiler.load(tiny, [tiny]).answer() == 42
    assert sorted(f.suffix for f in library.parent.iterdir()) == [".lock", ".sha256", ".so"]
    left.mkdir()  # once more, where the library is whole
    young = left.with_name(f"{library.stem}.making-young")
    young.mkdir()
    os.utime(left, (0, 0))
    compiler.made(tiny, [tiny])
    assert not left.exists()
    assert young.exists()
    library.with_suffix(".sha256").write_bytes(b"\xff")
    before = library.stat().st_mtime_ns
    compiler.made(tiny, [tiny])
    assert library.stat().st_mtime_ns > before


def test_a_process_that_holds_the_lock_is_not_waited_for_without_end(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compiler, "_failed", {})
    library = compiler.made(tiny, [tiny])
    library.unlink()
    monkeypatch.setattr(compiler, "PATIENCE", 0.6)
    monkeypatch.setattr(compiler, "SILENT", 0.2)
    with open(library.with_suffix(".lock")) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # as by a process that was stopped while it compiles
        for _ in range(2):
            with pytest.raises(BackendError, match=r"another process has held .*\.lock for more than 0\.6 s"):
                compiler.made(tiny, [tiny])
            monkeypatch.setattr(compiler, "_take", lambda lock: pytest.fail("the second time it is known"))
    assert [record.getMessage().count(".lock") for record in caplog.records] == [0, 1]  # it compiles; it waits
    assert not library.exists()


def test_a_compiler_is_run_by_the_name_it_has_and_with_its_options(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ccache takes the place of a compiler by a link, and goes by the link's name; CXX may hold options."""
    (real, *_), links = compiler.find_compiler(), tiny.parent / "links"
    links.mkdir()
    wrapper = links / "cache"
    wrapper.write_text(f'#!/bin/sh\ntest "$(basename "$0")" = c++ || exit 9\nexec "{real}" "$@"\n')
    wrapper.chmod(0o755)
    (links / "c++").symlink_to(wrapper)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", f"{links}{os.pathsep}{os.environ['PATH']}")
    linked = compiler.made(tiny, [tiny])
    monkeypatch.setenv("CXX", "")
    assert compiler.made(tiny, [tiny]) == linked
    monkeypatch.setenv("CXX", f"{real} -DMORE=1")
    assert compiler.find_compiler() == [real, "-DMORE=1"]
    assert compiler.made(tiny, [tiny]) != linked


@pytest.mark.usefixtures("alone")
def test_nowhere_to_keep_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", Mock(side_effect=RuntimeError("Could not determine home directory.")))
    monkeypatch.setattr(tempfile, "tempdir", "/proc/nothing")
    with pytest.warns(UserWarning, match=r"cannot be kept anywhere: this user has no home folder; .*nothing/trimtab-"):
        assert KernelChoice("auto").on(CPU, torch.float32).name == "torch"


def unmakeable(kind: str, tmp_path: Path) -> Path:
    """A folder that root cannot make either."""
    if kind == "proc":
        return Path("/proc/nothing")
    (tmp_path / "file").write_text("")
    return tmp_path / "file" if kind == "file" else tmp_path / "file/below/it"


@pytest.mark.parametrize("kind", ["proc", "file", "below"])
def test_an_unmakeable_cache_folder_leaves_the_temporary_one_and_one_warning(
    kind: str, tiny: Path, alone: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = unmakeable(kind, tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    says = rf"kept in .*/spare/trimtab-\d+, because the cache folder cannot be used \({folder}/trimtab: (?!.*MB)"
    with pytest.warns(UserWarning, match=says) as said:
        assert compiler.load(tiny, [tiny]).answer() == 42
    assert len(said) == 1
    assert compiler.is_made(tiny, [tiny])
    monkeypatch.setattr(compiler, "_compile", lambda *_: pytest.fail("it is made"))
    with pytest.warns(UserWarning, match=says):  # as the next process does
        compiler.made(tiny, [tiny])


@pytest.mark.parametrize("kind", ["file", "others", "link"])
def test_a_temporary_folder_of_somebody_else_s_is_not_taken(
    kind: str, tiny: Path, alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who may write there could put another library into it."""
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nothing")
    spare = compiler.spare_folder()
    if kind == "file":
        spare.write_text("")
    elif kind == "others":
        spare.mkdir()
        spare.chmod(0o777)
    else:
        spare.symlink_to(tiny.parent)
    with pytest.raises(BackendError, match=r"anywhere: /proc/nothing/trimtab: .*; .*others may write there"):
        compiler.load(tiny, [tiny])


def test_a_full_disk_leaves_the_temporary_folder(
    tiny: Path, alone: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The compiler says what it likes then, and the disk is named."""
    usage, (real, *_), full = shutil.disk_usage("/"), compiler.find_compiler(), tmp_path / "trimtab"

    def room(folder: Path) -> object:
        return usage._replace(free=usage.total if str(folder).startswith(str(tmp_path / "spare")) else 4096)

    fails = tmp_path / "c++"
    fails.write_text(f'#!/bin/sh\ncase "$*" in *"-o {full}/"*) echo No space >&2; exit 1;; esac\nexec "{real}" "$@"\n')
    fails.chmod(0o755)
    monkeypatch.setenv("CXX", str(fails))
    monkeypatch.setattr(shutil, "disk_usage", room)
    with pytest.warns(UserWarning, match=rf"No space; 0\.0 MB are free on the disk of {full}\)"):
        assert compiler.load(tiny, [tiny]).answer() == 42
    assert not list(full.glob("*.so"))


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("#!/bin/sh\nkill -9 $$\n", "ended by signal 9; 9 often means that memory ran out"),
        ("#!/bin/sh\nexit 7\n", "exit code 7, and not a word"),
        ("no program", "Exec format error"),
    ],
)
def test_a_compiler_that_is_killed_or_broken_is_named(
    script: str, says: str, tiny: Path, alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tiny.parent / "broken"
    broken.write_text(script)
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(BackendError, match=rf"(?s)the C\+\+ compiler failed: {broken} .*{says}"):
        compiler.load(tiny, [tiny])
    assert not list(tiny.parent.rglob("*.so"))


def test_the_first_compile_says_so_once_and_where_it_is_kept(
    tiny: Path, alone: None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", "/proc/nothing")  # of the compiler's own, which need not be writable
    for _ in range(2):
        compiler.made(tiny, [tiny])
    (record,) = caplog.records
    said = f"trimtab: compiling kernels for this CPU, once, about 15 s; kept in {tiny.parent}/trimtab"
    assert (record.levelname, record.getMessage()) == ("WARNING", said)  # what a program shows that sets up nothing


@pytest.mark.parametrize("kind", ["proc", "file", "below"])
def test_words_about_a_disk_need_no_folder(kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = unmakeable(kind, tmp_path)
    assert errors.full_disk(folder / "trimtab") == ""
    assert errors.free_room(folder) > 0
    monkeypatch.setattr(errors, "LEAST_FREE", 1 << 62)
    assert ("MB are free on the disk of" in errors.full_disk(folder)) == (kind != "proc")  # /proc says no number
    monkeypatch.setattr(shutil, "disk_usage", lambda _: (_ for _ in ()).throw(PermissionError("no")))
    assert errors.full_disk(folder) == ""
