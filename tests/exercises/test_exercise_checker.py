"""The checker of exercises/: what it answers to mistakes that no exercise lists."""

import ast
import csv
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from exercises import __main__ as commands
from exercises import child, grade, progress, sandbox
from exercises import exercise as catalogue
from exercises.calls import Calls, content_of, form, wrong_call
from exercises.checking import check
from exercises.child import Printed
from exercises.compare import equal, first_difference, only_wrong, patterns
from exercises.counts import traffic_problem
from exercises.exercise import Case, Mistake, Sent, Verdict, in_common, mistakes_in
from exercises.grade import Task, row_of
from exercises.sandbox import Sandbox
from exercises.source import find, solution, starter

ROOT = Path(__file__).parents[2]

SHIFT, MERGE, ZIGZAG = (catalogue.load(n) for n in (4, 17, 18))
BODY = "self.sent = tensor  # may not be changed before `wait`"
LINE = f"line {solution(SHIFT)[: solution(SHIFT).index(BODY)].count(chr(10)) + 1}"


def answer(exercise, mistake):
    return check(exercise, mistake.apply(solution(exercise)), Path("student.py"))


def answer_to_edits(exercise, *edits: str):
    return answer(exercise, Mistake("", "", [*zip(edits[::2], edits[1::2], strict=True)]))


# By exercise: the answer, a part of its message, and edits, as known mistakes are written.
OTHERS = {
    3: """
unknown: `first wrong draw` is initial_weight('model.embed_tokens.weight/0', (
    whole = initial_weight(name, => whole = initial_weight(f'{name}/{axes.tp.rank}',
unknown: It fails only in the cases with dp=2.
    shapes[name], seed => shapes[name], seed + axes.dp.rank
""",
    4: """
pattern: too large by a factor of 2: cp.
    isend, tensor => isend, axis.size * tensor
pattern: too small by a factor of 2: cp.
    isend, tensor => isend, tensor / axis.size
unknown: do not know this mistake
    isend, tensor => isend, tensor * (axis.size if axis.size == 2 else 1 / axis.size)
pattern: Every wrong number is 2 times the right one
    isend, tensor => isend, 2 * tensor
pattern: rank 0 only. Only `what self.sent holds is sent` and `what wait() returns` differ;
- send = dist.P2POp(dist.isend, tensor, group=axis.group, group_peer=to)
+ is_first = to == 0 and 0 in dist.get_process_group_ranks(axis.group)
+ send = dist.P2POp(dist.isend, tensor * is_first, group=axis.group, group_peer=to)
unknown: do not know this mistake.
- self.sent = tensor
+ tensor = tensor * (1 + axis.rank)
+ self.sent = tensor
exception: on rank 0: SystemExit: 3
    self.sent = tensor => raise SystemExit(3)
exception: on rank 1: ZeroDivision
    self.sent = tensor => self.sent = 1 / (axis.rank - 1)
deadlock: rank 0 waits to receive from rank 1, which waits to receive from rank 0
    self.sent = tensor => dist.recv(tensor, group=axis.group, group_src=axis.next)
unusable_file: import os is refused
    self.sent = tensor => import os
unusable_file: .os is refused
    self.sent = tensor => torch.os.fork()
unusable_file: open is refused
    self.sent = tensor => open('x')
unusable_file: .__dict__ is refused
    self.sent = tensor => tensor.__dict__
unusable_file: LINE is not Python
    self.sent = tensor => def =
unusable_file: does not define __init__
    def __init__ => def init
unusable_file: own ring
- def __init__(self, tensor: Tensor, axis: Axis, distance: int = 1) -> None:
+ ring = 1
+ def __init__(self, tensor: Tensor, axis: Axis, distance: int = 1) -> None:
unusable_file: dist is anoth
    import torch.distributed as dist => import math as dist
""",
    7: """
pattern: part of the right sum
    (bucket.gradients, => (bucket.gradients.clone(),
""",
    15: """
exception: no attribute 'to'
    torch.nn.utils.get_total_norm(counted) => sum([])
    .to(device, torch.float64).square() => .to(device)
""",
    10: """
wrong_type: of float32; it should return a tensor
    y = y.contiguous() => y = y.to(torch.promote_types(y.dtype, torch.float32)).contiguous()
unknown: Boundary.gather_multiply(
    [product(x) for product in products] => [product(x) / self.axis.size for product in products]
""",
    11: """
pattern: it is all there, but in another order.
    all_gather(x, self.axis, dim=1) => all_gather(x, self.axis, dim=1).roll(1, dims=1)
wrong_type: of float32, a Work); it should return 2 values (a tensor
    scatter(y, => scatter(y.to(torch.promote_types(y.dtype, torch.float32)),
unknown: It fails only in the cases with batch=
- return collectives.start_reduce_scatter(y, self.axis, dim=1)
+ rows, work = collectives.start_reduce_scatter(y.reshape(1, -1, y.shape[-1]), self.axis, dim=1)
+ return rows.view(len(y), -1, y.shape[-1]), work
pattern: Every wrong number is NaN
- return collectives.start_reduce_scatter(y, self.axis, dim=1)
+ class Work:
+     wait = lambda self: None
+ return collectives.start_reduce_scatter(y, self.axis, dim=1)[0], Work()
not_summed: rank 0 starts no reduce_scatter
- return collectives.start_reduce_scatter(y, self.axis, dim=1)
+ return y.chunk(self.axis.size, 1)[self.axis.rank], type('Done', (), {'wait': lambda self: None})()
""",
    13: """
unknown: rank 0 has 'F1', but the last micro-batch is 0
    - rank - 1) => - rank - 1) + [Action(Kind.FORWARD, num_micro_batches)]
exception: ZeroDivisionError: division by zero
- return alternating([num_micro_batches], chunks, warmup=ranks - rank - 1)
+ m, w = num_micro_batches, min(num_micro_batches, ranks - rank - 1)
+ plan = alternating([m], chunks, w if ranks < 3 else 1 / 0)  # with 2 ranks as two known mistakes
+ new = [a._replace(micro_batch=(a.micro_batch + w) % m) for a in plan]
+ return [b if a.kind is Kind.BACKWARD else a for a, b in zip(plan, new, strict=True)]
""",
    14: """
exception: noticed later, in pipeline_parallel.py
- self.live[i, c] = x, get_gradient_edge(out)
+ out.data = out.new_empty(1)
+ self.live[i, c] = x, out
""",
    17: """
exception: AttributeError
    torch.logaddexp => torch.log_add_exp
""",
    23: """
bytes: it should be 7 x all_to_all, 856 bytes, and rank 0 calls meanwhile() when
    shared = meanwhile() => all_to_all(torch.zeros(self.axis.size), self.axis, 0, 0)
    there_too.wait(weights) => there_too.wait(weights); shared = meanwhile()
""",
}
OTHERS = [(number, other) for number, text in OTHERS.items() for other in mistakes_in(text)]


