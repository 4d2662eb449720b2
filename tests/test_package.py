"""What `import trimtab` offers to a person, a type checker and an installation without sources; extras, a release."""

from __future__ import annotations

import compileall
import re
import shutil
import sys
import tomllib
import types
import zipfile
from importlib import import_module
from pathlib import Path

import pytest
import yaml

import trimtab
from helpers.commands import run_python
from trimtab import extras
from trimtab.cli.main import main
from trimtab.errors import ConfigError

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
BRING = {"transformers": ["yaml"], "datasets": ["pyarrow"], "megatron-core": ["megatron"]}
"""Modules that a distribution brings, beside or instead of one of its own name, and that ours import."""


def test_errors_and_modules_are_public_names() -> None:
    script = (
        "import trimtab\n"
        "assert {'checkpoint', 'integrations', 'ConfigError'} <= set(dir(trimtab))\n"
        "trimtab.checkpoint.latest, trimtab.integrations.megatron, trimtab.integrations.torchtitan\n"
        "trimtab.integrations.transformers.register()\n"
        "try: trimtab.RouterConfig(num_experts=0, top_k=1)\n"
        "except trimtab.ConfigError as error: assert isinstance(error, (trimtab.TrimtabError)), error\n"
        "from trimtab import BackendError, InputError, checkpoint\n"
    )
    run_python("-c", script, check=True)


@pytest.mark.parametrize(
    "name", ["trimtab", "trimtab.integrations", "trimtab.integrations.transformers", "trimtab.optim"]
)
def test_dir_lists_what_is_offered_and_nothing_that_it_is_made_of(name: str) -> None:
    module = import_module(name)
    shown = [each for each in dir(module) if not each.startswith("__")]
    assert not {"TYPE_CHECKING", "annotations", "lazy_names", "Any", "Literal", "count", "partial"} & set(shown)
    assert set(module.__all__) <= set(shown)
    assert all(hasattr(module, each) for each in shown)
    with pytest.raises(AttributeError, match=f"module '{name}' has no attribute 'nothing'"):
        _ = module.nothing


def test_a_misspelled_name_is_seen_by_a_type_checker(tmp_path: Path) -> None:
    wrong = ("trimtab.nothing", "trimtab.ConfigErrr", "trimtab.checkpoint.latst", "trimtab.integrations.megatrn")
    right = ("trimtab.ConfigError", "trimtab.checkpoint.latest", "trimtab.integrations.transformers.register")
    (tmp_path / "user.py").write_text("\n".join(["import trimtab", *wrong, *right, ""]))
    command = ("-m", "mypy", "--strict", "--cache-dir", ROOT / ".mypy_cache/user", "user.py")
    done = run_python(*command, cwd=tmp_path, env={"MYPYPATH": str(ROOT / "src"), "PATH": ""}, timeout=300)
    said = [line for line in done.stdout.splitlines() if line.startswith("user.py")]
    assert [re.split(r":(\d+):", line)[1] for line in said] == ["2", "3", "4", "5"], done.stdout
    assert all("[attr-defined]" in line for line in said)


@pytest.mark.parametrize("how", ["pyc", "zip"])
def test_names_need_no_sources(how: str, tmp_path: Path) -> None:
    place = tmp_path / "trimtab"
    shutil.copytree(ROOT / "src/trimtab", place, ignore=shutil.ignore_patterns("__pycache__"))
    if how == "pyc":
        assert compileall.compile_dir(place, quiet=1, legacy=True, optimize=2)
        for source in place.rglob("*.py"):
            source.unlink()
    else:
        with zipfile.ZipFile(tmp_path / "trimtab.zip", "w") as archive:
            for file in place.rglob("*"):
                archive.write(file, file.relative_to(tmp_path))
        shutil.rmtree(place)
    found = str(tmp_path if how == "pyc" else tmp_path / "trimtab.zip")
    script = (  # -OO leaves no assertion
        f"import sys; sys.path.insert(0, {found!r})\nimport torch, trimtab\n"
        "trimtab.ConfigError, trimtab.integrations.transformers.register\n"
        "model = trimtab.MoEConfig(dim=4, hidden=8, router=trimtab.RouterConfig(num_experts=2, top_k=1)).build()\n"
        "print(trimtab.__file__, *model(torch.randn(3, 4))[0].shape, *trimtab.__all__)"
    )
    done = run_python("-I", "-OO", "-c", script)
    assert done.returncode == 0, done.stderr
    file, *shown = done.stdout.split()
    assert (Path(file).parent, shown) == (Path(found) / "trimtab", ["3", "4", *trimtab.__all__])
    # Without C++ sources there are no compiled kernels, which is said, and everything runs.
    assert ("Kernels 'torch' are used instead" in done.stderr) == (how == "zip")


def modules_of(extra: str) -> set[str]:
    """The modules that an extra of pyproject.toml brings, those of the extras that it holds included."""
    found: set[str] = set()
    for requirement in PROJECT["optional-dependencies"][extra]:
        if within := re.fullmatch(r"trimtab\[(.+)\]", requirement):
            found.update(*map(modules_of, within[1].split(",")))
        else:
            name = re.match(r"[\w-]+", requirement)[0]  # type: ignore[index]
            found.update(BRING.get(name, []), [] if name == "megatron-core" else [name])
    return found


