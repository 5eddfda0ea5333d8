"""An object in a JSON file: config.json, ours and Hugging Face's, and what tokens are made from."""

import json
from pathlib import Path

from picotron_min.runtime.wording import explained


def read_json(path: Path) -> dict:
    """ValueError with the place of the mistake unless the file holds an object."""
    with explained(f"cannot read {path}"):
        raw = parse_json(path.read_text(encoding="utf-8-sig"))
        if not isinstance(raw, dict):
            raise ValueError(f"it must hold one object, {{ ... }}, not {str(raw)[:60]}")
    return raw


def parse_json(text: str) -> object:
    """ValueError also for a repeated key, of which json would take the last."""
    return json.loads(text, object_pairs_hook=_object)


def _object(pairs: list[tuple[str, object]]) -> dict:
    content = {}
    for key, value in pairs:
        if key in content:
            raise ValueError(f"an object repeats {key}: keep one of them")
        content[key] = value
    return content


def write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