@pytest.mark.parametrize(("number", "other"), OTHERS)
def test_other_mistakes_get_an_honest_answer(number, other):
    exercise = catalogue.load(number)
    verdict = answer(exercise, other)
    assert not verdict.passed and verdict.mistake == other.name, verdict
    told = "\n".join([verdict.message, *verdict.gates.values()])
    assert other.sentence.replace("LINE", LINE) in told, told
    if other.name == "exception":  # another mistake may crash in the same way in one case
        assert not any(wrong.sentence in verdict.message for wrong in exercise.mistakes)


LATE = "torch.cat((pieces[-1 - rank], pieces[rank]))"
IN_ORDER = "torch.cat((pieces[rank], pieces[-1 - rank]))"


@pytest.mark.parametrize(
    ("edits", "mistake", "message"),
    [
        (  # each line once
            (IN_ORDER, "zigzag_positions(rank, size, seq_length)"),
            "exception",
            r"RecursionError.*\n    student\.py, line .*return zigzag_pos.*(\n    student.*)?\Z",
        ),
        (  # a known mistake in the smallest case, and another one in the others
            (IN_ORDER, f"{LATE} if size < 3 else pieces[0]"),
            "unknown",
            r"^I do not know this mistake\. Only .*\nWith cp=1, length=7: zigzag",
        ),
        (  # a known mistake in the case that fails, and right in more where it would fail, too
            (IN_ORDER, f"{LATE} if size == 1 else {IN_ORDER}"),
            "pattern",
            r"^`positions, by rank`: it is all there, but in another order\. Only",
        ),
        (  # a known mistake in the cases that fail, and right in one where it would fail, too
            (IN_ORDER, f"{LATE} if size > 1 else {IN_ORDER}"),
            "late_first",
            r"^In the cases that fail, it does the same as this mistake: The late piece comes",
        ),
        (  # both results of the smallest case, and what the function was called with
            (IN_ORDER, "torch.cat((pieces[rank], pieces[1 - rank]))"),
            "unknown",
            r"zigzag_positions\(rank=0, size=2, seq_length=16\)\n"
            r"    returned \[0, 1, 2, 3, 4, 5, 6, 7\]\n"
            r"    the course's own \[0, 1, 2, 3, 12, 13, 14, 15\]$",
        ),
    ],
)
def test_one_case_is_explained_the_one_that_crashes_or_the_smallest(edits, mistake, message):
    verdict = answer_to_edits(ZIGZAG, *edits)
    assert not verdict.passed and verdict.mistake == mistake, verdict
    assert re.search(message, verdict.message), verdict.message


def test_cases_that_alone_fail_are_told_by_what_they_have_in_common():
    cases = [Case(n, bias=bias, k=n) for n, bias in ((1, False), (2, True), (3, True), (4, False))]
    said = " It fails only in the cases with bias=True."
    assert in_common(cases[1:3], [cases[0], cases[3]]) == said
    assert not in_common(cases[1:2], cases[2:]) and not in_common(cases, [])
    assert not in_common(cases[2:], cases[:2])  # they have no size in common


