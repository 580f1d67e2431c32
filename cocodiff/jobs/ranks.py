"""Runs a command's work on its ranks: in this process when a launcher started it, else in ranks forked from here.

Twelve separate starts would import torch and diffusers twelve times; a fork after one import shares them. Neither a
device nor MPI nor a thread pool may exist before the fork.
"""

from __future__ import annotations

import fcntl
import gc
import json
import os
import re
import secrets
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import closing, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from cocodiff.comm.launch import Launch, Meeting
from cocodiff.comm.mpi_start import count_ranks
from cocodiff.comm.peers import BEAT_S, Limits
from cocodiff.config.config import Config
from cocodiff.config.errors import OwnRankError, PeerLost, UserError
from cocodiff.config.packages import failed_import
from cocodiff.jobs.children import StopRequest, check_room, fork, signal_all, stop_requests
from cocodiff.jobs.folder import NOTHING_LEFT, OutputFolder
from cocodiff.jobs.terminal import keep_libraries_off_stderr, limit_threads, note, quiet_libraries

LAST_WORDS_S = 1.0  # launchers kill a job at its first bad exit; survivors must have named the rank by then
GRACE_S = 3.0  # what survivors get to notice a bad end and to clean up, and rank 0 to say a mistake
NOTICED = "other ranks noticed and stopped"
OWN_SIGNALS = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)  # of a fault in a library
Work = Callable[[Any], None]  # called with the rank's transport
NoteLoss = Callable[[BaseException], None]  # told of a lost peer at once, from the watch's thread


@dataclass(frozen=True)
class End:
    """How a rank ended. kind: "done", "mistake" (the user's), "lost" (a peer), "failed" or "interrupted"."""

    kind: str
    message: str = ""
    trace: str = ""

    @property
    def code(self) -> int:
        return {"done": 0, "mistake": 2, "interrupted": 130}.get(self.kind, 1)


RunRank = Callable[[Launch, NoteLoss], tuple[End, Any]]  # `_run_rank` for one launch


def run_ranks(
    ranks: int | None,
    launch: Launch,
    config: Config,
    settings: dict[str, str],
    work: Work,
    left: Callable[[], str] = lambda: NOTHING_LEFT,
) -> int:
    """Runs `work` on every rank and returns the exit code.

    ranks: how many to fork; under a launcher None or its own number.
    settings: what all ranks must have been started with alike, beside `config`.
    left: says what a run that ended badly has left behind, in words.
    """
    gc.freeze()  # ranks do not search what is there now: each would copy 120 MB of pages, to which the collector writes
    gc.enable()
    run = partial(_run_rank, config, settings, work)
    if launch.kind != "alone":
        if ranks is not None and launch.size is not None and ranks != launch.size:
            raise UserError(f"--ranks {ranks} in a job of {launch.size} ranks: leave --ranks away under a launcher")
        return _run_launched(launch, run)
    if ranks is None or ranks == 1:
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) == signal.SIG_DFL:
                signal.signal(number, signal.default_int_handler)
        end, _ = run(launch)
        _say(end, "")
        return end.code
    _check_no_device(ranks, config)
    return _fork(ranks, run, left, config)


def _run_rank(
    config: Config, settings: dict[str, str], work: Work, launch: Launch, note_loss: NoteLoss | None = None
) -> tuple[End, Any]:
    """The rank's end, and its transport if there was one. It may not live to its end where it loses a peer."""
    # imports torch: a fork's parent has done so before, else it is this rank's alone
    from cocodiff.engine.engine import open_transport

    transport = None
    try:
        transport = open_transport(config, launch, settings, [note_loss] if note_loss is not None else [])
        work(transport)
        transport.close()
        return End("done"), transport
    except (UserError, PeerLost, KeyboardInterrupt, Exception) as error:
        if transport is not None:
            error = _known_loss(transport) or error  # what a rank does after another's loss may fail because of it
        end = _end_of(error)
        if isinstance(error, PeerLost) and error.rank == launch.rank and error.reason.startswith("failed: "):
            end = End("failed", error.reason.removeprefix("failed: "))  # a wrong message, which came to this rank
        if transport is not None and end.kind != "lost":
            transport.health.fail(end.message, mistake=end.kind == "mistake")
        return end, transport


