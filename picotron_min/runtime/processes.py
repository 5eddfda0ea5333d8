"""How the processes of a run start and end, and which of them is to blame when it ends badly.

Ranks wait for each other all the time, so one that is gone soon stops all. What the others then see
is not what happened: a closed connection, or a wait that took too long. So each rank leaves notes
in the store that they found each other through: the step that it is in, and that it has failed.

    rank 0   in step 7   88 beats   failed    waited for rank 1, and got an error
    rank 1   in step 7   86 beats             and no more: it was killed, or it hangs
    rank 2   in step 7   88 beats             alive, and still waiting

The first rank with an error of its own tells it. If only waits failed, the first rank whose wait
failed gives the others two seconds, then names those that have not failed: those without a
heartbeat, or, if all have one, all of them. The others leave without a word, so there is one
message; also those in a wait that has noticed nothing, by their hearts.

With NCCL a wait that takes too long ends the process, not in an exception: see the README.

SIGTERM, which is what a cluster sends, ends a run in good order: all ranks save after the step that
they are in, and exit with code 0. Exit codes: 0 done, 2 the user's mistake, 130 Ctrl-C, 1 the rest.
"""

import contextlib
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from multiprocessing import connection
from pathlib import Path

import torch
import torch.distributed as dist

from picotron_min.runtime.launch import Launch

GRACE = 2.0  # seconds in which all ranks that can will have noticed that one is gone
BEAT = 0.4  # seconds between a rank's signs of life, 20 bytes each where the store is a file


def start_processes(main: Callable[[Launch], None], world_size: int) -> None:
    """Run `main` in `world_size` processes on this machine, and wait for them.

    They are forked, so that torch is imported once: for 8 ranks that is 2 seconds instead of 12.
    When one fails the others are ended. Raises SystemExit with the exit code unless all succeed.
    A SIGTERM is passed on to all of them; when this process dies, so do they.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        ranks = []
        for rank in range(world_size):
            launch = Launch(rank, rank, world_size, partial(_file_store, store, world_size))
            ranks.append(context.Process(target=_run_forked, args=(main, launch)))
            ranks[-1].start()
        try:
            with _passing_on(signal.SIGTERM, ranks):
                code = _wait(ranks, store)
        except KeyboardInterrupt:
            _tell("stopped by Ctrl-C", dist.FileStore(store, world_size), rank=0)
            code = 130
        finally:
            for process in ranks:
                process.kill()
                process.join()
    if code:
        raise SystemExit(code)


def _file_store(path: str, world_size: int, timeout_seconds: float) -> dist.Store:
    store = dist.FileStore(path, world_size)
    store.set_timeout(timedelta(seconds=timeout_seconds))
    return store


def _run_forked(main: Callable[[Launch], None], launch: Launch) -> None:
    # The terminal's Ctrl-C reaches all processes at once; the parent ends us, and tells it once.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    main(launch)


def _leave_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)


@contextlib.contextmanager
def _passing_on(number: signal.Signals, ranks: list) -> Iterator[None]:
    def pass_on(*_) -> None:
        for process in ranks:
            if process.is_alive():
                os.kill(process.pid, number)

    before = signal.signal(number, pass_on)
    try:
        yield
    finally:
        signal.signal(number, before)


def _wait(ranks: list, store: str) -> int:
    """Until all are done or one has failed; returns the exit code of them all."""
    waiting = {process.sentinel: rank for rank, process in enumerate(ranks)}
    while waiting:
        for sentinel in connection.wait(list(waiting)):
            rank = waiting.pop(sentinel)
            ranks[rank].join()
            if code := ranks[rank].exitcode:
                if code < 0:  # else it has said why itself, in failures_told
                    notes = dist.FileStore(store, len(ranks))
                    _tell(f"rank {rank} was killed by {signal.Signals(-code).name}", notes, rank)
                return max(code, 1)
    return 0


@contextlib.contextmanager
def user_errors_reported(local_rank: int) -> Iterator[None]:
    """The user's mistakes, ValueError and OSError here, end in their message and exit code 2."""
    try:
        yield
    except (ValueError, OSError) as error:
        if local_rank:
            time.sleep(5)  # rank 0 most likely has the same error, and its exit ends the others
        _print(str(error))
        raise SystemExit(2) from None


