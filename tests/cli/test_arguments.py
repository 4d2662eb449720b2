"""Arguments that no command takes."""

from __future__ import annotations

import pytest

from trimtab.cli.main import build_parser


@pytest.mark.parametrize(
    ("given", "command"),
    [("train --steps 5", "trimtab train"), ("verify --fuzz 9", "trimtab verify"), ("--quick", "trimtab")],
)
def test_whoever_refuses_an_option_names_the_help_that_lists_its_own(
    given: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        build_parser().parse_args(given.split())
    assert ended.value.code == 2
    assert f"(see {command} --help)" in capsys.readouterr().err
