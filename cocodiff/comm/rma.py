"""A transport over one-sided MPI: a sender puts messages into its receiver's memory (StreamFusion, section 4.4).

Every group has a window. In it each rank keeps, for every peer, a ring buffer that only this peer writes to, and two
counters. One counts the bytes that the peer has put there. The other counts the bytes that the peer has taken out of
its own ring for this rank. A sender puts a message, completes that at the target, and puts the first counter. The
receiver finds it there, copies the message out and puts the second counter back. So a sender does not wait while the
ring has room, and nothing is overwritten before it was read.

Before every message its length is put, so that a receiver which expects another length reports an error. The length
contains the number of the message's call: a receiver that is in another call takes nothing more, as with MPI's own
messages. A message that is longer than a ring is sent two-sided after its length; both sides know this from its size.
Counters are 8 bytes and aligned, which every MPI writes as a whole. Puts do not need the receiver's help where
accumulates may.

Puts that find no room, and receives, progress while any thread of the rank waits for any group, as MPI's own messages
do.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from collections import deque
from functools import partial
from typing import Any

import numpy as np

from cocodiff.comm.health import Health, call_tag
from cocodiff.comm.mpi import MpiGroup, MpiTransport, bits_of, wait_until
from cocodiff.comm.mpi_start import SHARED_MEMORY
from cocodiff.comm.transport import Messages, Pending, PostedMessages, not_empty
from cocodiff.config.errors import PeerLost, UserError

WINDOW_BYTES = 2**23  # size of a group's window on each rank
PIECE = 2**20  # bytes that are put before their counter is
CALL_BIT = 48  # a length's bits from this one on are the number of the message's call
COUNTERS = 16  # bytes of a peer's two counters: bytes that arrived from it, bytes that it has taken
TRIAL_S = 1.0  # seconds after which a put is taken to need its receiver's help
FREE_S = 10.0  # most seconds for all ranks to reach the end of a window
SHARED_BYTES = 8 * WINDOW_BYTES  # of /dev/shm that the groups of a rank need
DRAWBACKS = (  # reported by `RmaTransport.drawback`; with the last three, messages are two-sided
    "",
    "puts need their receivers' help over this fabric, so windows gain nothing",
    "this MPI library's windows have no unified memory model; messages go by mpi",
    f"{SHARED_MEMORY} has less than {SHARED_BYTES >> 20} MiB free for each rank of a host; messages go by mpi",
    "this MPI library makes no windows; messages go by mpi",
)


class Message:
    """The bytes of one message to or from a peer, and the number of them that have been sent or received (`done`)."""

    __slots__ = ("bits", "done", "length")

    def __init__(self, bits: Any, length: int = 0) -> None:
        """Describe a message of which nothing is done yet.

        Args:
            bits: uint8 [n].
            length: if `bits` announce a message, the length and call that this rank expects; else 0.
        """
        self.bits, self.done, self.length = bits, 0, length

    @property
    def is_through(self) -> bool:
        """True if all bytes were sent or received."""
        return bool(self.done == len(self.bits))


class Peer:
    """The two streams of bytes between this rank and one peer, outgoing and incoming, by one-sided MPI.

    Counts of bytes begin at 0 and only grow.
    """

    def __init__(self, group: RmaGroup, number: int, counters: Any, rings: Any) -> None:
        """Set up the streams.

        Args:
            group: the group of both ranks.
            number: index of the peer in the group.
            counters: written by the peers, int64 [ranks, 2]: bytes that a peer has put here, and bytes that it has
                taken of what this rank put there.
            rings: this rank's buffers that the peers write to, uint8 [ranks, n].
        """
        self._group, self.number, self._counters, self._ring = group, number, counters[number], rings[number]
        self._window = group.window
        # where this rank's ring begins in the peer's window, and where its counters end there
        self._ring_at, self._counters_end = counters.nbytes + group.index * rings.shape[1], (group.index + 1) * COUNTERS
        self.outgoing: deque[Message] = deque()
        self.incoming: deque[Message] = deque()
        self._sent, self._read = np.zeros(1, np.int64), np.zeros(1, np.int64)  # counts to put to the peer

    def put(self, bits: Any, at: int) -> None:
        """Put bytes into the peer's ring buffer (`at` is 0 or more) or among its counters for this rank (below 0)."""
        self._window.Put([bits, self._group.byte], self.number, at + (self._ring_at if at >= 0 else self._counters_end))

    def send(self) -> bool:
        """Put bytes of outgoing messages into the peer's buffer, as many as it has room for, at most PIECE. Return True
        if any were put."""
        sent, capacity = int(self._sent[0]), len(self._ring)
        room = min(PIECE, capacity - sent + int(self._counters[1]))
        while self.outgoing and room:
            message, start = self.outgoing[0], sent % capacity
            size = min(len(message.bits) - message.done, room, capacity - start)
            self.put(message.bits[message.done : message.done + size], start)
            message.done, sent, room = message.done + size, sent + size, room - size
            if message.is_through:
                self.outgoing.popleft()
        moved = bool(sent != self._sent[0])
        self._sent[0] = sent
        return moved

    def raise_flag(self) -> None:
        """Tell the peer how many bytes have been put into its buffer, once they have arrived there."""
        self._window.Flush(self.number)
        self.put(self._sent, -COUNTERS)
        self._window.Flush(self.number)

    def receive(self) -> bool:
        """Copy bytes that have arrived into the messages that this rank expects. Return True if there were any.

        Raise WrongMessage if a message has another length.
        """
        arrived, read, capacity = int(self._counters[0]), int(self._read[0]), len(self._ring)
        while self.incoming and read < arrived:
            message, start = self.incoming[0], read % capacity
            size = min(len(message.bits) - message.done, arrived - read, capacity - start)
            message.bits[message.done : message.done + size] = self._ring[start : start + size]
            message.done, read = message.done + size, read + size
            if message.is_through:
                self.incoming.popleft()
                came, mask = int(message.bits.view(np.int64)[0]) if message.length else 0, (1 << CALL_BIT) - 1
                if came >> CALL_BIT != message.length >> CALL_BIT:
                    self.incoming = deque(maxlen=0)  # take nothing more: the watch will find ranks in different calls
                elif came != message.length:
                    raise self._group.refused(self.number, came & mask, message.length & mask)
        if read == self._read[0]:
            return False
        self._read[0] = read
        self._window.Sync()  # complete the reads before the peer may write there again
        self.put(self._read, 8 - COUNTERS)
        self._window.Flush_local(self.number)
        return True


