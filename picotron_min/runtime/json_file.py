"""An object in a JSON file: config.json, ours and Hugging Face's, and state.json."""

import json
from collections import Counter
from pathlib import Path


def read_json(path: Path) -> dict:
    """ValueError with the place of the mistake unless the file holds an object."""
    try:
        raw = parse_json(text := path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    except json.JSONDecodeError as e:
        line = text.split("\n")[e.lineno - 1].replace("\t", " ")  # a tab is one column, as in e
        caret = " " * (e.colno - 1) + "^"
        raise ValueError(f"{path} is not JSON: {e}\n    {line}\n    {caret}") from None
    except ValueError as error:
        raise ValueError(f"cannot read {path} as JSON in UTF-8: {error}") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{path} must hold one object, {{ ... }}, not {text.strip()[:60]}")
    return raw


def parse_json(text: str) -> object:
    """ValueError also for a repeated key."""
    try:
        return json.loads(text, object_pairs_hook=_object)
    except RecursionError:
        raise ValueError("brackets are nested too deep") from None


def _object(pairs: list[tuple[str, object]]) -> dict:
    counts = Counter(key for key, _ in pairs)
    if repeated := [key for key, count in counts.items() if count > 1]:
        raise ValueError(f"an object repeats {', '.join(repeated)}: keep one of each")
    return dict(pairs)


def write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