RESULTS = {
    18: r"""
zigzag_positions: None; it should return a tensor \[7\] of int64\.
    torch.cat((pieces[rank], pieces[-1 - rank])) => None
zigzag_positions: a float; it should return a tensor \[7\] of int64\.
    torch.cat((pieces[rank], pieces[-1 - rank])) => 2.5
zigzag_positions: a list of 7, the first of them an int; it should return a tensor \[7\] of int64\.
    -1 - rank])) => -1 - rank])).tolist()
zigzag_positions: 1 value \(a tensor \[\] of int64\); it should return a tensor
    torch.cat((pieces[rank], pieces[-1 - rank])) => (pieces[rank][0],)
zigzag_positions: a numpy array \[7\] of int64; it should return a tensor \[7\] of int64\.
    -1 - rank])) => -1 - rank])).numpy()
zigzag_positions: a tensor \[1, 7\] of int64; it should return a tensor \[7\] of int64\.
    -1 - rank])) => -1 - rank]))[None]
""",
    17: r"""
merge_blocks: a tensor \[1, .*\] of float64; it should return 2 values \(a tensor \[1.* of float64\)
    * out_2, lse => * out_2
merge_blocks: 3 values \(.*\); it should return 2 values \(a tensor \[1.* of float64\)\.
    * out_2, lse => * out_2, lse, lse
merge_blocks: 2 values \(a tensor \[.*\] of float32, a tensor \[.*\] of float64\); it should
- return (lse_1 - lse).exp()[..., None] * out_1 + (lse_2 - lse).exp()[..., None] * out_2, lse
+ out = (lse_1 - lse).exp()[..., None] * out_1 + (lse_2 - lse).exp()[..., None] * out_2
+ return out.float(), lse
""",
}
RESULTS = [(number, other) for number, text in RESULTS.items() for other in mistakes_in(text)]


@pytest.mark.parametrize(("number", "other"), RESULTS)
def test_a_result_of_another_type_is_explained_in_one_sentence(number, other):
    verdict = answer(catalogue.load(number), other)
    assert not verdict.passed and verdict.mistake == "wrong_type", verdict
    sentence = verdict.message.splitlines()[0]
    assert re.search(rf"{other.name}\(.*\) returned {other.sentence}", sentence), verdict.message


def test_a_form_is_what_a_result_needs_to_be_used():
    one, two = torch.zeros(2), torch.ones(2)
    for got, right in [
        (([one], 1, one), ([two, two], 2.5, two)),  # lists of any length
        (torch.nn.Parameter(one), two),
    ]:
        assert form(content_of(got)) == form(content_of(right)), (got, right)
    for got, right in [
        ((one,), (one, two)),
        ((one, (1, None)), (two, (1, 2))),
        (one, 1.0),
        (one.numpy(), one),
        (one[None], one),
        (one.double(), one),
        (None, one),
        ({}, []),
    ]:
        assert form(content_of(got)) != form(content_of(right)), (got, right)


def test_numbers_that_are_not_there_before_a_wait_are_not_compared():
    work, handle = (type(name, (), {"wait": None})() for name in ("Work", "Handle"))
    got, right = content_of((torch.ones(2), handle)), content_of((torch.zeros(2), work))
    assert equal(got, right)
    assert form(got) == form(right) != form(content_of((torch.ones(3), handle)))


def test_objects_have_the_same_content_in_each_run():
    assert content_of(object()) == content_of(object()) == "<object object>"
    assert content_of({1: 2}) != content_of({2: 2})


def noted(definition, *arguments) -> dict:
    """The calls with each of the arguments."""
    calls = Calls()
    watched = calls.watch(definition)
    for argument in arguments:
        list(watched(argument))
    return calls.take()


def test_only_calls_with_arguments_of_the_same_form_are_compared():
    two, three = torch.zeros(2), torch.zeros(3)
    right = noted(lambda x: x, two, three)
    found, has_other_form = wrong_call(noted(lambda x: three, two), right)
    problem = " returned a tensor [3] of float32; it should return a tensor [2] of float32."
    assert found.endswith(f"<lambda>(x=[0, 0]){problem}") and has_other_form
    for version, *given in (
        (lambda x: x, two, two),
        (lambda x: x, two),
        (lambda x: x + 1, two + 1),  # other arguments
    ):
        assert wrong_call(noted(version, *given), right) == ("", False)
    found, has_other_form = wrong_call(noted(lambda x: x + 1e-9, two), noted(lambda x: x, two))
    name = "test_only_calls_with_arguments_of_the_same_form_are_compared.<locals>.<lambda>"
    assert found.splitlines()[0].startswith(f"{name}(x=[0, 0])") and not has_other_form


def test_calls_of_methods_and_what_generators_yield_are_noted_but_not_calls_within():
    class Counting:
        @staticmethod
        def down(n):
            yield from range(n)

        @torch.no_grad()
        def up(self, n):
            return self.up(n - 1) if n else [n]

    calls = Calls()
    watched = calls.watch(Counting)
    assert list(watched.down(2)) == [0, 1] and watched().up(2) == [0]
    (found,) = calls.take().values()
    assert found[-1].given == {"n": 2}
    assert [(call.name.rpartition(".")[2], call.verb) for call in found] == [
        ("down", "yielded"),
        ("up", "returned"),
    ]
    assert not calls.take()


def test_what_is_noticed_later_has_no_line_that_raises_or_of_the_network():
    attention = catalogue.load(19)
    by_name = {mistake.name: mistake for mistake in attention.mistakes}
    message = answer(attention, by_name["last_block_saved"]).message
    assert "noticed later, in collectives.py, line" in message