def _known_loss(transport: Any) -> UserError | PeerLost | None:
    """What the run has failed of by another rank's word; None if it has not."""
    try:
        transport.health.check()
    except (UserError, PeerLost) as known:
        return None if isinstance(known, PeerLost) and known.rank == transport.rank else known
    return None


def _end_of(error: BaseException) -> End:
    if isinstance(error, KeyboardInterrupt):
        return End("interrupted", "interrupted")
    for kind, known in (("failed", OwnRankError), ("mistake", UserError), ("lost", PeerLost)):
        if isinstance(error, known):
            return End(kind, str(error))
    if line := failed_import(error):
        return End("mistake", line)
    return End("failed", f"{type(error).__name__}: {error}", traceback.format_exc())


def _say(end: End, who: str) -> None:
    if end.kind == "failed":
        sys.stderr.write(end.trace)
    if end.kind != "done":
        print(f"cocodiff: {who}{end.message}", file=sys.stderr, flush=True)


def _run_launched(launch: Launch, run: RunRank) -> int:
    """This process is one rank of a launcher's job. A mistake is everybody's, so rank 0 alone says it."""
    told = threading.Event()

    def tell(error: BaseException) -> None:
        """From the watch's thread, in one write: launchers kill survivors a moment later."""
        if isinstance(error, PeerLost):
            os.write(2, f"cocodiff: [rank {launch.rank}] {error}\n".encode())
        told.set()

    end, transport = run(launch, tell)
    # The watch tells of a loss, at the same moment, unless rank 0 was lost before there was one.
    unsaid = end.kind != "lost" or not told.wait(LAST_WORDS_S)
    if unsaid and (launch.speaks or end.kind != "mistake"):
        _say(end, "" if end.kind == "mistake" else f"[rank {launch.rank}] ")
    if end.code:
        sys.stdout.flush()
        if transport is not None:
            transport.health.leave()
        else:
            time.sleep(LAST_WORDS_S)  # ranks that have not met do not hear of each other
        os._exit(end.code)  # lanes may hang in a library, and MPI_Finalize would wait for the dead
    return 0


# Forked ranks ---------------------------------------------------------------------------------------------------------


def _check_no_device(ranks: int, config: Config) -> None:
    """Raises UserError where this process uses an accelerator, which forked ranks could not use then."""
    torch = sys.modules.get("torch")
    found = torch.accelerator.current_accelerator() if torch is not None and config.device != "cpu" else None
    if found is not None and torch is not None and getattr(torch.get_device_module(found), "is_initialized", bool)():
        used = f"this process uses {found.type} already, and ranks forked from it cannot"
        raise UserError(f"--ranks {ranks}: {used}: start them from another one, or with mpiexec or torchrun")


class _Notes:
    """What forked ranks leave for their parent, in nameless files in memory, gone with the last process."""

    def __init__(self, ranks: int) -> None:
        self.store, self._ends, *self._logs = (os.memfd_create("cocodiff") for _ in range(2 + ranks))
        for file in (self._ends, *self._logs):
            fcntl.fcntl(file, fcntl.F_SETFL, os.O_APPEND)  # several threads and processes write whole lines to it

    def log_of(self, rank: int) -> int:
        """For the rank itself: the file that takes what it writes; those of the others are closed."""
        own = self._logs[rank]
        for other in {*self._logs} - {own}:
            os.close(other)
        return own

    def note_end(self, rank: int, end: End) -> None:
        os.write(self._ends, f"{json.dumps([rank, vars(end)])}\n".encode())

    def noted_end(self, rank: int) -> End | None:
        """What a rank has said last of its end itself. Another one may be writing a line of its own meanwhile."""
        whole, _, _ = self._content(self._ends).rpartition("\n")
        notes = [json.loads(line) for line in whole.splitlines()]
        return next((End(**end) for of, end in reversed(notes) if of == rank), None)

    def said(self, rank: int) -> str:
        return self._content(self._logs[rank])

    def close(self) -> None:
        for file in (self.store, self._ends, *self._logs):
            os.close(file)

    @staticmethod
    def _content(file: int) -> str:
        return os.pread(file, os.fstat(file).st_size, 0).decode(errors="replace")


