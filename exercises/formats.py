"""Marks in the formats of others: Gradescope's results.json and its autograder zip, JUnit's XML.

Gradescope: https://gradescope-autograders.readthedocs.io, "Specifications". It unpacks the zip into
/autograder/source, runs setup.sh once, and run_autograder for each submission, which lies in
/autograder/submission and is answered in /autograder/results/results.json.
"""

import json
import re
import shlex
import zipfile
from collections.abc import Iterable
from pathlib import Path
from xml.etree import ElementTree

from exercises.exercise import FOLDER

ROOT = FOLDER.parent
SETUP = """\
#!/usr/bin/env bash
set -e
apt-get update && apt-get install -y python3 python3-venv
python3 -m venv /autograder/venv
# torch for CPUs is a tenth of the size.
/autograder/venv/bin/pip install "torch>=2.11,<2.14" --index-url https://download.pytorch.org/whl/cpu
/autograder/venv/bin/pip install /autograder/source
"""
RUN = """\
#!/usr/bin/env bash
cd /autograder/source
PYTHONPATH=. /autograder/venv/bin/python -m exercises grade --one /autograder/submission \\
    --json /autograder/results/results.json --seed {seed} {exercises}
"""


def results(rows: list[dict]) -> dict:
    """Gradescope's results.json: a test for each task."""
    is_class = len({row["student"] for row in rows}) > 1
    tests = [
        {
            "name": f"{row['student']} {row['exercise']}" if is_class else row["exercise"],
            "score": row["points"],
            "max_score": row["of"],
            "status": "passed" if row["passed"] else "failed",
            "output": row["message"] or row["mistake"].replace("_", " "),
            "output_format": "text",
            "visibility": "visible",
        }
        for row in rows
    ]
    seconds = sum(float(row["seconds"]) for row in rows)
    return {"execution_time": round(seconds), "stdout_visibility": "hidden", "tests": tests}


def write_junit(path: Path, rows: list[dict]) -> None:
    """A suite for each student, a case for each task."""
    root = ElementTree.Element("testsuites", tests=str(len(rows)))
    for student in dict.fromkeys(row["student"] for row in rows):
        own = [row for row in rows if row["student"] == student]
        failures = str(sum(not row["passed"] for row in own))
        suite = ElementTree.SubElement(
            root, "testsuite", name=student, tests=str(len(own)), failures=failures
        )
        for row in own:
            case = ElementTree.SubElement(
                suite, "testcase", name=row["exercise"], classname=student, time=str(row["seconds"])
            )
            if not row["passed"]:
                failed = ElementTree.SubElement(case, "failure", message=row["mistake"])
                # XML has no control characters, and a student's code may print some.
                failed.text = re.sub(r"[^\t\n -\ud7ff\ue000-\ufffd]", "?", row["message"])
    ElementTree.ElementTree(root).write(path, encoding="utf-8", xml_declaration=True)


def write_zip(path: Path, words: Iterable[str], seed: int) -> None:
    """The autograder: the whole course, with its answers, and the two scripts."""
    exercises = shlex.join(["--exercises", *words]) if words else ""
    scripts = {"setup.sh": SETUP, "run_autograder": RUN.format(seed=seed, exercises=exercises)}
    names = "train.py", "config.json", "pyproject.toml", "README.md", "LICENSE"
    files = [
        *(ROOT / name for name in names),
        *(ROOT / "picotron_min").rglob("*"),
        *FOLDER.glob("[a-z_]*.py"),
    ]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in scripts.items():
            info = zipfile.ZipInfo(name)
            info.external_attr = 0o755 << 16  # it can be run
            archive.writestr(info, text)
        for file in sorted(files):
            if file.is_file() and file.suffix != ".pyc":
                archive.write(file, file.relative_to(ROOT))


def write_results(path: Path, rows: list[dict]) -> None:
    path.write_text(json.dumps(results(rows), indent=2) + "\n")