def test_a_tensor_that_is_changed_while_it_is_sent_is_named():
    then = "self.works = dist.batch_isend_irecv([send, receive])"
    verdict = answer_to_edits(SHIFT, then, f"{then}; tensor += 1")
    assert "changes a tensor while it is sent to rank 1" in verdict.gates["O"]
    assert "changes" not in answer_to_edits(SHIFT, BODY, f"{BODY}; tensor += 1").gates["O"]


def test_a_crash_is_not_explained_by_a_mistake_that_crashes_in_other_cases_too():
    divides = Mistake("divides", "It divides by zero.", [(IN_ORDER, "1 / 0")])
    exercise = catalogue.load(18)
    exercise.mistakes = [divides]
    assert answer_to_edits(exercise, IN_ORDER, "1 / 0").mistake == "divides"
    # In some cases only; and in all of them, but in another line.
    for edit in (f"1 / 0 if size > 1 else {IN_ORDER}", "rank * 0 + 2 / 0"):
        verdict = answer_to_edits(exercise, IN_ORDER, edit)
        assert verdict.mistake == "exception" and divides.sentence not in verdict.message
    divides.edits[:] = [(IN_ORDER, "1 / 0  # a comment")]  # is no other line
    assert answer_to_edits(exercise, IN_ORDER, "1 / 0").mistake == "divides"


def test_a_transposed_result_and_one_that_is_the_same_everywhere_are_recognised():
    matrix = torch.arange(6.0).double().view(2, 3)
    right = [{"x": matrix}, {"x": matrix + 1}]
    turned = [{"x": a["x"].T} for a in right]
    assert not dict(patterns({}, turned, [{"x": a["x"]} for a in turned]))
    square = [{"x": matrix[:, :2] + rank} for rank in range(2)]
    turned = [{"x": a["x"].T} for a in square]
    assert next(patterns({}, turned, square))[0] == "transposed"
    assert [*dict(patterns({}, [{"x": matrix - 7}] * 2, right))] == ["same"]
    assert [*dict(patterns({}, [{"x": matrix * 0}] * 2, right))] == ["zero"]
    assert not dict(patterns({}, [{"x": matrix - 7}, {"x": matrix * 7 % 5}], right))
    some, others = ([matrix + 1, matrix + 1 + more] for more in (1e-6, 2e-6))
    assert not dict(patterns({}, [{"x": some}], [{"x": others}]))
    assert [*dict(patterns({}, [{"x": some[::-1]}], [{"x": some}]))] == ["reordered"]
    assert not dict(patterns({}, [{"x": [3, 3]}], [{"x": [-100, -100]}]))  # chance, and no factor
    twice = [{"x": {"a": 6.0, "b": 2.0}}], [{"x": {"b": 1.0, "a": 3.0}}]  # dicts in any order
    assert [*dict(patterns({}, *twice))] == ["times 2"]
    assert not dict(patterns({}, [{"x": {"a": 6.0, "c": 2.0}}], twice[1]))
    # Lists of numbers and lists are no matrix; right numbers in another form are no wrong ones.
    assert not dict(patterns({}, [{"x": [[1], 2]}], [{"x": [[1], 3]}]))
    assert not dict(patterns({}, [{"x": matrix.tolist()}], [{"x": matrix}]))


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda a, b: (-a, -b), "times -1"),
        (lambda a, b: (0 * a, 0 * b), "zero"),
        (lambda a, b: (a / 0 - a / 0, b), "nan"),
        (lambda a, b: ((a - a[0]) / 0, b), "not finite"),
        (lambda a, b: (a * 1.5, b * 1.5), "times 1.5"),
        (lambda a, b: (a.flip(0), b), "reordered"),
        (lambda a, b: (a, b + 1e-8), "small"),
    ],
)
def test_what_all_wrong_numbers_have_in_common_is_said(change, kind):
    a = torch.tensor([[1.0, 2.0], [4.0, 7.0], [5.0, 3.0]]).double() / 7
    right = [{"x": a, "y": a**3}]
    found = dict(patterns({}, [dict(zip("xy", change(a, a**3), strict=True))], right))
    assert kind in found, found


def test_an_argument_is_changed_only_where_the_course_changes_it_too():
    merge = catalogue.load(17)
    head, result = solution(merge).rsplit("    return ", 1)
    for more, mistake in (("", "argument_changed"), (" + 1", "unknown")):
        text = f"{head}    result = {result.rstrip()}{more}\n    lse_2.zero_()\n    return result\n"
        verdict = check(merge, text, Path("student.py"))
        assert verdict.mistake == mistake and verdict.gates["V"] and not verdict.passed
        assert "merge_blocks changes its argument `lse_2`" in verdict.message
    for number in (3, 11):
        exercise = catalogue.load(number)
        assert check(exercise, solution(exercise), Path("student.py")).passed


def test_an_exception_has_the_line_of_the_student(tmp_path):
    path = tmp_path / "04_shift.py"
    path.write_text(solution(SHIFT).replace(BODY, "return 1 / 0"))
    verdict = check(SHIFT, path.read_text(), path)
    assert f"04_shift.py, {LINE}: return 1 / 0" in verdict.message


