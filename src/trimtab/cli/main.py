"""The `trimtab` command: one subcommand a module, and one way to fail: a line on stderr and an exit code.

0 done, 1 the run failed, 2 the arguments cannot be used, 128 + n ended by signal n.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import select
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NoReturn

from trimtab import __version__
from trimtab.cli import convert, doctor, plan, train, verify
from trimtab.errors import ConfigError, InputError, TrimtabError, first_line
from trimtab.extras import lacking
from trimtab.processes import Interrupted, signals_raise

COMMANDS: dict[str, ModuleType] = {"train": train, "plan": plan, "doctor": doctor, "verify": verify, "convert": convert}


class _Parser(argparse.ArgumentParser):
    given: Sequence[str] = ()

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False} | options)  # half an option's name is more likely another's

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """A subcommand refuses what it does not know itself: its --help is the one to read."""
        self.given = args or ()
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return known, unknown

    def error(self, message: str) -> NoReturn:
        if message.startswith("the following arguments are required"):  # maybe for want of one that is misspelled
            known = [*re.findall(r"(?<![\w-])-[\w-]+", self.format_usage()), "--help"]
            options = [word for word in self.given if word.startswith("-") and word.lstrip("-")[:1].isalpha()]
            if unknown := [word for word in options if word.partition("=")[0] not in known]:
                message = f"unrecognized arguments: {' '.join(unknown)}"
        self.exit(2, f"trimtab: {message} (see {self.prog} --help)\n")


def build_parser() -> argparse.ArgumentParser:
    """The parser of the command and of all its subcommands."""
    parser = _Parser(prog="trimtab", description="Mixture-of-Experts training, with the right numbers.")
    parser.add_argument("--version", action="version", version=f"trimtab {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    raw = argparse.RawDescriptionHelpFormatter
    for name, module in COMMANDS.items():
        one = commands.add_parser(name, help=module.HELP, description=module.DESCRIPTION, formatter_class=raw)
        module.add_options(one)
        one.add_argument("--debug", action="store_true", help="show tracebacks and the libraries' own logs")
        one.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    if sys.stderr is None:  # print(file=None) would put diagnostics into the output
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # what it cannot write in the terminal's encoding is no error
            stream.reconfigure(errors="backslashreplace")
    try:
        code = _main(argv)
    except SystemExit:
        if _reader_left():
            return 128 + signal.SIGPIPE
        raise
    return 128 + signal.SIGPIPE if _reader_left() else code


def _reader_left(broken: bool = False) -> bool:
    """True where the reader of the output has left. `broken`: some pipe broke, which may be one of the command's own,
    and what could not be written may be gone."""
    if sys.stdout is None:
        return False
    try:
        sys.stdout.flush()
        if not broken:
            return False
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
        if not any(event & select.POLLERR for _, event in poll.poll(0)):
            return False
    except BrokenPipeError:
        pass
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True


def _main(argv: Sequence[str] | None) -> int:
    arguments = sys.argv[1:] if argv is None else list(argv)
    if find_spec("numpy") is None:  # torch warns of it in each process that imports it, and none of ours needs it
        lacks = "Failed to initialize NumPy"
        warnings.filterwarnings("ignore", lacks)
        os.environ["PYTHONWARNINGS"] = ",".join(filter(None, (os.environ.get("PYTHONWARNINGS"), f"ignore:{lacks}")))
    options = build_parser().parse_args(arguments, argparse.Namespace(arguments=arguments))
    # Training hears of signals itself; ranks of a launcher leave them to it.
    heard = options.command != "train" and "RANK" not in os.environ
    return exit_code(lambda: options.run(options), heard=heard, debug=bool(getattr(options, "debug", False)))


def exit_code(run: Callable[[], int], *, heard: bool = True, debug: bool = False) -> int:
    """Return what `run` returns, or the code of the error or signal that ended it, which is said on stderr in one line.

    heard: signals are raised inside of `run`. debug: tracebacks are shown.
    """
    caught: BaseException
    try:
        with signals_raise() if heard else contextlib.nullcontext():
            code = run()
    except TrimtabError as error:
        caught, message, code = error, str(error), 2 if isinstance(error, (ConfigError, InputError)) else 1
    except KeyboardInterrupt as stop:
        caught, message, code = stop, "interrupted", 130
    except Interrupted as stop:
        caught, message, code = stop, "interrupted", 128 + stop.number
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _reader_left(broken=True):
            return 128 + signal.SIGPIPE
        caught, message, code = error, f"{first_line(error, typed=True)}{lacking(error)} (--debug shows where)", 1
    else:
        return code
    if debug:
        traceback.print_exception(caught)
    del caught  # else its frames, this one among them, would live until garbage is collected
    print(f"trimtab: {message}", file=sys.stderr, flush=True)
    return code