def _fork(ranks: int, run: RunRank, left: Callable[[], str], config: Config) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    children: dict[int, int] = {}
    with closing(_Notes(ranks)) as notes, stop_requests() as stop:
        listener = socket.create_server(("127.0.0.1", 0), backlog=ranks)
        port, key = listener.getsockname()[1], secrets.token_hex(8)
        for rank in range(ranks):
            meeting = Meeting(f"/proc/self/fd/{notes.store}", port, key, None if rank else listener)
            launch = Launch("forked", rank, ranks, rank, ranks, meeting)
            try:
                pid = fork(partial(_child, launch, run, notes, listener), signal.default_int_handler)
            except OSError as error:
                signal_all(children, signal.SIGKILL)
                said = f"--ranks {ranks}: only {rank} could be started ({error.strerror}): start fewer"
                raise UserError(said) from error
            children[pid] = rank
        listener.close()
        return _attend_children(children, notes, stop, left, config)


def _child(launch: Launch, run: RunRank, notes: _Notes, listener: socket.socket) -> int:
    """A forked rank, up to its exit code. Only rank 0 keeps the terminal, and the listener."""
    rank, log = launch.local_rank, notes.log_of(launch.local_rank)
    if rank:
        listener.close()
        os.dup2(log, 1)
        os.dup2(log, 2)
    else:
        keep_libraries_off_stderr(log)
    end = End("interrupted", "interrupted")  # where it is asked to stop while it ends
    try:
        end, _ = run(launch, lambda error: notes.note_end(rank, _end_of(error)))
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    except KeyboardInterrupt:  # once: what is asked of it again is ignored
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    notes.note_end(rank, end)
    return end.code


def _attend_children(
    children: dict[int, int], notes: _Notes, stop: StopRequest, left: Callable[[], str], config: Config
) -> int:
    """Waits for all ranks. The watch tells survivors of a bad end at once; who does not stop then is killed. So is who
    goes on for longer than `stall_timeout_s` when others have ended well; a rank that has not said goodbye to rank 0 by
    then is given up by the watch before.

    What a signal has stopped sends no heartbeat, so its peers give it up; before they have met, or where all are
    stopped, nobody but the parent notices."""
    ranks, ends = len(children), dict[int, End]()
    deadline, looked = float("inf"), time.monotonic()
    interrupted = ended_by_us = False
    stopped_s: dict[int, float] = {}  # by process, for how long
    given_up: set[int] = set()
    while children:
        if stop.asked and not interrupted:
            interrupted = True
            signal_all(children, signal.SIGTERM)
            deadline = time.monotonic() + GRACE_S
        pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
        if pid == 0:
            now = time.monotonic()
            passed_s, looked = min(now - looked, 1.0), now  # longer: this process was stopped as well (Ctrl-Z)
            stopped_s = {pid: so_far_s + passed_s for pid, so_far_s in stopped_s.items() if pid in children}
            late = {pid for pid, so_far_s in stopped_s.items() if so_far_s > config.timeout_s + GRACE_S} - given_up
            signal_all(late, signal.SIGKILL)
            given_up |= late
            if now > deadline and not ended_by_us:
                ended_by_us = True
                signal_all(children, signal.SIGKILL)
            time.sleep(0.02)
            continue
        if os.WIFSTOPPED(status):
            stopped_s[pid] = 0.0
        elif os.WIFCONTINUED(status):
            stopped_s.pop(pid, None)
        if pid not in children or os.WIFSTOPPED(status) or os.WIFCONTINUED(status):
            continue
        rank = children.pop(pid)
        if pid in given_up:
            ends[rank] = End("stopped", f"rank {rank} was stopped for more than {config.timeout_s:g} s")
        elif ended_by_us:  # it may still have said something, as on a machine that is busy
            ends[rank] = notes.noted_end(rank) or End("stuck", f"rank {rank} did not stop")
        else:
            ends[rank] = _child_end(rank, status, notes)
        if not interrupted and not any(end.code for of, end in ends.items() if of != rank):
            watched_s = config.stall_timeout_s + BEAT_S  # in which the watch names who hangs
            deadline = time.monotonic() + GRACE_S + (0.0 if ends[rank].code else watched_s)
        if len(children) == 1 and all(end.kind == "lost" for end in ends.values()):
            deadline = time.monotonic()  # the one that all others have given up has had its time
    if interrupted:
        print(f"cocodiff: interrupted; {left()}", file=sys.stderr)
        return 130
    return _report(ends, ranks, left())


