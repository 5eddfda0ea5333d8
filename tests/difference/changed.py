"""The command's answer about a course with a changed line, in a process of its own."""

import contextlib
import importlib
import inspect
import io
import multiprocessing
import re
from collections.abc import Callable
from pathlib import Path

from difference.report import run
from difference.tiny import trial_of
from picotron_min.runtime.config import Config

ROOT = Path(__file__).parents[2]
Edit = tuple[str, str, str]  # a file, a text that it has once, what stands there instead


def answer(
    config: Config,
    edit: Edit | None = None,
    before: Callable[[], None] | None = None,
    steps: int = 2,
) -> tuple[int, str]:
    """The exit code and what is printed; `before` runs in the process."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_answer, args=(theirs, config, edit, before, steps))
    process.start()
    theirs.close()
    try:
        assert ours.poll(120), "no answer after 120 s"
        return ours.recv()
    finally:
        process.kill()
        process.join()


def _answer(pipe, config: Config, edit: Edit | None, before: Callable | None, steps: int) -> None:
    if edit:
        _change(*edit)
    if before:
        before()
    with contextlib.redirect_stdout(io.StringIO()) as text:
        code = run(trial_of(config, steps, own_sizes=False))
    pipe.send((code, text.getvalue()))


def functions_in(text: str) -> list[str]:
    """Those that an answer names: mesh:build_axes for `picotron_min/mesh.py:57 build_axes`."""
    return [":".join(of) for of in re.findall(r"(\w+)\.py:\d+ (\S+)", text.partition("look at")[2])]


def _change(file: str, old: str, new: str) -> None:
    """Give a module's functions their new code, wherever they have been imported."""
    path = ROOT / "picotron_min" / file
    text = path.read_text()
    assert text.count(old) == 1, f"{file} has {old!r} {text.count(old)} times, not once"
    module = importlib.import_module(f"picotron_min.{file.removesuffix('.py').replace('/', '.')}")
    changed = dict(vars(module))
    exec(compile(text.replace(old, new), str(path), "exec"), changed)
    _swap(vars(module), changed, module.__name__)


def _swap(old: dict, new: dict, module: str) -> None:
    for name, value in old.items():
        if inspect.isclass(value) and value.__module__ == module:
            _swap(vars(value), vars(new[name]), module)
        elif inspect.isfunction(value := getattr(value, "__func__", value)):  # of a static method
            changed = inspect.unwrap(getattr(new[name], "__func__", new[name]))
            if value.__module__ == module:
                inspect.unwrap(value).__code__ = changed.__code__
