"""Gates B and O: calls and bytes against what an exercise expects, and the order of events."""

from collections.abc import Callable, Sequence

from exercises.exercise import Case, Sent, together
from exercises.ranks import Record

NONE = Sent(0, 0.0)


def traffic_problem(traffic: Callable, case: Case, rank: int, record: Record) -> str | None:
    right = traffic(case, rank).items()
    # "send as shift": what travels, and how the ledger counts it.
    for found, end, what in (
        (record.sent, 0, f"rank {rank} sends"),
        (record.ledger, -1, f"the ledger of rank {rank} has"),
    ):
        wanted = together((names.split(" as ")[end], sent) for names, sent in right)
        if problem := _count_problem(found, wanted):
            return f"{what} {problem}"
    return None


def _count_problem(found: dict[str, Sent], right: dict[str, Sent]) -> str:
    """All operations whose calls or bytes differ: what they are, and what they should be."""
    texts = [], []
    for what in {**right, **found}:
        got, expected = found.get(what, NONE), right.get(what, NONE)
        # Bytes are fractions of tensors, such as 2 (n-1)/n: rounded.
        is_right = expected.calls in (None, got.calls) and abs(got.bytes - expected.bytes) <= 1e-6
        if is_right or not (got.bytes or expected.bytes):  # what a rank does alone sends nothing
            continue
        for text, counts in zip(texts, (found, right), strict=True):
            if (sent := counts.get(what)) and sent.bytes:
                size = f"{sent.bytes:.10g} bytes"
                is_counted = expected.calls is not None
                text.append(f"{sent.calls} x {what}, {size}" if is_counted else f"{size} by {what}")
    got, expected = (" and ".join(text) or "nothing" for text in texts)
    return f"{got}; it should be {expected}" if any(texts) else ""


def order_problem(rows: Sequence[tuple], case: Case, rank: int, record: Record) -> str | None:
    """The first row of ORDER that does not hold: (what, least, most, mark, why)."""
    for what, least, most, mark, why in rows:
        before = record.events[: record.place("mark", mark)]
        found = sum(f"{event.kind} {event.what}" == what for event in before)
        if not least <= found <= most:
            right = least if found < least else most
            return f"rank {rank}: {found} x {what} before `{mark}`, should be {right}: {why}"
    return None