def _child_end(rank: int, status: int, notes: _Notes) -> End:
    if os.WIFSIGNALED(status):
        number = signal.Signals(os.WTERMSIG(status))
        said = notes.said(rank) if number in OWN_SIGNALS else ""
        return End("killed", f"rank {rank} was killed by {number.name}", said)
    left = End("failed", f"rank {rank} left with code {os.WEXITSTATUS(status)}", notes.said(rank))
    return notes.noted_end(rank) or left


def _report(ends: dict[int, End], ranks: int, left: str) -> int:
    """One line for the cause, however many ranks it took down. Returns the exit code of the job."""
    bad = {rank: end for rank, end in ends.items() if end.kind != "done"}
    if not bad:
        return 0
    order = ("mistake", "killed", "stopped", "failed", "interrupted", "lost", "stuck")

    def gravity(rank: int) -> tuple[int, int]:
        """Of those that did not stop rank 0 comes last: it may have waited for the others' goodbyes."""
        return order.index(bad[rank].kind), -rank if bad[rank].kind == "stuck" else rank

    cause = min(bad, key=gravity)
    end = bad[cause]
    if end.kind == "mistake":
        print(f"cocodiff: {end.message}", file=sys.stderr)
        return 2
    sys.stderr.write(end.trace)
    named_there = end.kind in ("killed", "stopped", "lost", "stuck")
    message = end.message if named_there else f"rank {cause} {end.kind}: {end.message}"
    # The lost rank itself may have heard of it as well.
    named = min(ranks - 1, sum(other.kind == "lost" for other in bad.values()))
    print(f"cocodiff: {message}; {named} of {ranks - 1} {NOTICED}, {left}", file=sys.stderr)
    return 1


def read_loss(text: str) -> PeerLost | None:
    """Return the rank that `_report` says a job has ended of, from the job's output; None where it names none."""
    found = re.search(rf"^cocodiff: rank (\d+) (.+?); \d+ of \d+ {NOTICED}", text, re.MULTILINE | re.DOTALL)
    return PeerLost(int(found[1]), found[2]) if found is not None else None


# Of every command that runs on ranks ----------------------------------------------------------------------------------


def settle(values: dict[str, Any], launch: Launch) -> tuple[Launch, int]:
    """Quiets libraries and shares cores, before torch is imported. Returns the launch, whose size MPI was asked for
    where nobody has told it, and how many ranks there are. Raises UserError."""
    gc.disable()  # until ranks run: a tenth of the time would go into a search for garbage among what imports leave
    quiet_libraries(values["log_level"])
    if launch.size is None or launch.guessed:
        launch = count_ranks(launch, Limits(values["timeout_s"], values.get("start_timeout_s", Limits.start_s)))
    ranks = (values["ranks"] if launch.kind == "alone" else launch.size) or 1
    limit_threads(launch.local_size or ranks, launched=launch.kind != "alone")
    if launch.kind == "alone":
        check_room(ranks)
    return launch, ranks


def run_holding(
    output: OutputFolder,
    values: dict[str, Any],
    launch: Launch,
    config: Config,
    work: Work,
    import_before_fork: Callable[[], None],
    compared: dict[str, str] | None = None,
) -> int:
    """`run_ranks` while no other run may write to the folder; a run that ends badly leaves nothing unfinished there.

    values: of all options, which ranks must have been given alike; compared: what else must be. import_before_fork:
    called in the process that ranks are forked from, if they are forked from here.
    """
    ranks, writing = values["ranks"], output.writing()(work)
    alike = {name: str(value) for name, value in values.items() if name != "ranks"} | (compared or {})
    if launch.kind != "alone":
        # Where rank 0 may not have the folder, the others must hear it: they are told once they have met.
        return run_ranks(ranks, launch, config, alike, partial(_hold_on_first, output, writing))
    with output.held():
        import_before_fork()
        code = run_ranks(ranks, launch, config, alike, writing, output.left)
        # Forked ranks' one line tells it already, unless it tells of a mistake.
        if code and (ranks in (None, 1) or code == 2):
            _note_left(output)
        return code


def _hold_on_first(output: OutputFolder, work: Work, transport: Any) -> None:
    with output.held() if transport.rank == 0 else nullcontext():
        try:
            work(transport)
        except BaseException:
            if transport.rank == 0:
                _note_left(output)
            raise


def _note_left(output: OutputFolder) -> None:
    if (left := output.left()) != NOTHING_LEFT:
        note(f"cocodiff: {left}")
