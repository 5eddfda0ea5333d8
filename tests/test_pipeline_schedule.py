"""Schedules are checked on paper: no processes, no tensors."""

import itertools
import json
import re
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from picotron_min import pipeline_schedule
from picotron_min.pipeline_schedule import (
    ENGINES,
    RECEIVES,
    SENDS,
    Action,
    Kind,
    Plan,
    ScheduleError,
    Span,
    bubble,
    build_plans,
    forward_only,
    insert_communication,
    live_activations,
    simulate,
)
from picotron_min.runtime import draw

F, B = Kind.FORWARD, Kind.BACKWARD
# Up to twice the ranks every number of micro-batches; with chunks, those around multiples of ranks.
CASES = [
    (engine, ranks, m, chunks)
    for engine, chunks in (("afab", 1), ("1f1b", 1), ("afab", 2), ("interleaved", 2))
    for ranks in range(1, 9)
    for m in (*range(1, 18), 31, 32)
    if chunks == 1 or m % ranks in (0, 1, ranks - 1)
]
CASES += [
    ("interleaved", ranks, m, chunks)
    for ranks, m, chunks in itertools.product(range(1, 9), (1, 2, 5, 8, 13, 32), (1, 3, 4))
]


@pytest.fixture(scope="module")
def all_plans() -> dict[tuple, list[Plan]]:
    return {case: build_plans(*case) for case in CASES}


def computing(plan: Plan) -> Plan:
    return [action for action in plan if action.peer is None]


def test_every_stage_does_every_micro_batch_once_and_backwards_in_order(all_plans):
    for (_, _, m, chunks), plans in all_plans.items():
        for plan in plans:
            expected = itertools.product((F, B), range(m), range(chunks))
            assert sorted(map(str, computing(plan))) == sorted(str(Action(*x)) for x in expected)
            for c in range(chunks):
                order = [a.micro_batch for a in plan if a.kind is B and a.chunk == c]
                assert order == list(range(m))


def test_a_stage_that_needs_another_ranks_result_has_received_it_before(all_plans):
    for (_, ranks, _, chunks), plans in all_plans.items():
        ends = {F: (0, 0), B: (ranks - 1, chunks - 1)}  # (rank, chunk) that has no one before it
        for rank, plan in enumerate(plans):
            place = {action: index for index, action in enumerate(plan)}
            for a in computing(plan):
                if a.kind is B:
                    assert place[a._replace(kind=F)] < place[a]
                if (rank, a.chunk) != ends[a.kind] and ranks > 1:
                    source = (rank - 1 if a.kind is F else rank + 1) % ranks
                    receive = Action(RECEIVES[a.kind], a.micro_batch, a.chunk, source)
                    assert place[receive] < place[a]


