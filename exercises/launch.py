"""The exercises of a class: `python -m exercises`. See docs/teaching.md.

course.zip has the whole course, which checks run. It is packed, not secret: it keeps an answer from
being read by accident, or found by a search. Whoever unpacks it has the answers.
"""

import runpy
import sys
import tempfile
import zipfile
from pathlib import Path

# `handout` writes this file as the __main__.py of a class's tree.
if __name__ == "__main__":
    here = Path(__file__).resolve().parent
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        zipfile.ZipFile(here / "course.zip").extractall(folder)
        sys.path.insert(0, folder)
        sys.modules.pop("exercises", None)  # the package that this file is in
        from exercises import exercise

        exercise.FOLDER = here  # of what a student writes
        runpy.run_module("exercises", run_name="__main__")
