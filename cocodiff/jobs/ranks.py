"""The start of a command's work on its ranks: this process if a launcher started it, else ranks forked from here.

Separate starts would import torch and diffusers once per rank. Ranks forked after one import share the memory of these
modules. Before the fork this process may not use a device, MPI or a thread pool.
"""

from __future__ import annotations

import fcntl
import gc
import json
import os
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

from cocodiff.comm.health import OnLoss
from cocodiff.comm.launch import Contact, Launch
from cocodiff.comm.mpi_start import count_ranks
from cocodiff.comm.peers import BEAT_S, Limits
from cocodiff.config.config import Config
from cocodiff.config.errors import OwnRankError, PeerLost, UserError
from cocodiff.config.packages import failed_import
from cocodiff.jobs.children import StopRequest, check_room, fork, signal_all, stop_requests
from cocodiff.jobs.folder import NOTHING_LEFT, OutputFolder
from cocodiff.jobs.terminal import keep_libraries_off_stderr, limit_threads, note, quiet_libraries

# Time for all ranks to report a failure before this one exits: launchers kill a job at its first bad exit code.
LAST_WORDS_S = 1.0
GRACE_S = 3.0  # time for the other ranks to notice a failure and clean up, and for rank 0 to report a mistake
OWN_SIGNALS = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)  # of faults in the process
Work = Callable[[Any], None]  # called with the rank's transport


@dataclass(frozen=True)
class RankEnd:
    """The end of a rank's process: done or in which way failed, and what to show the user."""

    # Kind reported by the rank: "done", "mistake" (the user's), "lost" (it lost a peer), "failed" or "interrupted". The
    # parent of forked ranks adds "killed", "stopped" and "stuck".
    kind: str
    message: str = ""  # one line for the user; the end of a sentence that begins with "rank 3" if `lost` is 3
    trace: str = ""  # traceback, or the output of a rank that ended without a traceback
    lost: int | None = None  # number of the lost rank that the message is about; None if it is about none

    @property
    def code(self) -> int:
        """The rank's exit code."""
        return {"done": 0, "mistake": 2, "interrupted": 130}.get(self.kind, 1)

    def error(self, own: int) -> UserError | PeerLost:
        """Return the error to raise for a job that has failed because a rank ended in this way.

        own: number of that rank
        """
        if self.kind == "mistake":
            return UserError(self.message)
        return PeerLost(own, f"{self.kind}: {self.message}") if self.lost is None else PeerLost(self.lost, self.message)


RunRank = Callable[[Launch, OnLoss], tuple[RankEnd, Any]]  # `_run_rank` for one launch


def run_ranks(
    ranks: int | None,
    launch: Launch,
    config: Config,
    settings: dict[str, str],
    work: Work,
    left: Callable[[], str] = lambda: NOTHING_LEFT,
) -> int:
    """Run a command's work on every rank and return the exit code.

    Under a launcher (mpiexec, torchrun) this process is one rank; it exits here if it fails. Else the ranks are forked
    from it. Raise UserError if they cannot be started.

    Args:
        ranks: number of ranks to fork; under a launcher None or its number of ranks
        launch: how this process was started
        config: settings of the transport and its time limits
        settings: other values that must be equal on all ranks, by name
        work: function that each rank calls with its transport, the connection to the other ranks
        left: function that returns what a failed run has left in its folder, as text for the user
    """
    # Exempt all present objects from garbage collection. The collector writes to the pages of objects that it visits,
    # so every rank would copy 120 MB.
    gc.freeze()
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
        note_cause(launch, 0, end)
        _say(end, "")
        return end.code
    _check_no_device(ranks, config)
    return _fork(launch, ranks, run, left, config)