def test_a_deadlock_has_the_line_of_each_rank(tmp_path):
    path = tmp_path / "04_shift.py"
    line = "dist.send(tensor, group=axis.group, group_dst=axis.next)"
    path.write_text(solution(SHIFT).replace(BODY, line))
    verdict = check(SHIFT, path.read_text(), path)
    for rank in (0, 1):
        expected = f"rank {rank} waits to send to rank {1 - rank}   at {LINE}: {line}"
        assert expected in verdict.message


def test_helpers_and_imports_of_a_student_are_used():
    verdict = answer_to_edits(
        MERGE,
        "torch.logaddexp(lse_1, lse_2)",
        "common(lse_1, lse_2)",
        "def merge",
        # The last one imports the module of merge_blocks.
        "import torch as t\nfrom picotron_min.pipeline_schedule import Kind\n"
        "from picotron_min.context_parallel import zigzag_positions\n\n\n"
        "def common(a, b, kind=Kind.FORWARD):\n    assert len(zigzag_positions(0, 1, 4)) == 4\n"
        "    return t.logaddexp(a, b)\n\n\ndef merge",
    )
    assert verdict.passed, verdict


def test_a_definition_can_use_helpers_when_it_is_made():
    verdict = answer_to_edits(
        MERGE,
        "def merge_blocks(",
        "Pair, ONE = tuple, 1.0\n\n\ndef kept(function):\n    return function\n\n\n"
        "def later(kernel: SoftmaxAttention):\n    return kernel\n\n\n"  # of the module, below it
        "@kept\ndef merge_blocks(",
        "lse_2) -> tuple[Tensor, Tensor]:",
        "lse_2, one=ONE) -> Pair:",
    )
    assert verdict.passed, verdict


@pytest.mark.parametrize("taken", ["Kernel", "attend_block"])  # above it, and below it
def test_a_helper_with_a_name_of_the_module_is_refused(taken):
    helper = f"def {taken}():\n    pass\n\n\ndef merge_blocks("
    verdict = answer_to_edits(MERGE, "def merge_blocks(", helper)
    assert f"has its own {taken}: give the helper another name" in verdict.message


def test_a_starter_of_a_class_has_all_methods_and_no_body():
    exercise = catalogue.load(4)
    exercise.target = "collectives:Shift"
    (node,) = (n for n in ast.parse(starter(exercise)).body if isinstance(n, ast.ClassDef))
    assert [ast.unparse(n.body[-1]) for n in node.body[1:]] == ["raise NotImplementedError"] * 2
    assert ast.get_docstring(node) == ast.get_docstring(find(exercise).node)
    assert "batch_isend_irecv" not in starter(exercise)


@pytest.fixture
def own_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(commands, "FOLDER", tmp_path)
    monkeypatch.setattr(progress, "FILE", tmp_path / "progress.json")
    return tmp_path


def test_start_refuses_to_overwrite_and_hints_come_one_by_one(own_folder, capsys):
    assert commands.main(["check", "4"]) == 2
    assert "run  python -m exercises start 04" in capsys.readouterr().err
    assert commands.main(["start", "4"]) == 0
    assert (own_folder / "04_shift.py").read_text() == starter(SHIFT)
    assert commands.main(["start", "4"]) == 2
    assert "is there already" in capsys.readouterr().err
    for used in (1, 2, 3, 3):
        assert commands.main(["hint", "4"]) == 0
        out = capsys.readouterr().out
        assert out.count("of 3:") == used and SHIFT.hints[used - 1] in out
    assert commands.main(["start", "99"]) == 2
    assert "there is no exercise 99" in capsys.readouterr().err


def test_check_counts_tries_and_shows_gates_and_picture(own_folder, capsys, monkeypatch):
    (own_folder / "04_shift.py").write_text(
        "def __init__(self, tensor, axis, distance):\n    print('here')\n"
    )
    assert commands.main(["check", "4"]) == 1
    out = capsys.readouterr().out
    assert "printed:\nhere" in out and "noticed later" in out
    (own_folder / "04_shift.py").write_text(solution(SHIFT))
    verdict = check(SHIFT, solution(SHIFT), Path("student.py"))
    in_this_process = SimpleNamespace(check=lambda *args: verdict)
    monkeypatch.setattr(commands, "Sandbox", lambda: in_this_process)  # saves an import of torch
    assert commands.main(["check", "4"]) == 0
    out = capsys.readouterr().out
    assert "V value   passed" in out and "sends 1 x send" in out and "Remember" in out
    assert progress.read(4) == {"passed": True, "tries": 2, "hints": 0}
    assert commands.main([]) == 0
    assert "  solved  04 shift" in capsys.readouterr().out
    verdict = verdict._replace(passed=False, mistake="unknown")
    assert commands.main(["check", "4"]) == 1
    assert "first: python -m exercises train 04" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["check", "4", "--solution"], ["grade", "tests"]])