class Disagreement(Exception):
    """The processes were not all started alike."""


class RollCall:
    """What the ranks note for each other, and what is told when one of them fails."""

    def __init__(self, store: dist.Store, launch: Launch, timeout_seconds: float) -> None:
        self.store, self.rank, self.world_size = store, launch.rank, launch.world_size
        self.timeout = timedelta(seconds=timeout_seconds)
        self.stop_requested = False
        self.saved = ""  # the checkpoint to go on from
        self.done = threading.Event()
        self.store.add(f"beats {self.rank}", 1)  # it has come
        self.heart = threading.Thread(target=self._beat, daemon=True)
        self.heart.start()

    def _beat(self) -> None:
        """Show that this process is alive, also while it waits for others; and end it when another
        has told why the run ends. Not every wait notices that another is gone."""
        with contextlib.suppress(dist.DistError):  # the store may go first
            store = self.store.clone()  # one connection does one thing at a time
            while not self.done.wait(BEAT):
                store.add(f"beats {self.rank}", 1)
                # Time to finish by itself what needs no other rank any more, a checkpoint say.
                if store.check(["told"]) and not self.done.wait(GRACE):
                    _leave(1)

    def agree(self, facts: dict[str, object]) -> str:
        """Raise Disagreement, on all ranks, unless they come with the same facts.

        Returns a name for this run that no other has.
        """
        # On CPUs, also between GPUs: else every step would wait for the GPU to answer.
        self.group = dist.new_group(backend="gloo", timeout=self.timeout)
        everyone = [None] * self.world_size
        dist.all_gather_object(everyone, (uuid.uuid4().hex, facts), self.group)
        name, expected = everyone[0]
        for rank, (_, facts) in enumerate(everyone):
            if different := [key for key in facts if facts[key] != expected.get(key)]:
                said = (f"{key}={facts[key]!r}, not {expected.get(key)!r}" for key in different)
                raise Disagreement(
                    f"rank {rank} was started otherwise than rank 0: it has {', '.join(said)}."
                    " Use the same config.json, and the same files, on all nodes"
                )
        return name

    def note_step(self, step: int) -> None:
        """This rank begins a step."""
        self.store.set(f"step {self.rank}", str(step))

    def note_saved(self, folder: Path) -> None:
        """There is a checkpoint to go on from."""
        self.saved = str(folder)
        self.store.set("saved", self.saved)

    def listen_for_sigterm(self) -> None:
        """From now on `stop_agreed` answers. After `agree`, which makes the group that it asks."""

        def request_stop(*_) -> None:
            self.stop_requested = True

        signal.signal(signal.SIGTERM, request_stop)

    def stop_agreed(self) -> bool:
        """Whether any rank was asked to stop; the same answer on all ranks, which must all ask.

        The signal reaches them at different moments, and all must stop after the same step.
        """
        requested = torch.tensor(self.stop_requested, dtype=torch.uint8)
        dist.all_reduce(requested, dist.ReduceOp.MAX, group=self.group)
        return bool(requested)

    @contextlib.contextmanager
    def failures_told(
        self, plainly: tuple[type[Exception], ...], for_good: type[Exception]
    ) -> Iterator[None]:
        """Whatever fails in here ends this process, and one rank of all says why.

        `plainly` are exceptions whose message is enough; others come with their traceback. After
        those that are `for_good` too, to go on from where it was would end in the same way.
        """
        try:
            yield
            self.done.set()
            self.heart.join(GRACE)
        except (Exception, KeyboardInterrupt) as error:
            self.done.set()
            code = 130 if isinstance(error, KeyboardInterrupt) else 1
            try:
                self._tell_once(error, plainly, for_good)
            except dist.DistError:
                # Whose fault it is nobody can look up any more.
                cause, _, _ = str(error).partition("\n")
                where = "the ranks' store is gone, and with it the process or the node it was on"
                how = how_to_go_on(self.saved)
                _print(f"rank {self.rank} cannot go on: {where} ({cause}): {how}")
            finally:
                _leave(code)

    def _tell_once(
        self,
        error: BaseException,
        plainly: tuple[type[Exception], ...],
        for_good: type[Exception],
    ) -> None:
        self.store.set(f"failed {self.rank}", "")
        is_plain = isinstance(error, (KeyboardInterrupt, Disagreement, *plainly))
        is_fault = not is_plain and not _is_of_communication(error)
        tells_fault = is_fault and self.store.add("faults", 1) == 1
        time.sleep(BEAT if self.rank else 0)  # what all have, rank 0 tells: there users look
        is_first = self.store.add("failures", 1) == 1
        if tells_fault:
            self._tell_with_traceback(error)
        elif is_fault or not is_first:
            time.sleep(2 * GRACE)  # the launcher ends all when one leaves: the first is to tell
        elif is_plain:
            what = "stopped by Ctrl-C" if isinstance(error, KeyboardInterrupt) else str(error)
            _tell(what, self.store, self.rank, goes_on=not isinstance(error, for_good))
        else:
            what, rank = self._whom_all_wait_for()
            if self.store.add("faults", 0):  # meanwhile one had an error of its own, and tells it
                time.sleep(2 * GRACE)
                return
            if what:
                _tell(what, self.store, rank)
            else:
                self._tell_with_traceback(error)

    def _whom_all_wait_for(self) -> tuple[str, int]:
        """In words, and one of them; no words if none is left to be waited for."""
        ranks = range(self.world_size)
        before = [self.store.add(f"beats {r}", 0) for r in ranks]
        time.sleep(GRACE)
        silent = [r for r in ranks if not self.store.check([f"failed {r}"])]
        dead = [r for r in silent if self.store.add(f"beats {r}", 0) == before[r]]
        if absent := [r for r in dead if before[r] == 0]:
            seconds = f"{self.timeout.total_seconds():g} s (distributed.timeout_seconds)"
            what = f"{_named(absent)} did not come within {seconds}: look at the output there"
            return what, absent[0]
        if dead:
            return f"lost {_named(dead)}: killed, or hanging", dead[0]
        if silent:
            one_of = "one of " if len(silent) > 1 else ""
            return f"waited in vain for {one_of}{_named(silent)}", silent[0]
        return "", self.rank

    def _tell_with_traceback(self, error: BaseException) -> None:
        traceback.print_exception(error)
        _tell(f"rank {self.rank} failed", self.store, self.rank)


