"""Each room of the house has a budget in tokens: what comes in takes something else out.

Tokens, since formatting does not change them. Comments and docstrings are free; a text of several
lines, such as the mistakes of an exercise, counts as six tokens a line. Who needs more raises a
number here, and says in that commit why.
"""

import ast
import io
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# Files of a room, and its tokens at most. What students write in exercises/ has digits in its name.
BUDGETS = {
    "train.py picotron_min/*.py": 17_600,
    "picotron_min/extensions/**/*.py": 34_000,
    "picotron_min/runtime/*.py": 25_400,
    "picotron_min/planner/*.py": 20_850,
    "picotron_min/dry_run/*.py": 4_300,
    "picotron_min/report/*.py": 7_700,
    "difference/*.py": 8_100,
    "exercises/[_a-z]*[_a-z].py": 40_950,
    "create_config.py benchmarks/*.py": 9_850,
    "tests/**/*.py": 87_800,
}
FREE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
FREE |= {tokenize.ENCODING, tokenize.ENDMARKER}
WITH_DOCSTRING = ast.Module | ast.ClassDef | ast.FunctionDef


def tokens_in(text: str) -> int:
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, WITH_DOCSTRING)]
    docstrings = {node.body[0].lineno for node in nodes if ast.get_docstring(node)}
    tokens = [t for t in tokenize.generate_tokens(io.StringIO(text).readline) if t.type not in FREE]
    tokens = [t for t in tokens if t.type != tokenize.STRING or t.start[0] not in docstrings]
    return sum(6 * len(t.string.splitlines()) if "\n" in t.string else 1 for t in tokens)


@pytest.mark.parametrize("room", BUDGETS)
def test_a_room_keeps_to_its_budget(room):
    files = [path for pattern in room.split() for path in ROOT.glob(pattern)]
    sizes = {path.relative_to(ROOT).as_posix(): tokens_in(path.read_text()) for path in files}
    largest = sorted(sizes, key=sizes.get)[-3:]
    assert 0 < sum(sizes.values()) <= BUDGETS[room], f"the largest files are {largest}"
