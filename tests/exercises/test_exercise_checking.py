"""What the checker answers to versions that no exercise lists."""

import re
from pathlib import Path

import pytest
import torch

from exercises import exercise as catalogue
from exercises.calls import Calls, wrong_call
from exercises.checking import check
from exercises.exercise import Mistake, mistakes_in
from exercises.outcome import failure_of
from exercises.source import solution

MERGE = catalogue.load(17)
IN_ORDER = "torch.cat((pieces[rank], pieces[-1 - rank]))"


def answer(exercise, mistake):
    return check(exercise, mistake.apply(solution(exercise)), Path("student.py"))


def answer_to_edits(exercise, *edits: str):
    return answer(exercise, Mistake("", "", [*zip(edits[::2], edits[1::2], strict=True)]))


# By exercise: the answer, a part of its message, and edits, as known mistakes are written.
OTHERS = {
    4: r"""
pattern: too large by a factor of 2: cp.
    isend, tensor => isend, axis.size * tensor
unknown: rank 0, `what wait\(\)
    isend, tensor => isend, tensor * (axis.size if axis.size == 2 else 1 / axis.size)
exception: on rank 1: SystemExit: 3.*student.py, line [0-9]+: self.sent = axis.rank - 1
    self.sent = tensor => self.sent = axis.rank - 1 or (_ for _ in ()).throw(SystemExit(3))
deadlock: rank 0 waits to receive from rank 1, which.*at line [0-9]+: dist.recv
    self.sent = tensor => dist.recv(tensor, group=axis.group, group_src=axis.next)
unknown: changes a tensor while it is sent to rank 1
    [send, receive]) => [send, receive]); tensor += 1
unusable_file: line [0-9]+: os is refused
    self.sent = tensor => torch.os.fork()
unusable_file: does not define __init__
    def __init__ => def init
unusable_file: line [0-9]+ is not Python: 'return' outside function
- def __init__(self, tensor: Tensor, axis: Axis, distance: int = 1) -> None:
+ return
+ def __init__(self, tensor: Tensor, axis: Axis, distance: int = 1) -> None:
""",
    18: r"""
late_first: In the cases that fail, it does the same as this mistake: The late piece comes
- return torch.cat((pieces[rank], pieces[-1 - rank]))
+ late = torch.cat((pieces[-1 - rank], pieces[rank]))
+ return late if size > 1 else torch.arange(seq_length)
exception: noticed later.* returned None\n    the course's own
    return torch.cat((pieces[rank], pieces[-1 - rank])) => return None
""",
    17: r"""
argument_changed: merge_blocks changes its argument `lse_2`
    * out_2, lse => * out_2, lse + 0 * lse_2.copy_(lse_2 + 1)
unknown: do not know this mistake.*returned .*own .*With .*changes its argument `lse_2`
    * out_2, lse => * out_2, lse + lse_2.copy_(lse_2 + 1)
""",
    23: r"""
bytes: it should be 7 x all_to_all, .*, and rank 0: 4 x start all_to_all before
- shared = meanwhile()
+ all_to_all(torch.zeros(self.axis.size), self.axis, 0, 0)
+ shared = meanwhile()
""",
}
OTHERS = [(number, other) for number, text in OTHERS.items() for other in mistakes_in(text)]


@pytest.mark.parametrize(("number", "other"), OTHERS, ids=range(len(OTHERS)))
def test_other_mistakes_get_an_honest_answer(number, other):
    exercise = catalogue.load(number)
    verdict = answer(exercise, other)
    assert not verdict.passed and verdict.mistake == other.name, verdict
    told = "\n".join([verdict.message, *verdict.gates.values()])
    assert re.search(other.sentence, told, re.S), told
    if other.name == "exception":  # another mistake may crash in the same way in one case
        assert not any(wrong.sentence in verdict.message for wrong in exercise.mistakes)


def test_a_crash_is_not_explained_by_a_mistake_that_crashes_in_other_cases_too():
    divides = Mistake("divides", "It divides by zero.", [(IN_ORDER, "1 / 0")])
    exercise = catalogue.load(18)
    exercise.mistakes = [divides]
    assert answer_to_edits(exercise, IN_ORDER, "1 / 0").mistake == "divides"
    # In some cases only; and in all of them, but in another line.
    for edit in (f"1 / 0 if size > 2 else {IN_ORDER}", "rank * 0 + 2 / 0"):
        verdict = answer_to_edits(exercise, IN_ORDER, edit)
        assert verdict.mistake == "exception" and divides.sentence not in verdict.message
    divides.edits[:] = [(IN_ORDER, "1 / 0  # a comment")]  # is no other line
    assert answer_to_edits(exercise, IN_ORDER, "1 / 0").mistake == "divides"


def test_a_function_that_calls_itself_is_shown_with_its_line_once():
    path, names = Path("student.py"), {}
    exec(compile("def f():\n    return f()", str(path), "exec"), names)
    with pytest.raises(RecursionError) as caught:
        names["f"]()
    assert failure_of(caught.value, path).text.count("student.py, line 2") == 1


def noted(definition, *arguments) -> dict:
    """The calls with each of the arguments."""
    calls = Calls()
    watched = calls.watch(definition)
    for argument in arguments:
        list(watched(argument))
    return calls.take()


def test_only_calls_with_the_same_arguments_are_compared():
    two, three = torch.zeros(2), torch.zeros(3)
    right = noted(lambda x: x, two, three)
    for version, *given in ((lambda x: x, two, two), (lambda x: x + 1, two + 1)):
        assert wrong_call(noted(version, *given), right) == ""
    found = wrong_call(noted(lambda x: x + 1e-9, two), right)
    assert "<lambda>(x=[0, 0])\n    returned [1e-09" in found


@pytest.mark.quick
def test_helpers_and_imports_of_a_student_are_used():
    verdict = answer_to_edits(
        MERGE,
        "torch.logaddexp(lse_1, lse_2)",
        "common(lse_1, lse_2)",
        "def merge_blocks(",
        # The module has a `wide` of its own, and defines SoftmaxAttention further down.
        "import torch as t\nPair, ONE, wide = tuple, 1.0, None\n\n\n"
        "def kept(function: SoftmaxAttention):\n    return function\n\n\n"
        "def common(a, b):\n    assert SoftmaxAttention().forward and wide is None\n"
        "    return t.logaddexp(a, b)\n\n\n@kept\ndef merge_blocks(",
        "lse_2) -> tuple[Tensor, Tensor]:",
        "lse_2, one=ONE) -> Pair:",
    )
    assert verdict.passed, verdict