class RmaGroup(MpiGroup):
    """A group whose messages are put into the receiver's memory by one-sided MPI.

    It has an MPI window of its own, memory that the other ranks may write to.
    """

    def __init__(
        self, transport: RmaTransport, mpi: Any, communicator: Any, window: Any, ranks: tuple[int, ...]
    ) -> None:
        super().__init__(mpi, communicator, ranks, transport.health)
        self.window, self.turn, self.lock = window, transport.turn, threading.Lock()
        self._probe, self._test_all, self.byte = communicator.Iprobe, mpi.Request.Testall, mpi.BYTE
        memory, size = np.frombuffer(window.tomemory(), dtype=np.uint8), len(ranks)
        memory[:] = 0  # the first use of a page takes long
        self._counters = memory[: size * COUNTERS].view(np.int64).reshape(size, 2)
        self._rings = memory[size * COUNTERS :].reshape(size, -1)
        self._seen = b""  # counters for which everything has been done
        self._peers = [Peer(self, number, self._counters, self._rings) for number in range(size)]

    def send_recv(self, sends: Messages, recvs: Messages) -> Pending:
        capacity, opened, call = self._rings.shape[1], list[Message](), call_tag(15) << CALL_BIT
        with self.lock:
            for listed, leaving in ((recvs, False), (sends, True)):
                for tensor, peer in not_empty(listed):
                    length, message = call + tensor.nbytes, Message(bits_of(tensor))
                    announced = Message(np.array([length]).view(np.uint8), length)
                    both = [announced, *([message] if tensor.nbytes <= capacity else [])]
                    of = self._peers[peer]
                    (of.outgoing if leaving else of.incoming).extend(both)
                    opened += both
            while self._send():
                pass
            self._seen = b""
        large = [[(tensor, peer) for tensor, peer in listed if tensor.nbytes > capacity] for listed in (sends, recvs)]
        poll = partial(self._poll, opened, self._posted(*large), [*sends, *recvs])
        return PostedMessages(partial(wait_until, poll, self.health))

    def _poll(self, messages: list[Message], requests: list[Any], _tensors: Messages) -> bool:
        """Move bytes of messages in all groups of this rank. Return True if the messages of one call are done.

        Args:
            messages: those that pass through the ring buffers; the ones that are done are taken out.
            requests: MPI's own, for messages longer than a ring buffer.
            _tensors: those of the call, which the argument keeps alive.
        """
        while self.turn():
            pass
        if not self.lock.acquire(blocking=False):
            return False  # another thread is at this group, and its puts may not have arrived
        try:
            while messages and messages[-1].is_through:
                messages.pop()
        finally:
            self.lock.release()
        if requests:
            return bool(self._test_all(requests)) and not messages
        self._probe()  # on fabrics that need it, this lets the library handle the puts of others
        return not messages

    def barrier(self) -> None:
        self.health.arrive("a barrier", self.ranks)
        wait_until(partial(self._poll, [], [self._communicator.Ibarrier()], []), self.health)

    @property
    def is_busy(self) -> bool:
        """True if messages of this group are in flight on this rank."""
        return any(peer.outgoing or peer.incoming for peer in self._peers)

    def advance(self) -> bool:
        """Move bytes of this group's messages as far as peers have room or have sent. Return True if any were moved.

        The caller holds the group's lock.
        """
        self.window.Sync()
        counters = self._counters.tobytes()
        if counters == self._seen:
            return False
        moved = [peer.receive() for peer in self._peers if peer.incoming]
        moved.append(self._send())
        self._seen = b"" if any(moved) else counters
        return any(moved)

    def _send(self) -> bool:
        """Put bytes of outgoing messages to all peers, and tell the peers. Return True if there were any."""
        moved = [peer for peer in self._peers if peer.outgoing and peer.send()]
        for peer in moved:  # all puts are started before the first one is waited for
            peer.raise_flag()
        return bool(moved)


