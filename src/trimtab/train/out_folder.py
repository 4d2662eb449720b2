"""The folder that a run writes to: whose it is, the data made ready in it, and the weights that the run begins with."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import hashlib
import json
import math
import sys
from collections import Counter
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TextIO

from trimtab import __version__
from trimtab.checkpoint.folder import UNFINISHED, clear, step_of, unfinished_checkpoints, whole_checkpoints
from trimtab.errors import ConfigError, free_room
from trimtab.train.autosave import EVERY
from trimtab.train.models import trained_skeleton
from trimtab.train.packing import Blocks, prepare_data
from trimtab.train.plan import DATA, EVAL_DATA, INIT, Plan, check_kept
from trimtab.train.presets import IDENTITY, PRESETS, identity, write_preset
from trimtab.train.report import CHECKPOINTS, FINAL, LOGS, MERGED, METRICS, RUN
from trimtab.train.resume import describe_data, remove_results
from trimtab.train.sources import Group
from trimtab.train.weights import size_written, write_plain

FINGERPRINT = "made-of"
"""Lies beside the blocks: a hash of the files and options that they are made of."""
REPORTS = 1 << 17
"""Bytes of metrics and the picture of a short run."""
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""Errors of a file system that cannot keep two runs out of one folder."""


def make_room(plan: Plan) -> TextIO:
    """Make the output folder and the data in it, drop what an earlier run left there, and write a preset's weights.

    A run that goes on keeps all of it; what lies behind its checkpoint goes once that is loaded. Returns the file that
    marks the folder as this run's: no other run begins there before it is closed. Raises ConfigError where another run
    is writing there, or has left what nobody asked to remove, and InputError for data that cannot be trained on: then
    nothing has been removed, and no folder is left that was not there.
    """
    out, config = plan.out, plan.config
    made = [folder for folder in (out, *out.parents) if not folder.exists()]
    with ExitStack() as failed:
        failed.callback(_unmake, made, out)
        try:
            out.mkdir(parents=True, exist_ok=True)
            mark = failed.enter_context((out / RUN).open("a", encoding="utf-8"))
            _claim(mark, plan)
            _prepare_data(plan)
            print(f"trimtab: disk: {check_disk(plan.with_steps())}", file=sys.stderr)
            if config.resume is None:
                (out / METRICS).unlink(missing_ok=True)
                remove_results(out)
                checkpoints = (*whole_checkpoints(out / CHECKPOINTS), *unfinished_checkpoints(out / CHECKPOINTS))
                for folder in (out / INIT, out / LOGS, *checkpoints):  # and not what else lies beside these
                    clear(folder)
                with suppress(OSError):
                    (out / CHECKPOINTS).rmdir()
            (out / LOGS).mkdir(exist_ok=True)
            mark.truncate(0)
            mark.write(json.dumps({**plan.with_steps().config.made_of(), "out": config.out}, indent=1) + "\n")
            mark.flush()
        except OSError as error:
            raise ConfigError(f"--out {out}: cannot be written ({error.strerror})") from error
        write_init(plan)
        failed.pop_all()
    return mark


def _unmake(made: list[Path], out: Path) -> None:
    for name in (DATA, EVAL_DATA):
        clear(out / f"{name}{UNFINISHED}")
        if out in made:
            clear(out / name)
    if out in made:
        (out / RUN).unlink(missing_ok=True)
    for folder in made:
        with suppress(OSError):
            folder.rmdir()


def _claim(mark: TextIO, plan: Plan) -> None:
    """Mark the output folder as this run's, for as long as the file is open."""
    try:
        fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(f"--out {plan.out}: another run is writing there; give a new folder") from None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
    check_kept(plan.config)  # what another run has left since


def _prepare_data(plan: Plan) -> None:
    """Read all of the data, so that what is wrong with it shows before ranks start, into blocks in the output folder,
    and say what was read and what was not. What lies there of the same files and options is taken as it is."""
    for name, groups, draws in ((DATA, plan.groups, plan.draws), (EVAL_DATA, plan.eval_groups, None)):
        if not groups:
            continue
        folder, made_of = plan.out / name, _made_of(plan, groups, draws)
        known = folder / FINGERPRINT
        if not (known.is_file() and known.read_text(encoding="utf-8") == made_of):
            half = folder.with_name(f"{name}{UNFINISHED}")
            clear(half)
            prepare_data(groups, plan.packer, half, draws)
            (half / FINGERPRINT).write_text(made_of, encoding="utf-8")
            clear(folder)
            half.rename(folder)
        for said in Blocks(folder).summaries if plan.config.resume is None else ():
            print(f"trimtab: {name}: {said}", file=sys.stderr)
    plan.eval_blocks()  # raises where too few are held out
    if plan.config.resume is None and plan.source is not None and plan.source.summary:
        print(f"trimtab: model: {plan.source.summary}", file=sys.stderr)