def test_nothing_deadlocks_and_all_dependencies_hold_when_every_message_blocks(all_plans):
    for (_, ranks, m, chunks), plans in all_plans.items():
        if m <= 12:  # simulate raises otherwise
            timeline = simulate(plans, send_time=0.5, blocking=True)
            end = {(s.rank, s.action): s.end for s in timeline.spans}
            for span in timeline.spans:
                i, stage = span.action.micro_batch, span.action.chunk * ranks + span.rank
                if span.action.kind is F and stage > 0:
                    before = (stage - 1) % ranks, Action(F, i, (stage - 1) // ranks)
                elif span.action.kind is B and stage < ranks * chunks - 1:
                    before = (stage + 1) % ranks, Action(B, i, (stage + 1) // ranks)
                else:
                    continue
                assert span.start >= end[before] + (0.5 if ranks > 1 else 0)


def test_both_ends_of_every_pair_have_its_messages_in_the_same_order(all_plans):
    opposite = {SENDS[kind]: RECEIVES[kind] for kind in (F, B)}
    opposite |= {receive: send for send, receive in opposite.items()}
    for plans in all_plans.values():
        for a, b in itertools.combinations(range(len(plans)), 2):
            at_a = [(x.kind, x.micro_batch) for x in plans[a] if x.peer == b]
            at_b = [(opposite[x.kind], x.micro_batch) for x in plans[b] if x.peer == a]
            assert at_a == at_b


def test_bubble_and_live_activations_are_the_textbooks(all_plans):
    for (engine, ranks, m, chunks), plans in all_plans.items():
        timeline = simulate(plans)
        for rank in range(ranks):
            assert abs(timeline.bubble(rank) - bubble(ranks, m, chunks)) < 1e-12
            assert timeline.peak_live(rank) == live_activations(engine, rank, ranks, m, chunks)


def test_the_formulas_are_those_in_the_papers():
    for p, m, v in itertools.product(range(1, 9), range(1, 33), range(1, 5)):
        if m >= p or v == 1:
            assert abs(bubble(p, m, v) - (p - 1) / (m * v + p - 1)) < 1e-12
        if m % p == 0 and m > p:
            assert live_activations("interleaved", 0, p, m, v) == min(m * v, p * v + p - 1)
    assert [live_activations("1f1b", rank, 4, 3) for rank in range(4)] == [3, 3, 2, 1]
    assert live_activations("afab", 3, 4, 8, 2) == 16


def test_one_rank_accumulates_gradients_and_sends_nothing():
    for chunks in (1, 2):
        for engine in ("afab", "interleaved"):
            assert all(a.peer is None for a in build_plans(engine, 1, 5, chunks)[0])
    assert " ".join(map(str, build_plans("1f1b", 1, 3)[0])) == "F0 B0 F1 B1 F2 B2"


def test_evaluation_runs_through_all_chunks():
    plans = insert_communication([forward_only(3, chunks=2)] * 2)
    assert " ".join(map(str, computing(plans[1]))) == "F0 F1 F2 F0.1 F1.1 F2.1"
    assert str(plans[1][-1]) == "F2.1"  # the last stage passes nothing on
    assert simulate(plans, blocking=True).peak_live(0) == 6
    assert simulate(plans).makespan == 3 * 2 + 1


def test_a_message_that_is_sent_while_its_receiver_works_was_posted_before():
    rank_1 = [str(action) for action in build_plans("1f1b", 2, 3)[1]]
    assert rank_1[:6] == [
        "receive F0 from rank 0", "receive F1 from rank 0", "F0", "B0", "send B0 to rank 0", "F1"
    ]  # fmt: skip


def send_when_made_receive_when_needed(plans: list[Plan]) -> list[Plan]:
    """The obvious way to insert communication for one chunk, which ignores the other ranks."""
    last, naive = len(plans) - 1, []
    for rank, plan in enumerate(plans):
        naive.append([])
        for a in plan:
            before, after = (rank - 1, rank + 1) if a.kind is F else (rank + 1, rank - 1)
            if 0 <= before <= last:
                naive[-1].append(Action(RECEIVES[a.kind], a.micro_batch, 0, before))
            naive[-1].append(a)
            if 0 <= after <= last:
                naive[-1].append(Action(SENDS[a.kind], a.micro_batch, 0, after))
    return naive


def test_the_obvious_sends_deadlock_in_1f1b_and_the_circle_is_named():
    plans = send_when_made_receive_when_needed(
        [ENGINES["1f1b"](rank, 2, 4, 1) for rank in range(2)]
    )
    assert simulate(plans).makespan == 15  # sends in the background hide the mistake
    with pytest.raises(ScheduleError) as error:
        simulate(plans, blocking=True)
    assert str(error.value) == (
        "deadlock: rank 0 waits in 'send F1 to rank 1' for 'receive F1 from rank 0' of rank 1;"
        " rank 1 waits in 'send B0 to rank 0' for 'receive B0 from rank 1' of rank 0"
    )


def test_a_circle_names_only_the_ranks_in_it():
    plans = build_plans("1f1b", 3, 4)
    first, second = (plans[2].index(Action(F, i)) for i in (0, 1))
    plans[2][first], plans[2][second] = plans[2][second], plans[2][first]
    with pytest.raises(ScheduleError, match=r"^deadlock: rank 2 waits in 'B0' for 'F0' of rank 2$"):
        simulate(plans)


@pytest.mark.parametrize(
    "rank, action, message",
    [
        (0, "send F2 to rank 1", "rank 1: 'F2' needs 'send F2 to rank 1', which rank 0 never does"),
        (1, "receive F2 from rank 0", "rank 1: 'F2' needs 'receive F2 from rank 0', which rank 1"),
        (1, "F2", "rank 1: 'B2' needs 'F2', which rank 1 never does"),
        (1, "B3", "rank 0: nothing makes what 'receive B3 from rank 1' carries"),
    ],
)
def test_what_is_missing_is_named(rank, action, message):
    plans = build_plans("1f1b", 2, 4)
    plans[rank] = [a for a in plans[rank] if str(a) != action]
    with pytest.raises(ScheduleError) as error:
        simulate(plans)
    assert message in str(error.value)


def test_an_action_that_is_there_twice_is_named():
    plans = build_plans("afab", 2, 2)
    plans[0].append(Action(B, 1))
    with pytest.raises(ScheduleError, match="rank 0: 'B1' is there 2 times"):
        simulate(plans)


def receives_first(plans: list[Plan]) -> list[Plan]:
    """All receives posted before anything else: no message could arrive earlier."""
    return [sorted(plan, key=lambda a: a.kind not in RECEIVES.values()) for plan in plans]


@pytest.mark.parametrize("engine, chunks", [(e, 1) for e in ENGINES] + [("interleaved", 2)])
def test_receives_are_posted_early_enough(engine, chunks):
    for ranks, m in ((2, 8), (4, 8), (4, 9), (8, 16)):
        plans = build_plans(engine, ranks, m, chunks)
        best = simulate(receives_first(plans), send_time=0.25).makespan
        assert simulate(plans, send_time=0.25).makespan <= 1.02 * best


def test_a_longer_warm_up_hides_the_time_of_sends():
    def lost(engine, chunks):
        plans = build_plans(engine, 4, 32, chunks)
        return simulate(plans, send_time=0.25).makespan - simulate(plans).makespan

    there_and_back = 2 * 3 * 0.25
    assert lost("afab", 1) == there_and_back
    assert lost("interleaved", 1) == there_and_back  # with one chunk it differs in the warm-up
    assert lost("1f1b", 1) > 5 * there_and_back


def test_chunks_are_refused_where_they_have_no_meaning():
    with pytest.raises(ValueError, match="1f1b has 1 chunk a rank, not 2: use interleaved"):
        build_plans("1f1b", 2, 4, 2)


def test_the_drawing_is_the_one_in_the_docstring():
    for engine in ("afab", "1f1b"):
        for line in draw.draw(simulate(build_plans(engine, 2, 4)), width=40).splitlines():
            assert f"    {line}" in pipeline_schedule.__doc__


def test_four_stages_and_eight_micro_batches_fit_into_100_columns_with_all_names():
    text = draw.draw(simulate(build_plans("1f1b", 4, 8)), width=100)
    for line in text.splitlines():
        assert len(line) <= 100
        assert set(re.findall(r"[FB]\d", line)) == {f"{k}{i}" for k in "FB" for i in range(8)}


def run(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "picotron_min.pipeline_schedule", *arguments],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent.parent,
    )


def test_the_command_prints_drawing_and_formulas_without_torch():
    result = run("--engine", "1f1b", "--stages", "4", "--microbatches", "8")
    assert result.returncode == 0
    assert "rank 0  F0F1F2F3····" in result.stdout
    assert re.search(r"rank 0 +27.3% +27.3% +4 +4\n", result.stdout)
    assert "(p-1) / (m + p-1)" in result.stdout
    loaded = {line.split("|")[-1].strip().split(".")[0] for line in result.stderr.splitlines()}
    assert "picotron_min" in loaded
    assert not loaded & {"torch", "numpy", "pydantic"}


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--stages 0", "argument --stages: 0 is not a whole number of at least 1"),
        ("--microbatches few", "few is not a whole number of at least 1"),
        ("--engine 1f1b --chunks 2", "1f1b has 1 chunk a rank, not 2: use interleaved, or 1 chunk"),
        ("--engine gpipe", "invalid choice: 'gpipe'"),
        ("--trace nowhere.json", "No such file or directory: 'nowhere.json'"),
        ("--trace t.json --stages 2", "--trace brings its own plan"),
        ("--png no/such/folder/a.png", "No such file or directory: 'no/such/folder/a.png'"),
    ],
)
def test_bad_input_is_told_with_exit_code_2(arguments, message, capsys):
    with pytest.raises(SystemExit) as exit:
        draw.main(arguments.split())
    assert exit.value.code == 2
    assert message in capsys.readouterr().err


