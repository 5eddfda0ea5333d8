"""python -m picotron_min.report FOLDER ...    a page about one run, or a comparison of several"""

import argparse
import os
import sys
from pathlib import Path

from picotron_min.report.reading import read_run

PAGE = b"<!DOCTYPE html>"  # how every report begins


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
    os.environ.pop("MPLBACKEND", None)  # a notebook's, which matplotlib may not know here
    try:
        runs = [read_run(folder) for folder in folders]
        if out.is_file() and not PAGE.startswith(out.read_bytes()[: len(PAGE)]):
            raise ValueError(f"{out} exists and is not a report: name another file with --out")
        # Only now, since importing matplotlib takes a second.
        from picotron_min.report.compare import comparison
        from picotron_min.report.one_run import report
    except ModuleNotFoundError as error:
        parser.exit(2, f'the report needs {error.name}: run  pip install -e ".[report]"\n')
    except (ValueError, OSError) as error:
        parser.exit(2, f"{error}\n")
    for note in (note for run in runs for note in run.notes):
        print(f"warning: {note}", file=sys.stderr)
    page, writing = report(*runs) if len(runs) == 1 else comparison(runs), out
    try:
        out.write_text(page, encoding="utf-8", errors="replace")  # a folder's name may be any bytes
        writing = "standard output"
        print(f"wrote {out}", flush=True)
    except OSError as error:  # of a full disk, for example
        sys.stdout = None  # else Python flushes it once more at its exit
        parser.exit(2, f"{writing} cannot be written: {error.strerror}\n")


if __name__ == "__main__":
    main()