def _run_rank(
    config: Config, settings: dict[str, str], work: Work, launch: Launch, note_loss: OnLoss | None = None
) -> tuple[RankEnd, Any]:
    """Connect this rank with the others and run the command's work on it, whatever error that raises.

    Return the rank's end, and its transport or None if it could not be opened. A failure is reported to other ranks.

    Args:
        config: settings of the transport
        settings: other values that must be equal on all ranks, by name
        work: function to call with the transport
        launch: how this rank was started, with its number
        note_loss: called with the error at once if another rank is lost, since this rank may not reach its end
    """
    # It imports torch. Forked ranks inherit the import from their parent.
    from cocodiff.engine.engine import open_transport

    transport = None
    try:
        transport = open_transport(config, launch, settings, [note_loss] if note_loss is not None else [])
        work(transport)
        transport.close()
        return RankEnd("done"), transport
    except (UserError, PeerLost, KeyboardInterrupt, Exception) as error:
        if transport is not None:
            error = _known_loss(transport) or error  # after a loss other errors follow from it
        end = _end_of(error)
        if isinstance(error, PeerLost) and error.rank == launch.rank and error.reason.startswith("failed: "):
            end = RankEnd("failed", error.reason.removeprefix("failed: "))  # it received a wrong message
        if transport is not None and end.kind != "lost":
            transport.health.fail(end.message, mistake=end.kind == "mistake")
        return end, transport


def _known_loss(transport: Any) -> UserError | PeerLost | None:
    """Return the error that another rank has reported for the run, a loss or a mistake; None if there is none.

    transport: this rank's connection to the others
    """
    try:
        transport.health.check()
    except (UserError, PeerLost) as known:
        return None if isinstance(known, PeerLost) and known.rank == transport.rank else known
    return None


def _end_of(error: BaseException) -> RankEnd:
    """Return the end of a rank whose work raised `error`."""
    if isinstance(error, KeyboardInterrupt):
        return RankEnd("interrupted", "interrupted")
    if isinstance(error, PeerLost):
        return RankEnd("lost", error.reason, lost=error.rank)
    if isinstance(error, UserError):
        return RankEnd("failed" if isinstance(error, OwnRankError) else "mistake", str(error))
    if line := failed_import(error):
        return RankEnd("mistake", line)
    return RankEnd("failed", f"{type(error).__name__}: {error}", traceback.format_exc())


def _say(end: RankEnd, who: str) -> None:
    """Print a rank's bad end on stderr: the traceback of a failure, and one line. A good end prints nothing.

    who: text before the line's message, such as "[rank 3] "
    """
    if end.kind == "failed":
        sys.stderr.write(end.trace)
    if end.kind != "done":
        message = end.message if end.lost is None else end.error(end.lost)
        print(f"cocodiff: {who}{message}", file=sys.stderr, flush=True)


def _run_launched(launch: Launch, run: RunRank) -> int:
    """Run this process's rank of a job that mpiexec or torchrun started. Return 0, or exit with the code of a bad end.

    A user's mistake is the same on all ranks, so rank 0 alone reports it.

    Args:
        launch: how this process was started, with its rank
        run: function that runs the rank, see `_run_rank`
    """
    told = threading.Event()

    def tell(error: BaseException) -> None:
        """Report a lost peer from the watch's thread, in one write: the launcher kills this process soon after."""
        if isinstance(error, PeerLost):
            os.write(2, f"cocodiff: [rank {launch.rank}] {error}\n".encode())
        told.set()

    end, transport = run(launch, tell)
    # The watch reports a loss at about this time, unless rank 0 was lost before the watch began.
    unsaid = end.kind != "lost" or not told.wait(LAST_WORDS_S)
    if unsaid and (launch.speaks or end.kind != "mistake"):
        _say(end, "" if end.kind == "mistake" else f"[rank {launch.rank}] ")
    if end.code:
        sys.stdout.flush()
        if transport is not None:
            transport.health.leave()
        else:
            time.sleep(LAST_WORDS_S)  # before ranks have met, none can report to the others
        os._exit(end.code)  # lanes may block in a library, and MPI_Finalize would wait for lost ranks
    return 0


# Forked ranks ---------------------------------------------------------------------------------------------------------


def _check_no_device(ranks: int, config: Config) -> None:
    """Raise UserError if this process uses an accelerator already, since ranks forked from it could not use it then.

    Args:
        ranks: number of ranks to fork, for the error
        config: settings of the engine; with device "cpu" nothing is checked
    """
    torch = sys.modules.get("torch")
    found = torch.accelerator.current_accelerator() if torch is not None and config.device != "cpu" else None
    if found is not None and torch is not None and getattr(torch.get_device_module(found), "is_initialized", bool)():
        used = f"this process uses {found.type} already, and ranks forked from it cannot"
        raise UserError(f"--ranks {ranks}: {used}: start them from another one, or with mpiexec or torchrun")


