"""What a student has tried and passed, in exercises/progress.json."""

import json

from exercises.exercise import FOLDER

FILE = FOLDER / "progress.json"


def read(key: int | str) -> dict:
    return {"passed": False, "tries": 0, "hints": 0} | _all().get(str(key), {})


def update(key: int | str, **changes: int | bool) -> None:
    # One student at a time: it is written whole.
    FILE.write_text(json.dumps(_all() | {str(key): read(key) | changes}, indent=4) + "\n")


def next_hint(key: int | str, hints: list[str], is_try: bool = False) -> list[str]:
    """The hints up to one more than before, as lines; `is_try`: it is for a wrong answer."""
    before = read(key)
    used = min(len(hints), before["hints"] + 1)
    update(key, hints=used, tries=before["tries"] + is_try)
    return [f"hint {i} of {len(hints)}: {text}" for i, text in enumerate(hints[:used], 1)]


def _all() -> dict:
    return json.loads(FILE.read_text()) if FILE.exists() else {}