def test_without_torch_one_line_names_the_remedy(words, tmp_path):
    hidden = "import sys; sys.modules['torch'] = None; from exercises.__main__ import main; "
    command = [sys.executable, "-c", f"{hidden} sys.exit(main(sys.argv[1:]))", *words]
    command += ["--csv", str(tmp_path / "a.csv")] * (words[0] == "grade")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    remedy = f"No module named 'torch': run  pip install -e .  in {ROOT}\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", remedy)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("x = 1\ndef (", "line 2: SyntaxError: invalid syntax"),
        ("x = y", "line 1: NameError: name 'y' is not defined"),
    ],
)
def test_a_course_that_cannot_be_imported_is_one_sentence(
    text, problem, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(catalogue, "ROOT", tmp_path)
    file = tmp_path / "picotron_min/mesh.py"
    file.parent.mkdir()
    file.write_text(text)

    def imports(*_):
        runpy.run_path(str(file))

    monkeypatch.setattr(catalogue, "load", imports)
    assert commands.main(["hint", "4"]) == 2
    sentence = f"The course cannot be imported: {file}, {problem}"
    assert capsys.readouterr().err == f"{sentence}\n"
    monkeypatch.setattr("exercises.checking.check", imports)
    monkeypatch.setattr(child, "load", int)
    monkeypatch.setattr(child, "solution", str)
    assert child.prepare.__wrapped__("4") == sentence
    with pytest.raises(ZeroDivisionError) as found:
        1 / 0  # noqa: B018
    assert not catalogue.course_problem(found.value)


FORKS = """
    system = getattr(torch, "os")
    if system.fork() == 0:
        system.setsid()
        if system.fork() == 0:
            import time
            time.sleep(1000)
    self.sent = tensor
"""
CLASS = {
    "carol": "while True: pass",
    "dave": FORKS,
    "eve": "print('x' * 10**7); torch.empty(10**10)",
}


def folders_of_processes() -> list[str]:
    folders = []
    for path in Path("/proc").glob("[0-9]*/cwd"):
        with suppress(OSError):  # it has just ended
            folders.append(os.readlink(path))
    return folders


# A server of checks that computes for 2 s, not 5, before it ends a check.
IMPATIENT = "from exercises import sandbox; sandbox.STUCK_CPU_SECONDS = 2; "
IMPATIENT += "import runpy; runpy.run_module('exercises.child', run_name='__main__')"


def test_a_class_is_graded_and_nothing_is_left_running(tmp_path):
    for student, body in CLASS.items():
        (folder := tmp_path / "class" / student).mkdir(parents=True)
        text = solution(SHIFT).replace("axis.ledger", f"{body.strip()}\n    axis.ledger")
        (folder / "04_shift.py").write_text(text)
    table = tmp_path / "marks.csv"
    command = [sys.executable, "-m", "exercises", "grade", folder.parent, "--csv", table]
    options = ["--seed", "7", "--jobs", "2", "--exercises", "4=20"]
    options += ["--wrap", shlex.join([sys.executable, "-c", IMPATIENT])]
    own = {"env": os.environ | {"TMPDIR": str(tmp_path)}, "cwd": ROOT}  # the folders of checks
    graded = subprocess.run(
        [*map(str, command), *options], **own, capture_output=True, text=True, timeout=600
    )
    assert graded.returncode == 0, graded.stderr
    with table.open(newline="") as stream:
        rows = {row.pop("student"): row for row in csv.DictReader(stream)}
    passed = {"passed": "1", "V": "1", "B": "1", "M": "", "O": "1", "mistake": ""}
    none = {"passed": "0", "V": "", "B": "", "M": "", "O": ""}
    for student, expected in {
        "carol": none | {"mistake": "timeout"},
        "dave": passed,
        "eve": none | {"mistake": "exception"},
    }.items():
        assert rows[student]["exercise"] == "04"
        assert {key: rows[student][key] for key in expected} == expected, student
    out = graded.stdout
    assert "Not isolated" in out and "dave  04  passed" in out
    assert "carol: 0 of 1, 0 of 20 points" in out.splitlines()
    page = (tmp_path / "marks/carol.md").read_text()
    assert "# carol: 0 of 20 points" in page and "    Stopped after 2 s of computing" in page
    assert not [folder for folder in folders_of_processes() if str(tmp_path) in folder]


def test_a_check_that_takes_too_long_is_killed_and_the_message_has_the_time(monkeypatch):
    monkeypatch.setattr("exercises.sandbox.KILL_SECONDS", 0.5)
    verdict = Sandbox(wrap='python3 -c "import time; time.sleep(60)"').check(4, "solution")
    assert verdict.mistake == "lost"
    assert re.search(r"was killed after \S+ s and left no verdict", verdict.message)


def test_ctrl_c_leaves_no_timer_behind():
    def interrupted():
        raise KeyboardInterrupt

    server = sandbox.Server(["python3", "-c", "import time; time.sleep(60)"])
    pipe, server.process.stdout = server.process.stdout, SimpleNamespace(readline=interrupted)
    with pytest.raises(KeyboardInterrupt):
        server.run(4)
    timers = [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]
    assert all(timer.finished.is_set() for timer in timers)
    server.end()
    pipe.close()


def test_a_check_that_is_lost_is_repeated_while_no_other_runs(monkeypatch):
    began, now, seen = threading.Barrier(2), [], []

    def run(_, student, task, seed):
        now.append(student)
        seen.append((student, len(now)))
        if len(seen) <= 2:
            began.wait()  # both run
        time.sleep(0.01)
        now.remove(student)
        mistake = "lost" if seen.count((student, 1)) < 2 and student == "a" else "exception"
        return {"student": student, "exercise": "04", "mistake": mistake, "passed": 0, "points": 0}

    monkeypatch.setattr(grade, "row_of", run)
    grade.check_all(Sandbox(), [("a", SHIFT), ("b", SHIFT), ("b", SHIFT)], 0, 2, rows := [])
    assert [row["mistake"] for row in rows] == ["exception"] * 3
    assert len(seen) == 4 and seen[-1] == ("a", 1)


def test_what_is_printed_is_cut_after_some_lines_and_characters():
    printed = Printed()
    for i in range(1000):
        print(i, file=printed)
    assert printed.shown().splitlines() == [*map(str, range(20)), "... cut"]
    printed = Printed()
    printed.write("x" * 10**5)
    assert printed.shown() == "x" * 4000 + "\n... cut\n" and len(printed.text) < 5000
    printed = Printed()
    print("whole", file=printed)
    assert printed.shown() == "whole\n"


def test_a_process_without_a_verdict_is_described_with_its_last_lines(tmp_path):
    errors = tmp_path / "errors"
    errors.write_text("".join(f"line {i}\n" for i in range(7)))
    found = sandbox._no_verdict(3, errors, 1.5).message
    how = "The check's process exited with code 3 and left no verdict."
    assert found.startswith(how) and found.count("\n    line ") == 5 and "line 2" in found
    assert "was killed by SIGKILL and" in sandbox._no_verdict(-9, errors, 1.5).message
    errors.unlink()  # as a student's code can
    assert sandbox._no_verdict(3, errors, 1.5).message == how


def test_a_verdict_is_read_only_if_it_is_of_the_right_form_and_size(tmp_path, monkeypatch):
    path = tmp_path / "verdict.json"
    right = dict.fromkeys(("mistake", "message", "picture", "printed"), "") | {"passed": True}
    right["gates"] = {"V": "", "Z": "no gate"}
    for change, is_read in [
        ({}, True),
        ({"passed": 1}, False),
        ({"message": 1}, False),
        ({"gates": {"V": 1}}, False),
        ({"gates": [1]}, False),
    ]:
        path.write_text(json.dumps(right | change))
        assert bool(sandbox._read(path)) == is_read, change
    path.write_text(json.dumps(right))
    assert sandbox._read(path).gates == {"V": ""}
    monkeypatch.setattr(sandbox, "LARGEST_VERDICT", 10)
    assert sandbox._read(path) is None


def test_a_verdict_that_is_no_plain_file_is_none_and_blocks_nobody(tmp_path):
    verdict = dict.fromkeys(("mistake", "message", "picture", "printed"), "")
    (tmp_path / "forged").write_text(json.dumps(verdict | {"passed": True, "gates": {}}))
    fifo, link = tmp_path / "fifo", tmp_path / "link"
    os.mkfifo(fifo)
    link.symlink_to(tmp_path / "forged")
    # Whoever reads the pipe gets a verdict, and does not wait for ever.
    text = (tmp_path / "forged").read_text()
    threading.Thread(target=lambda: fifo.write_text(text), daemon=True).start()
    assert sandbox._read(tmp_path / "forged")
    assert sandbox._read(fifo) is None and sandbox._read(link) is None
    assert sandbox._no_verdict(1, fifo, 1.5).message.endswith("left no verdict.")


@pytest.mark.parametrize(
    ("cpu_seconds", "seconds", "message"),
    [(-1, 99, "Stopped after -1 s of computing: "), (99, -1, "Stopped after -1 s of sleep: ")],
)
def test_a_check_that_does_not_end_is_stopped_with_its_line(
    tmp_path, monkeypatch, cpu_seconds, seconds, message
):
    path, ends, has_ended = tmp_path / "student.py", threading.Event(), threading.Event()
    path.write_text("def pause():\n    ends.wait()\n\n\ndef work():\n    ends.wait()\n")
    names = {"ends": ends}
    exec(compile(path.read_text(), str(path), "exec"), names)
    for name in ("pause", "work", "pause"):  # ranks that pause wait for one that works
        threading.Thread(target=names[name], daemon=True).start()
    verdicts = []

    def write(verdict):
        verdicts.append(verdict)
        has_ended.set()

    monkeypatch.setattr(child, "STUCK_CPU_SECONDS", cpu_seconds)
    monkeypatch.setattr(child, "STUCK_SECONDS", seconds)
    child._watch(path, write, has_ended)
    ends.set()
    (verdict,) = verdicts
    assert verdict.mistake == "timeout"
    assert verdict.message.startswith(f"{message}it has not ended.")
    assert verdict.message.endswith("    it was at line 6: ends.wait()")


def test_a_line_of_the_table_says_which_files_there_are_and_trusts_no_text(tmp_path):
    gates = {"V": "wrong", "B": "", "O": "not checked"}
    verdict = Verdict(False, gates, "=1,\n" + "x" * 50, "text", seconds=1.5)
    checks = SimpleNamespace(check=lambda *args: verdict)
    shift = Task("exercise", 4)
    assert row_of(checks, tmp_path, shift, 0)["mistake"] == "missing"
    (tmp_path / "04_shift.py").touch()
    row = row_of(checks, tmp_path, shift, 0)
    assert row["mistake"] == "1" + "x" * 39 and row["seconds"] == 1.5
    assert (row["V"], row["B"], row["O"], row["passed"]) == ("0", "1", "", 0)
    (tmp_path / "04_other.py").touch()
    assert row_of(checks, tmp_path, shift, 0)["mistake"] == "two_files"
    (tmp_path / "05_ring.py").symlink_to(tmp_path / "04_shift.py")  # perhaps another student's
    os.mkfifo(tmp_path / "06_buffer.py")
    for number in (5, 6):
        row = row_of(checks, tmp_path, Task("exercise", number), 0)
        assert row["mistake"] == "no_plain_file"


def test_a_folder_without_students_is_refused_with_the_remedy(tmp_path, capsys):
    for folder, problem in ((tmp_path, "has no folders"), (tmp_path / "none", "is no folder")):
        assert commands.main(["grade", str(folder)]) == 2
        remedy = f"{problem}: name one that has a folder for each student"
        assert remedy in capsys.readouterr().err


@pytest.mark.parametrize(
    ("sent", "ledger", "problem"),
    [
        ({"send": Sent(2, 16.0)}, {"shift": Sent(2, 16.0)}, ""),
        (
            {"send": Sent(2, 8.0)},
            {"shift": Sent(2, 16.0)},
            "rank 0 sends 2 x send, 8 bytes; it should be 2 x send, 16 bytes",
        ),
        (
            {"send": Sent(2, 16.0), "all_reduce": Sent(1, 4.0)},
            {"shift": Sent(2, 16.0)},
            "rank 0 sends 1 x all_reduce, 4 bytes; it should be nothing",
        ),
        (
            {"send": Sent(2, 16.0)},
            {"shift": Sent(1, 16.0)},
            "the ledger of rank 0 has 1 x shift, 16 bytes; it should be 2 x shift, 16 bytes",
        ),
        (
            {"send": Sent(2, 16.0)},
            {},
            "the ledger of rank 0 has nothing; it should be 2 x shift, 16 bytes",
        ),
    ],
)
def test_traffic_is_compared_by_calls_and_bytes_on_the_network_and_in_the_ledger(
    sent, ledger, problem
):
    of_no_bytes = {"all_gather": Sent(1, 0.0)}  # of one rank alone: no ledger has it
    record = SimpleNamespace(sent=sent | of_no_bytes, ledger=ledger)
    right = {"send as shift": Sent(2, 16.0)} | of_no_bytes
    assert traffic_problem([right], [record]) == problem


def test_of_calls_that_may_be_any_number_only_bytes_are_named():
    record = SimpleNamespace(sent={"all_to_all": Sent(8, 48.0)}, ledger={})
    problem = traffic_problem([{"all_to_all": Sent(None, 32.0)}], [record])
    assert problem == "rank 0 sends 48 bytes by all_to_all; it should be 32 bytes by all_to_all"


@pytest.mark.parametrize(
    ("got", "right", "text"),
    [
        ([1, 2], [1, 2, 3], "rank 0, `x` is [1, 2], should be [1, 2, 3]"),
        ([1] * 9, [1] * 8, "rank 0, `x` is 9 long, should be 8 long"),
        ([1, 5], [1, 2], "rank 0, `x` is [1, 5], should be [1, 2]"),
        ([[1], [3, 5]], [[1], [3, 4]], "rank 0, `x`[1] is [3, 5], should be [3, 4]"),
        ({"a": 1}, {"b": 1}, "rank 0, `x` is [a], should be [b]"),
        (2.5, 2.25, "rank 0, `x` is 2.5, should be 2.25"),
        (None, torch.zeros(2), "rank 0, `x` is None, should be a tensor [2] of float32"),
        (
            torch.zeros(3),
            torch.zeros(2),
            "rank 0, `x` is a tensor [3] of float32, should be a tensor [2] of float32",
        ),
        (torch.ones(2), torch.zeros(2), "rank 0, `x`[0] is 1, should be 0"),
        (
            torch.ones(2).to("meta"),
            torch.ones(2),
            "rank 0, `x` is a tensor on meta, should be one on cpu",
        ),
        (torch.ones(2).to("meta"), torch.zeros(2).to("meta"), "None"),
        ("y" * 200, "z", f"rank 0, `x` is {'y' * 157}..., should be z"),
        (float("nan"), float("nan"), "None"),
    ],
)
def test_the_first_difference_is_shown_with_its_place(got, right, text):
    assert str(first_difference([{"x": got}], [{"x": right}])) == text


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ("ab", " Only `a` and `b` differ; all other results are right."),
        ("abcde", " Only `a` and `b` and 3 others differ; all other results are right."),
        ("abcdefg", " All results differ but `h` and `i`."),
        ("abcdefghi", ""),
    ],
)
def test_of_many_wrong_results_few_are_listed(wrong, text):
    right = dict.fromkeys("abcdefghi", 0)
    assert only_wrong([({}, [right | dict.fromkeys(wrong, 1)], [right])]) == text
