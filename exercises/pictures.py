"""Pictures as text, at most 100 columns wide, of what a student's version did."""

from collections import Counter
from collections.abc import Mapping
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
