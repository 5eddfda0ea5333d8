"""Gradescope: its autograder zip. `grade --json` answers a submission with results.json.

https://gradescope-autograders.readthedocs.io, "Specifications". The zip is unpacked into
/autograder/source. setup.sh runs once, and run_autograder for each submission, which lies in
/autograder/submission and is answered in /autograder/results/results.json. From the unzipped folder
Dockerfile builds the same image: for "Manual Docker Configuration" there, or to grade in.
"""

import shlex
import zipfile
from pathlib import Path

from exercises.exercise import ROOT
from exercises.grade import tasks_of
from exercises.handout import PACKED, files_in

SETUP = """\
#!/usr/bin/env bash
set -e
apt-get update && apt-get install -y python3 python3-venv
python3 -m venv /autograder/venv
# torch for CPUs is a tenth of the size.
/autograder/venv/bin/pip install "torch>=2.11,<2.14" --index-url https://download.pytorch.org/whl/cpu
/autograder/venv/bin/pip install /autograder/source
"""
DOCKERFILE = """\
FROM gradescope/autograder-base:ubuntu-22.04
COPY . /autograder/source/
RUN bash /autograder/source/setup.sh && cp /autograder/source/run_autograder /autograder/
"""
RUN = """\
#!/usr/bin/env bash
cd /autograder/source
PYTHONPATH=. /autograder/venv/bin/python -m exercises grade /autograder/submission \\
    --json /autograder/results/results.json --seed {seed} {exercises}
"""


def autograder(zip: Path, seed: int, exercises: list[str]) -> None:
    """Write the zip for Gradescope: the whole course, with its answers, and how to run it."""
    tasks_of(exercises, [])  # which may refuse them
    words = shlex.join(["--exercises", *exercises]) if exercises else ""
    scripts = {"setup.sh": SETUP, "run_autograder": RUN.format(seed=seed, exercises=words)}
    scripts["Dockerfile"] = DOCKERFILE
    with zipfile.ZipFile(zip, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in scripts.items():
            info = zipfile.ZipInfo(name)
            info.external_attr = 0o755 << 16  # it can be run
            archive.writestr(info, text)
        for name in files_in(["pyproject.toml", "README.md", "LICENSE", *PACKED]):
            archive.write(ROOT / name, name)
    print(f"{zip} is for Gradescope; it has the answers: students must not get it")