def check_disk(plan: Plan) -> str:
    """Hold what the run will write against the room on its disks; what it removes before counts as free. Returns both
    in words. Raises ConfigError where it does not fit."""
    config, out = plan.config, plan.out
    steps, start = config.max_steps or 0, 0 if config.resume is None else step_of(Path(config.resume))
    last = min(steps, config.stop_after or steps)
    every = config.save_every or steps + 1
    saves = last // every - start // every + bool(config.stop_after == last and last % every)
    root = out / CHECKPOINTS
    ours = config.resume is not None and Path(config.resume).parent.resolve() == root.resolve()
    held = [folder for folder in whole_checkpoints(root) if ours and step_of(folder) <= start]  # `rewind` keeps these
    if config.keep:
        saves = min(saves, max(1, config.keep + 1 - len(held)))
    one, final, model = *sizes(plan), _model_size(plan)
    places = {root: saves * one, out: REPORTS + final * (last == steps)}
    places[out] += 0 if plan.checkpoint == Path(config.model) or plan.checkpoint.exists() else model
    goes = [out / f"{name}{end}" for name in (FINAL, MERGED) for end in ("", UNFINISHED)]
    goes += [folder for folder in (*whole_checkpoints(root), *unfinished_checkpoints(root)) if folder not in held]
    needed, free = Counter[int](), dict[int, float]()
    for place, size in places.items():
        at = place if place.exists() else out
        needed[at.stat().st_dev] += size
        free[at.stat().st_dev] = free_room(at)
    for folder in goes:
        for path in folder.rglob("*"):
            if path.is_file() and path.stat().st_dev in free:
                free[path.stat().st_dev] += path.stat().st_size
    worst = max(needed, key=lambda device: needed[device] - free[device])
    room = f"{free[worst] / 1e6:,.1f} MB are free" if free[worst] < math.inf else "the disk does not say its room"
    words = f"{needed[worst] / 1e6:,.1f} MB are needed for what the run ends with and {saves} checkpoint(s), {room}"
    if needed[worst] > free[worst]:
        raise ConfigError(f"--out {out}: {words}; make room, write elsewhere, or keep fewer checkpoints (--keep)")
    if config.save_every is None:
        device = (root if root.exists() else out).stat().st_dev
        short = needed[device] + 2 * one > free[device]
        words += f"; {2 * one / 1e6:,.1f} MB more, until then, for one every {EVERY / 60:.0f} minutes or at a signal"
        words += ", which are not free: none is written unless they are" if short else ""
    return words


def sizes(plan: Plan) -> tuple[int, int]:
    """Bytes of one checkpoint of the run, and of what it ends with."""
    config, model = plan.config, _model_size(plan)
    values = sum(p.numel() for p in trained_skeleton(plan.skeleton, config).parameters() if p.requires_grad)
    final = 4 * values + model * config.merge if config.frozen else model
    return values * (4 if config.optim else 12), final


def _model_size(plan: Plan) -> int:
    if plan.source is not None:
        return size_written(plan.source, plan.config.save_dtype)
    return 4 * sum(int(p.numel()) for p in plan.skeleton.parameters())


def _made_of(plan: Plan, groups: list[Group], draws: int | None) -> str:
    times = [path.stat().st_mtime_ns for group in groups for path in group.files]
    packer, tokenizer = plan.packer, plan.tokenizer
    words = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else json.dumps(tokenizer.get_vocab())
    values = [__version__, times, describe_data(groups), dataclasses.replace(packer, tokenizer=None), draws]
    return hashlib.sha256(repr([*values, tokenizer.chat_template, words]).encode()).hexdigest()


def write_init(plan: Plan) -> None:
    """Write a preset's first weights, or a checkpoint's in bfloat16, where `checkpoint` expects them, in the place of
    others or of half of them."""
    model, seed, folder = plan.config.model, plan.config.seed, plan.checkpoint
    whose, mark = identity(model, seed), folder / IDENTITY
    if folder == Path(model) or (mark.is_file() and mark.read_text(encoding="utf-8") == whose):
        return
    clear(folder)
    if model in PRESETS:
        write_preset(model, seed, folder)
    else:
        write_plain(Path(model), folder)
    mark.write_text(whose, encoding="utf-8")  # last: without it, not whole
