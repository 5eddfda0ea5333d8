"""An object in a JSON file: config.json, ours and Hugging Face's, and state.json."""

import json
from pathlib import Path


def read_json(path: Path) -> dict:
    """ValueError with the place of the mistake if the file does not hold an object."""
    try:
        text = path.read_text(encoding="utf-8-sig")
        raw = json.loads(text)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    except json.JSONDecodeError as e:
        line = text.split("\n")[e.lineno - 1].replace("\t", " ")  # a tab is one column, as in e
        caret = " " * (e.colno - 1) + "^"
        raise ValueError(f"{path} is not JSON: {e}\n    {line}\n    {caret}") from None
    except (ValueError, RecursionError) as error:  # bytes that are not UTF-8, or brackets too deep
        raise ValueError(f"{path} is not JSON in UTF-8: {error}") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{path} must hold one object, {{ ... }}, not {text.strip()[:60]}")
    return raw


def write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