def _named(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


# gloo has no exception of its own. Its RuntimeErrors name its source files, but for these.
NAMELESS = ("application timeout caused pair closure", "operation timed out!", "wait timeout")


def _is_of_communication(error: BaseException) -> bool:
    """Another rank is gone, or takes too long."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError)
        and any(words in str(error).lower() for words in ("gloo", *NAMELESS))
    )


def _tell(what: str, notes: dist.Store, rank: int, goes_on: bool = True) -> None:
    """One message: what happened, where, and how to go on."""

    def noted(key: str) -> str | None:
        return notes.get(key).decode() if notes.check([key]) else None

    step = noted(f"step {rank}")
    where = f"in step {step}" if step else "before the first step"
    how = f": {how_to_go_on(noted('saved'))}" if goes_on else ""
    _print(f"{what}\nThat was {where}{how}")
    notes.set("told", "")


def _print(text: str) -> None:
    print(f"\n{text}\n", file=sys.stderr, flush=True)


def _leave(code: int) -> None:
    """At once: the usual way out waits for communication that will never come to its end."""
    sys.stdout.flush()
    os._exit(code)


def how_to_go_on(saved: Path | str | None) -> str:
    if saved:
        return f"go on from {saved} with checkpoint.load_path latest"
    return "this run has saved nothing"
