"""The command's answer about a course with changed lines, in a process of its own."""

import contextlib
import io
import multiprocessing
import sys
from collections.abc import Callable
from pathlib import Path

from exercises.loading import edited
from picotron_min.runtime.config import Config

ROOT = Path(__file__).parents[2]
Edit = tuple[str, str, str]  # a file, a text that it has once, what stands there instead


def answer(
    config: Config, *edits: Edit, before: Callable[[], None] | None = None, lists: bool = False
) -> tuple[int, str]:
    """The exit code and what is printed; `before` runs in the process, with all modules loaded."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_answer, args=(theirs, config, edits, before, lists))
    process.start()
    theirs.close()
    try:
        return ours.recv()
    finally:
        process.join()


def _answer(pipe, config: Config, edits: tuple[Edit, ...], before, lists: bool) -> None:
    for name in [*sys.modules]:
        if name.partition(".")[0] in ("picotron_min", "train", "difference"):
            del sys.modules[name]
    with contextlib.ExitStack() as stack, contextlib.redirect_stdout(io.StringIO()) as text:
        for file, old, new in edits:
            stack.enter_context(edited(ROOT / file, old, new))
        from difference.__main__ import run
        from difference.tiny import trial_of
        from picotron_min.runtime import config as anew

        if before:
            before()
        config = anew.Config.model_validate_json(config.model_dump_json(by_alias=True))
        code = run(trial_of(config, 2, own_sizes=False), lists)
    pipe.send((code, text.getvalue()))