def _content(file: int) -> str:
    """Return the whole text of an open file, given by its descriptor. The file's position stays as it is."""
    return os.pread(file, os.fstat(file).st_size, 0).decode(errors="replace")


class _Notes:
    """The files in memory in which forked ranks leave their ends and their output for the parent.

    They have no names in the file system, and are freed when the last process that has them open ends.
    """

    def __init__(self, ranks: int) -> None:
        """Make the files in the parent, before it forks `ranks` processes."""
        # `store` is for torch.distributed; the others hold the ends of all ranks, and the output of each.
        self.store, self._ends, *self._logs = (os.memfd_create("cocodiff") for _ in range(2 + ranks))
        for file in (self._ends, *self._logs):
            fcntl.fcntl(file, fcntl.F_SETFL, os.O_APPEND)  # several threads and processes write whole lines to it

    def log_of(self, rank: int) -> int:
        """Return the descriptor of the file for a rank's output. It is called in the forked rank.

        The files for the output of other ranks are closed.
        """
        own = self._logs[rank]
        for other in {*self._logs} - {own}:
            os.close(other)
        return own

    def note_end(self, rank: int, end: RankEnd) -> None:
        """Record the end of a rank for the parent. It is called in the rank; a later end replaces an earlier one."""
        os.write(self._ends, f"{json.dumps([rank, vars(end)])}\n".encode())

    def noted_end(self, rank: int) -> RankEnd | None:
        """Return the last end that a rank has recorded; None if there is none. It is called in the parent."""
        # Another rank may be writing at this time: an incomplete last line is not read.
        whole, _, _ = _content(self._ends).rpartition("\n")
        notes = [json.loads(line) for line in whole.splitlines()]
        return next((RankEnd(**end) for of, end in reversed(notes) if of == rank), None)

    def said(self, rank: int) -> str:
        """Return a rank's output so far as text; of rank 0, which has the terminal, only that of its libraries."""
        return _content(self._logs[rank])

    def close(self) -> None:
        """Close all files in this process."""
        for file in (self.store, self._ends, *self._logs):
            os.close(file)


def _fork(alone: Launch, ranks: int, run: RunRank, left: Callable[[], str], config: Config) -> int:
    """Fork all ranks of a job, wait for their end, and return the job's exit code.

    Raise UserError if not all can be forked.

    Args:
        alone: how this process was started
        ranks: number of ranks to fork
        run: function that runs a rank, see `_run_rank`
        left: function that returns what a failed run has left in its folder, as text for the user
        config: its time limits are used
    """
    sys.stdout.flush()
    sys.stderr.flush()
    children: dict[int, int] = {}
    with closing(_Notes(ranks)) as notes, stop_requests() as stop:
        listener = socket.create_server(("127.0.0.1", 0), backlog=ranks)
        address, key, store = listener.getsockname(), secrets.token_hex(8), f"/proc/self/fd/{notes.store}"
        for rank in range(ranks):
            meeting = Contact(rank, ranks, address, key, None if rank else listener, store)
            launch = Launch("forked", rank, ranks, rank, ranks, meeting)
            try:
                pid = fork(partial(_child, launch, run, notes, listener), signal.default_int_handler)
            except OSError as error:
                signal_all(children, signal.SIGKILL)
                said = f"--ranks {ranks}: only {rank} could be started ({error.strerror}): start fewer"
                raise UserError(said) from error
            children[pid] = rank
        listener.close()
        return _attend_children(alone, children, notes, stop, left, config)


def _child(launch: Launch, run: RunRank, notes: _Notes, listener: socket.socket) -> int:
    """Run a rank in the process that was forked for it, and return its exit code. Its end is recorded in `notes`.

    Only rank 0 keeps the terminal and the listening socket. The output of other ranks goes to files in memory.

    Args:
        launch: the rank's number, and how it meets the others
        run: function that runs a rank, see `_run_rank`
        notes: files for the ends and the output of all ranks
        listener: socket on which rank 0's health watch listens for the other ranks' heartbeats
    """
    rank, log = launch.local_rank, notes.log_of(launch.local_rank)
    if rank:
        listener.close()
        os.dup2(log, 1)
        os.dup2(log, 2)
    else:
        keep_libraries_off_stderr(log)
    end = RankEnd("interrupted", "interrupted")  # used if SIGTERM arrives while the rank ends
    try:
        end, _ = run(launch, lambda error: notes.note_end(rank, _end_of(error)))
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    except KeyboardInterrupt:  # a second SIGTERM is ignored
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    notes.note_end(rank, end)
    return end.code


