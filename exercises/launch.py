"""The exercises of a class: `python -m exercises`. See docs/teaching.md.

course.zip has the whole course, which checks run. It is packed, not secret: it keeps an answer from
being read by accident, or found by a search. Whoever unpacks it has the answers.
"""

import runpy
import sys
import tempfile
import zipfile
from pathlib import Path


def run_packed(module: str) -> None:
    """Run a module of the packed course, which imports nothing of this tree."""
    here = Path(__file__).resolve().parent
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        zipfile.ZipFile(here / "course.zip").extractall(folder)
        sys.path.insert(0, folder)
        for name in [*sys.modules]:
            if name.partition(".")[0] in ("exercises", "picotron_min"):
                del sys.modules[name]
        from exercises import exercise

        exercise.FOLDER = here  # of what a student writes
        runpy.run_module(module, run_name="__main__")


# `handout` makes this file the __main__.py of a class's tree.
if __name__ == "__main__":
    run_packed("exercises")