class RmaTransport(MpiTransport):
    """A transport by one-sided MPI: senders put messages into their receivers' memory, in windows.

    A window is allocated with each group and kept. If MPI has no suitable windows, messages are two-sided. The ranks
    agree on that at the start, and `drawback` has the reason.
    """

    def __init__(self, health: Health) -> None:
        self._groups: list[RmaGroup] = []
        self._has_windows = False
        super().__init__(health)
        refused, self.drawback = self._tried()
        if not refused:
            self.library, self._has_windows = "mpi-rma", True
            self.world = self._over(self._communicator, tuple(range(self.size)))

    def turn(self) -> bool:
        """Move bytes of messages in all groups that no other thread works on. Return True if any were moved."""
        moved = False
        for group in self._groups:
            if group.is_busy and group.lock.acquire(blocking=False):
                try:
                    moved |= group.advance()
                finally:
                    group.lock.release()
        return moved

    def _over(self, communicator: Any, members: tuple[int, ...]) -> MpiGroup:
        if not self._has_windows or len(members) == 1:
            return super()._over(communicator, members)
        try:
            of_peer = COUNTERS + WINDOW_BYTES // len(members)
            window = self._mpi.Win.Allocate(len(members) * of_peer, 1, comm=communicator)
        except self._mpi.Exception as error:
            raise UserError(f"MPI makes no further window ({error}): use --transport mpi") from error
        window.Lock_all(self._mpi.MODE_NOCHECK)
        group = RmaGroup(self, self._mpi, communicator, window, members)
        window.Sync()
        communicator.Barrier()  # its counters are 0 on all ranks
        self._groups.append(group)
        return group

    def _tried(self) -> tuple[bool, str]:
        """Try whether MPI's windows, memory that other ranks can write to, work. All ranks call this together.

        Return True if they cannot be used; and a text on what is wrong with them, "" if nothing is. Both are the same
        on all ranks.
        """
        mpi, world, wrong = self._mpi, self._communicator, 0
        try:
            window = mpi.Win.Allocate(8, 1, comm=world)
        except mpi.Exception:
            wrong = 4
        else:
            wrong = _tried_in(window, mpi, world)
            window.Free()
        ranks = world.Split_type(mpi.COMM_TYPE_SHARED).Get_size()
        if SHARED_MEMORY.exists() and shutil.disk_usage(SHARED_MEMORY).free < ranks * SHARED_BYTES:
            wrong = max(wrong, 3)
        worst = np.array([wrong])
        world.Allreduce(mpi.IN_PLACE, worst, mpi.MAX)
        return worst[0] > 1, DRAWBACKS[worst[0]]

    def _release(self) -> None:
        """Free windows and communicators when all ranks are done with them. After a fault windows are left until the
        process ends, and if a rank does not come within FREE_S, communicators too."""
        with contextlib.suppress(PeerLost, UserError):
            self.health.check()
            met, late = self._communicator.Ibarrier(), time.monotonic() + FREE_S
            while not met.Test():
                if time.monotonic() > late:
                    return
                time.sleep(1e-3)
            for group in self._groups:
                group.window.Unlock_all()
                group.window.Free()
        super()._release()


def _tried_in(window: Any, mpi: Any, world: Any) -> int:
    """Try if a put by one-sided MPI arrives while its receiver makes no MPI call. Return an index in DRAWBACKS.

    Args:
        window: a window (memory that other ranks can write to) of 8 bytes.
        mpi: mpi4py's module.
        world: the communicator of all ranks, which call this together.
    """
    came = np.frombuffer(window.tomemory(), dtype=np.int64)
    came[0] = 0
    window.Lock_all(mpi.MODE_NOCHECK)
    window.Sync()
    world.Barrier()
    window.Put(np.ones(1, np.int64), (world.Get_rank() + 1) % world.Get_size())
    late = time.monotonic() + TRIAL_S
    while not came[0] and time.monotonic() < late:
        time.sleep(1e-3)
    in_time = bool(came[0])
    unified = window.Get_attr(mpi.WIN_MODEL) == mpi.WIN_UNIFIED
    window.Unlock_all()
    world.Barrier()
    return 2 if not unified else 0 if in_time else 1
