"""Pictures as text, at most 100 columns wide, of what a student's version did."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from exercises.ranks import Record

WIDTH = 100


def bars(rows: Mapping[str, float], number: str = "{:g}") -> str:
    """A bar for each row, the longest one as long as there is room."""
    name_width = max(map(len, rows))
    texts = {name: number.format(value) for name, value in rows.items()}
    room = WIDTH - name_width - max(map(len, texts.values())) - 4
    scale = room / (max(rows.values()) or 1)
    lines = [f"{n:{name_width}}  {texts[n]}  {'█' * round(v * scale)}" for n, v in rows.items()]
    return "\n".join(lines)


def messages(records: list["Record"]) -> str:
    """Who sends how many bytes to whom, an arrow a message."""
    lines = []
    for rank, record in enumerate(records):
        for event in record.events:
            if (event.kind, event.what) == ("start", "send"):
                lines.append(f"rank {rank} ──{event.bytes:6g} bytes ──> rank {event.peer}")
    return "\n".join(lines)


def squares(numbers: Sequence[Sequence[int]]) -> str:
    """A square for each thing that goes from a rank (row) to a rank (column)."""
    heads = "".join(f"to rank {rank:<3}" for rank in range(len(numbers)))
    rows = [f"rank {i}  " + "".join(f"{'■' * n:11}" for n in row) for i, row in enumerate(numbers)]
    return "\n".join(line.rstrip() for line in (" " * 8 + heads, *rows))


def timeline(records: list["Record"], names: Mapping[str, str] | None = None) -> str:
    """What each rank did, in its order: `names` shorten operations and marks.

    (all_reduce 0 begins the first one, and all_reduce 0) is the moment when it is awaited.
    """
    lines = []
    for rank, record in enumerate(records):
        words, labels, counts = [], {}, Counter()
        for event in record.events:
            name = (names or {}).get(event.what, event.what)
            if event.kind == "start":
                labels[event.number] = f"{name}{counts[name]}"
                counts[name] += 1
                words.append(f"({labels[event.number]}")
            elif event.kind == "wait":
                words.append(f"{labels[event.number]})")
            else:
                words.append(name)
        lines.append(f"rank {rank}  " + " ".join(words))
    return "\n".join(line if len(line) <= WIDTH else f"{line[: WIDTH - 3]}..." for line in lines)
