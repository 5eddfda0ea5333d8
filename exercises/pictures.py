"""What a right version did, as text: its messages in order and their bytes, or its results."""

from collections import Counter
from collections.abc import Iterable

from exercises.compare import shown
from exercises.exercise import Case
from exercises.ranks import Record

ABOUT = "(send0: the first send begins; send0): it is awaited; other words: marks of the exercise"
MOST_LINES = 16


def picture(runs: list[tuple[Case, list[Record]]]) -> str:
    """Of the first case with the most ranks."""
    # A single rank sends nothing that could be drawn.
    case, records = max(runs, key=lambda run: run[0].ranks)
    values = records[0].values
    lines = [text for text in values.values() if isinstance(text, str) and "\n" in text]
    if any(record.events for record in records):
        lines = [ABOUT, *by_rank(map(timeline, records)), *by_rank(map(sends, records))]
    elif not lines:  # a drawing
        lines = [f"{name}: {shown(value)[0]}" for name, value in values.items()]
    lines = [line for text in (str(case), *lines) for line in text.splitlines()]
    return "\n".join(lines if len(lines) <= MOST_LINES else [*lines[:MOST_LINES], "..."])


def by_rank(texts: Iterable[str]) -> list[str]:
    """A line for each rank, or one for all if they do the same."""
    first, *others = texts = list(texts)
    if all(text == first for text in others):
        return [f"  each rank  {first}"]
    return [f"  rank {rank}  {text}" for rank, text in enumerate(texts)]


def timeline(record: Record) -> str:
    """What a rank did, in its order; what it awaits at once has both brackets."""
    words, labels, counts = [], {}, Counter()
    for event in record.events:
        if event.kind == "start":
            labels[event.number] = f"{event.what}{counts[event.what]}"
            counts[event.what] += 1
            words.append(f"({labels[event.number]}")
        # Nothing has happened since its start: both brackets in one word.
        elif event.kind == "wait" and words[-1] == f"({labels[event.number]}":
            words[-1] += ")"
        elif event.kind != "batch":
            words.append(f"{labels[event.number]})" if event.kind == "wait" else event.what)
    return " ".join(words)


def sends(record: Record) -> str:
    sent = (f"{n} x {what}, {size:g} bytes" for what, (n, size) in record.sent.items())
    return f"sends {' and '.join(sent) or 'nothing'}"
