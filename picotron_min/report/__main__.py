"""python -m picotron_min.report FOLDER ...    a page about one run, or a comparison of several"""

import argparse
import importlib.util
import os
import sys
from pathlib import Path

from picotron_min.report.reading import read_run

PAGE = b"<!DOCTYPE html>"  # how every report begins
NO_MATPLOTLIB = 'the report needs matplotlib: run  pip install -e ".[report]"'


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m picotron_min.report",
        description="Make a page of what runs have recorded: one run's report, or a comparison.",
    )
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="save_dir of a run")
    about = "default: report.html in the folder; of several runs, in the working directory"
    parser.add_argument("--out", type=Path, metavar="FILE", help=about)
    given = parser.parse_args(arguments)
    folders = list(dict.fromkeys(given.folders))
    out = given.out or (folders[0] if len(folders) == 1 else Path()) / "report.html"
    try:
        runs = [read_run(folder) for folder in folders]
        if importlib.util.find_spec("matplotlib") is None:
            raise ValueError(NO_MATPLOTLIB)
        with out.open("a+b") as file:  # before anything is drawn
            file.seek(0)
            if not PAGE.startswith(file.read(len(PAGE))):
                raise ValueError(f"{out} exists and is not a report: name another file with --out")
    except (ValueError, OSError) as error:
        parser.exit(2, f"{error}\n")
    os.environ.pop("MPLBACKEND", None)  # a notebook's, which matplotlib may not know here
    # Only now, since importing matplotlib takes a second.
    from picotron_min.report.compare import comparison
    from picotron_min.report.one_run import report

    page = report(*runs) if len(runs) == 1 else comparison(runs)
    out.write_text(page, encoding="utf-8", errors="replace")  # a folder's name may be any bytes
    for run in runs:
        for note in run.notes:
            print(f"warning: {note}", file=sys.stderr)
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