def _attend_children(
    alone: Launch, children: dict[int, int], notes: _Notes, stop: StopRequest, left: Callable[[], str], config: Config
) -> int:
    """Wait for the end of all forked ranks, report the cause of a bad end, and return the job's exit code.

    After a rank's bad end the others' health watch informs them at once, and those that still run after GRACE_S are
    killed. After a good end the others are killed if they still run `stall_timeout_s` and a few seconds later. Within
    that time the watch reports ranks that have not taken leave of rank 0 as lost.

    A rank stopped by a signal (SIGSTOP) sends no heartbeat, so its peers report it as lost. Before ranks have met, or
    if all are stopped, only the parent can notice. It kills ranks that are stopped for more than `timeout_s` + GRACE_S.

    Args:
        alone: how this process was started
        children: rank by process id; emptied as processes end
        notes: files in which ranks record their ends and output
        stop: request to end all ranks, which makes the exit code 130
        left: function that returns what a failed run has left in its folder
        config: its time limits are used
    """
    ends: dict[int, RankEnd] = {}
    deadline, looked = float("inf"), time.monotonic()
    interrupted = ended_by_us = False
    stopped_s: dict[int, float] = {}  # time since each stopped process was stopped, by its id
    given_up: set[int] = set()
    while children:
        if stop.asked and not interrupted:
            interrupted = True
            signal_all(children, signal.SIGTERM)
            deadline = time.monotonic() + GRACE_S
        pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
        if pid == 0:
            now = time.monotonic()
            passed_s, looked = min(now - looked, 1.0), now  # a longer time: this process was stopped too (Ctrl-Z)
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
            ends[rank] = RankEnd("stopped", f"was stopped for more than {config.timeout_s:g} s", lost=rank)
        elif ended_by_us:  # it may have recorded its end just before
            ends[rank] = notes.noted_end(rank) or RankEnd("stuck", "did not stop", lost=rank)
        else:
            ends[rank] = _child_end(rank, status, notes)
        if not interrupted and not any(end.code for of, end in ends.items() if of != rank):
            watched_s = config.stall_timeout_s + BEAT_S  # within it the watch names the rank that blocks
            deadline = time.monotonic() + GRACE_S + (0.0 if ends[rank].code else watched_s)
        if len(children) == 1 and all(end.kind == "lost" for end in ends.values()):
            deadline = time.monotonic()  # the last one was given up by all others: do not wait longer
    if interrupted:
        print(f"cocodiff: interrupted; {left()}", file=sys.stderr)
        return 130
    return _report(alone, ends, left())


def _child_end(rank: int, status: int, notes: _Notes) -> RankEnd:
    """Return the end of a forked rank: that which it has recorded, or the signal or exit code that ended it.

    Args:
        rank: number of the rank
        status: status of its process, from `os.waitpid`
        notes: files in which ranks record their ends and output
    """
    if os.WIFSIGNALED(status):
        number = signal.Signals(os.WTERMSIG(status))
        said = notes.said(rank) if number in OWN_SIGNALS else ""
        return RankEnd("killed", f"was killed by {number.name}", said, rank)
    left = RankEnd("failed", f"rank {rank} left with code {os.WEXITSTATUS(status)}", notes.said(rank))
    return notes.noted_end(rank) or left


