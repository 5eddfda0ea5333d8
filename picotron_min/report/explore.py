"""One page to play with layouts, which opens anywhere, without a network.

python -m picotron_min.report.explore --out docs/explore.html

    explore_data.py      what the trainer computes, for every layout of the page
    explore_tables.js    looks it up
    explore_ranks.js     the bar, and who has what
    explore_time.js      the step in time, the ring, memory and bytes, questions
    explore.html         words, and how all looks
"""

import argparse
import json
from pathlib import Path

from picotron_min.report.explore_data import page_data


def page() -> str:
    """The whole document: scripts and data take the places that explore.html has for them."""
    folder = Path(__file__).parent
    text = (folder / "explore.html").read_text()
    files = (folder / f"explore_{part}.js" for part in ("tables", "ranks", "time"))
    text = text.replace("/*scripts*/", "".join(file.read_text() for file in files))
    # A "<" of the data must not end the script that it stands in.
    data = json.dumps(page_data(), separators=(",", ":")).replace("<", "\\u003c")
    return text.replace("/*data*/", data)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m picotron_min.report.explore")
    parser.add_argument("--out", type=Path, default=Path("docs/explore.html"))
    out = parser.parse_args(arguments).out
    out.write_text(page())
    print(f"wrote {out}: {out.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