def test_the_table_of_extras_is_that_of_the_package() -> None:
    assert {name: set(modules) for name, modules in extras.EXTRAS.items()} == {n: modules_of(n) for n in extras.EXTRAS}
    assert modules_of("all") == set().union(*map(modules_of, extras.EXTRAS))
    assert set(PROJECT["optional-dependencies"]) == {*extras.EXTRAS, "all", "docs", "dev"}


def test_every_install_line_names_an_extra_that_is_there() -> None:
    """In messages, pages, examples and what runs in CI."""
    files = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*"), *ROOT.glob("src/**/*.py")]
    files += [ROOT / "Makefile", *ROOT.glob(".ci/*"), *ROOT.glob(".github/workflows/*")]
    named = {
        (extra, path.name)
        for path in files
        for line in re.findall(r"pip install[^\n]*?(?:trimtab|\.|whl|wheel)\[([\w,]+)\]", path.read_text("utf-8"))
        for extra in line.split(",")
    }
    assert {extra for extra, _ in named} <= set(PROJECT["optional-dependencies"]), named
    # Before a release nothing of this name is in a registry: pages install from the clone.
    for page in (*ROOT.glob("docs/howto/*.md"), ROOT / "README.md"):
        assert not re.search(r"pip install '?trimtab", page.read_text("utf-8")), page


def test_a_missing_module_names_the_extra_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for extra, modules in extras.EXTRAS.items():
        for module in modules:
            assert extras.install(module, extra) == f"pip install 'trimtab[{extra}]'"
            first = re.fullmatch(r"pip install 'trimtab\[(\w+)\]'", extras.install(module))
            assert first is not None
            assert module in extras.EXTRAS[first[1]]
    assert extras.install("datasets") == "pip install 'trimtab[train]'"
    assert extras.install("torchtitan") == ""
    monkeypatch.setitem(sys.modules, "datasets", None)
    said = r"a table needs datasets \(pip install 'trimtab\[train\]'\)"
    with pytest.raises(ConfigError, match=said):
        extras.required("datasets", "a table", "train")
    for name, words in (("datasets.utils", ": pip install 'trimtab[train]'"), ("numpy", ""), (None, "")):
        assert extras.lacking(ModuleNotFoundError("no", name=name)) == words
    assert extras.lacking(ValueError("datasets")) == ""


@pytest.mark.parametrize(
    ("module", "name", "given"),
    [
        ("datasets", "t.parquet", []), ("pyarrow", "t.jsonl.gz", []), ("datasets", "folder/train.jsonl", []),
        ("transformers", "t.jsonl", []), ("tensorboard", "t.jsonl", ["--report-to", "tensorboard"]),
    ],
)  # fmt: skip
def test_data_that_needs_a_missing_package_names_the_extra(
    module: str, name: str, given: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    data = tmp_path / name
    data.parent.mkdir(exist_ok=True)
    data.write_bytes(b'{"text": "a"}\n')
    asked = data.parent if name.startswith("folder") else data
    monkeypatch.setitem(sys.modules, module, None)
    if module == "tensorboard":
        monkeypatch.setattr("transformers.integrations.get_available_reporting_integrations", lambda: ["wandb"])
    assert main(["train", "--data", str(asked), *given, "--out", str(tmp_path / "run")]) == 2
    assert "pip install 'trimtab[train]'" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.fixture
def package_page(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """The hook of the build, without what builds."""
    names = ("hatchling", "hatchling.metadata", "hatchling.metadata.plugin", "hatchling.metadata.plugin.interface")
    for name in names:
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setattr(sys.modules[names[-1]], "MetadataHookInterface", object, raising=False)
    module = types.ModuleType("package_page")
    exec((ROOT / ".ci/package_page.py").read_text(encoding="utf-8"), vars(module))
    return module


def test_a_package_page_has_absolute_links_and_pictures_or_none(package_page: types.ModuleType) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)]*)\)", package_page.page(text, "https://HOST/OWNER/NAME", "v1"))
    assert len(links) > 20
    assert all(link.startswith("https://HOST/OWNER/NAME/") for link in links), links
    paths = [link.removeprefix("https://HOST/OWNER/NAME/").split("/", 2) for link in links]
    assert all(ref == "v1" and (ROOT / path.partition("#")[0]).exists() for _, ref, path in paths)
    assert {kind for kind, _, path in paths if path.endswith((".svg", ".png"))} == {"raw"}
    bare = package_page.page(text, "", "HEAD")
    assert "](" not in bare
    assert "Which of these do I need leads" in " ".join(bare.split())
    assert package_page.urls("", "HEAD") == {}
    assert {"Source", "Documentation", "Changelog", "Issues"} == set(package_page.urls("https://HOST/O/N", "v1"))


def test_a_release_builds_tries_and_then_publishes() -> None:
    flow = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text(encoding="utf-8"))
    jobs = flow["jobs"]
    assert jobs["try"]["needs"] == "build"
    assert (jobs["publish"]["needs"], jobs["publish"]["if"]) == (["test", "try"], "github.ref_type == 'tag'")
    said = "\n".join(step.get("run", "") for job in jobs.values() for step in job["steps"])
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert re.findall(r"make ([\w-]+)", said) == ["test", "wheel"]
    assert re.search(r"^wheel: \$\(BIN\)/python  ##", makefile, re.MULTILINE), "it installs nothing else first"
    assert all((ROOT / path).stat().st_mode & 0o111 for path in re.findall(r"\.ci/[\w-]+", said))
    versions = {text.rpartition(" ")[2] for text in PROJECT["classifiers"] if "Python :: 3." in text}
    assert versions == set(jobs["try"]["strategy"]["matrix"]["python"])