def _report(alone: Launch, ends: dict[int, RankEnd], left: str) -> int:
    """Print one line on the cause of a job's bad end, and return the job's exit code; 0 if no rank failed.

    The cause is the worst of the ranks' ends; the losses that other ranks report only follow from it.

    Args:
        alone: how the process that has forked the ranks was started
        ends: end of each rank, by its number
        left: text on what the run has left in its folder
    """
    bad = {rank: end for rank, end in ends.items() if end.kind != "done"}
    if not bad:
        return 0
    order = ("mistake", "killed", "stopped", "failed", "interrupted", "lost", "stuck")

    def gravity(rank: int) -> tuple[int, int]:
        """Return the sort key of a rank that ended badly: ranks whose end is likely to have caused the others' come
        first.

        Ranks are sorted by the kind of their end, as `order` has it, and then by number. Those that were still running
        ("stuck") are sorted by falling number, since rank 0 may only have waited for the others to leave.
        """
        return order.index(bad[rank].kind), -rank if bad[rank].kind == "stuck" else rank

    cause = min(bad, key=gravity)
    end = bad[cause]
    note_cause(alone, cause, end)
    if end.kind == "mistake":
        print(f"cocodiff: {end.message}", file=sys.stderr)
        return 2
    sys.stderr.write(end.trace)
    # The lost rank may have received the report of its own loss: it is not one of the others.
    others = len(ends) - 1
    noticed = f"{min(others, sum(other.kind == 'lost' for other in bad.values()))} of {others} other ranks noticed"
    print(f"cocodiff: {end.error(cause)}; {noticed} and stopped, {left}", file=sys.stderr)
    return 1


# Used by every command that runs on ranks -----------------------------------------------------------------------------


def note_cause(launch: Launch, rank: int, end: RankEnd) -> None:
    """Write why a job fails into the file that `restore`, if it started the job, reads by `read_cause`.

    Ends that are no failure are not written.

    Args:
        launch: how this process was started; its `cause` is the file's descriptor, None without such a file
        rank: number of the rank by which the job ends
        end: that rank's end
    """
    if launch.cause is not None and end.kind not in ("done", "interrupted"):
        os.ftruncate(launch.cause, 0)
        os.pwrite(launch.cause, json.dumps([rank, vars(end)]).encode(), 0)


def read_cause(file: int) -> UserError | PeerLost | None:
    """Return the error of a failed job from the file into which `note_cause` wrote; None if the file is empty.

    file: the file's descriptor
    """
    rank, end = json.loads(_content(file) or "[0, null]")
    return RankEnd(**end).error(rank) if end else None


def settle(values: dict[str, Any], launch: Launch) -> tuple[Launch, int]:
    """Prepare a command that runs on ranks: quiet libraries and divide this host's cores among its ranks.

    Return the launch with its size, and the number of ranks. Call it before torch is imported. MPI is asked for the
    size if the launcher does not give it. Garbage collection is off until `run_ranks`. Raise UserError if the ranks do
    not fit on this host, or MPI's ranks cannot be counted.

    Args:
        values: values of the command's options, by name
        launch: how this process was started
    """
    gc.disable()  # a search for garbage among imported objects would take a tenth of the time
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
    """Run a command's work on every rank, while no other run may write to its folder of results. Return the exit code.

    A run that fails leaves nothing unfinished in the folder but units of work that are done.

    Args:
        output: folder of the results
        values: values of all options, which must be equal on all ranks except `ranks`
        launch: how this process was started
        config: settings of the transport and its time limits
        work: function that each rank calls with its transport, the connection to the other ranks
        import_before_fork: called in the process that ranks are forked from; not called under a launcher
        compared: other values that must be equal on all ranks, by name
    """
    ranks, writing = values["ranks"], output.writing()(work)
    alike = {name: str(value) for name, value in values.items() if name != "ranks"} | (compared or {})
    if launch.kind != "alone":
        # Rank 0 locks the folder after the ranks have met, so that all of them receive its error if it cannot.
        return run_ranks(ranks, launch, config, alike, partial(_hold_on_first, output, writing))
    with output.held():
        import_before_fork()
        code = run_ranks(ranks, launch, config, alike, writing, output.left)
        # The line of `_report` says this already, unless the end is a user's mistake.
        if code and (ranks in (None, 1) or code == 2):
            _note_left(output)
        return code


def _hold_on_first(output: OutputFolder, work: Work, transport: Any) -> None:
    """Run the work of a launcher's rank, while rank 0 keeps other runs out of the folder of results.

    If the work fails, rank 0 prints what is left in the folder.

    Args:
        output: the folder
        work: function to call with the transport
        transport: this rank's connection to the others
    """
    with output.held() if transport.rank == 0 else nullcontext():
        try:
            work(transport)
        except BaseException:
            if transport.rank == 0:
                _note_left(output)
            raise


def _note_left(output: OutputFolder) -> None:
    """Print on stderr what a failed run has left in its folder, if anything."""
    if (left := output.left()) != NOTHING_LEFT:
        note(f"cocodiff: {left}")
