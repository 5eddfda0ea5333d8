"""What a student has solved, and which hints were shown, in exercises/progress.json."""

import json

from exercises.exercise import FOLDER

FILE = FOLDER / "progress.json"


def read(key: int | str) -> dict:
    return {"passed": False, "hints": 0} | _all().get(str(key), {})


def update(key: int | str, **changes: int | bool) -> None:
    # One student at a time: it is written whole.
    FILE.write_text(json.dumps(_all() | {str(key): read(key) | changes}, indent=4) + "\n")


def next_hint(key: int | str, hints: list[str]) -> list[str]:
    """The hints up to one more than before, as lines."""
    used = min(len(hints), read(key)["hints"] + 1)
    update(key, hints=used)
    return [f"hint {i} of {len(hints)}: {text}" for i, text in enumerate(hints[:used], 1)]


def _all() -> dict:
    return json.loads(FILE.read_text()) if FILE.exists() else {}