def decode_png(path: Path) -> list[bytes]:
    """The rows of palette indices, after checking every part's checksum."""
    data, parts, at = path.read_bytes(), {}, 8
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    while at < len(data):
        (length,), name = struct.unpack(">I", data[at : at + 4]), data[at + 4 : at + 8]
        content = data[at + 8 : at + 8 + length]
        (checksum,) = struct.unpack(">I", data[at + 8 + length : at + 12 + length])
        assert checksum == zlib.crc32(name + content)
        parts[name], at = content, at + 12 + length
    assert list(parts) == [b"IHDR", b"PLTE", b"IDAT", b"IEND"]
    width, height = struct.unpack(">II", parts[b"IHDR"][:8])
    pixels = zlib.decompress(parts[b"IDAT"])
    assert len(pixels) == height * (width + 1)
    assert max(pixels) < len(parts[b"PLTE"]) // 3
    return [pixels[y * (width + 1) + 1 : (y + 1) * (width + 1)] for y in range(height)]


def test_the_picture_has_every_box_in_its_colour(tmp_path):
    timeline = simulate(build_plans("interleaved", 2, 4, 2))
    draw.write_png([timeline], str(tmp_path / "a.png"))
    rows = decode_png(tmp_path / "a.png")
    for span in timeline.spans:
        if span.action.peer is None:
            y = draw.MARGIN // 2 + span.rank * draw.ROW_HEIGHT + 2  # above the digits
            x = draw.MARGIN + int(24 * (span.start + span.end) / 2)
            colour = draw.BACKWARD if span.action.kind is B else draw.FORWARD
            assert rows[y][x] == colour + span.action.chunk
    idle = draw.MARGIN + 24 * 0 + 12  # rank 1 waits for its first micro-batch
    assert rows[draw.MARGIN // 2 + draw.ROW_HEIGHT + 2][idle] == draw.BUBBLE


def write_trace(path: Path, spans: list[Span]) -> None:
    """Steps 6 and 7, alike."""
    events = [
        {
            "name": str(s.action), "ph": "X", "ts": 1e6 * step + 1000 * s.start, "tid": 0,
            "dur": 1000 * (s.end - s.start), "pid": s.rank,
            "args": {"step": step, "chunk": s.action.chunk, "micro_batch": s.action.micro_batch},
        }
        for step in (7, 6) for s in spans
    ]  # fmt: skip
    path.write_text(json.dumps({"traceEvents": [*events, {"name": "optimizer"}]}))


@pytest.mark.parametrize("engine, chunks", [("afab", 1), ("1f1b", 1), ("interleaved", 2)])
def test_a_trace_is_drawn_under_its_plan(engine, chunks, tmp_path, capsys):
    plans = build_plans(engine, 4, 8, chunks)
    slow = simulate(plans, send_time=1.0)
    write_trace(tmp_path / "t.json", slow.spans)
    draw.main(["--trace", str(tmp_path / "t.json"), "--png", str(tmp_path / "t.png")])
    out = capsys.readouterr().out
    ideal = simulate(plans).makespan
    assert f"planned, step 7: {ideal:.2f} ms" in out
    assert f"measured, step 7: {slow.makespan:.2f} ms" in out
    figures = rf"rank 2 +{bubble(4, 8, chunks):.1%} +{slow.bubble(2):.1%}\n"
    assert re.search(figures, out)
    assert len(decode_png(tmp_path / "t.png")) > 8 * draw.ROW_HEIGHT


@pytest.mark.parametrize(
    "content, message",
    [
        ("{", "is not a trace of ours: JSONDecodeError"),
        ('{"events": []}', "is not a trace of ours: KeyError('traceEvents')"),
        ('{"traceEvents": []}', "has forwards and backwards of ranks []"),
        (
            '{"traceEvents": [{"name": "F0", "ph": "X", "ts": 1, "dur": 2, "pid": 1,'
            ' "args": {"step": 1, "chunk": 0, "micro_batch": 0}}]}',
            "ranks [1]: it must have those of all the ranks of one pipeline, counted from 0",
        ),
        (
            '{"traceEvents": [{"name": "B0", "ph": "X", "ts": 1, "dur": 2, "pid": 0,'
            ' "args": {"step": 1, "chunk": 0, "micro_batch": 0}}]}',
            "rank 0: 'B0' needs 'F0', which rank 0 never does",
        ),
    ],
)
def test_a_file_that_is_no_trace_is_told(content, message, tmp_path, capsys):
    path = tmp_path / "t.json"
    path.write_text(content)
    with pytest.raises(SystemExit) as exit:
        draw.main(["--trace", str(path)])
    assert exit.value.code == 2
    assert message in capsys.readouterr().err
