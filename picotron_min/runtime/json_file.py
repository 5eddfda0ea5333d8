"""An object in a JSON file: config.json, ours and Hugging Face's, and state.json."""

import json
from collections import Counter
from pathlib import Path


def read_json(path: Path) -> dict:
    """ValueError with the place of the mistake if there is no object in the file."""
    return read_json_strictly(path)[0]


def read_json_strictly(path: Path) -> tuple[dict, list[str]]:
    """The same, and the keys that are given more than once: Python's reader takes the last."""
    repeated = []

    def collect(pairs: list[tuple]) -> dict:
        repeated.extend(key for key, count in Counter(k for k, _ in pairs).items() if count > 1)
        return dict(pairs)

    try:
        text = path.read_text(encoding="utf-8-sig")
        raw = json.loads(text, object_pairs_hook=collect)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    except json.JSONDecodeError as e:
        # A column counts characters, so a tab is shown as one, or the caret would miss.
        line = text.split("\n")[e.lineno - 1].replace("\t", " ")
        where = f"{path} is not JSON: line {e.lineno}, column {e.colno}: {e.msg}"
        raise ValueError(f"{where}\n    {line}\n    {' ' * (e.colno - 1)}^") from None
    except ValueError as error:
        raise ValueError(f"{path} is not JSON in UTF-8: {error}") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{path} must hold one object, {{ ... }}, not {text.strip()[:60]}")
    return raw, repeated


def write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
