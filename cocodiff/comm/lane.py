"""Lanes: background threads that pack and send in order, each on a stream of its own, and what passes to them and back.

Packing and communication are submitted to a lane as one job, so both stay off the critical path. All ranks submit to a
lane in program order; they need no other agreement. Some device libraries need one order for all messages of a process.
Then all lanes share one thread (`LaneOwner.one_thread`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextvars import copy_context
from functools import partial
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

import torch

from cocodiff.comm.health import Health
from cocodiff.kernels.device import used_on_current_stream

T = TypeVar("T")
CHECK_S = 0.25  # seconds between two checks of a blocked wait for lost peers


class StreamMark:
    """A point in the current stream of a device, at the time when it is created.

    On a CPU work is done when its call returns, so torch's stand-in for an event marks nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self._module, self._device = torch.get_device_module(device), device
        self._event = self._module.Event()
        self._event.record(self._module.current_stream(device))

    def wait(self) -> None:
        """Make the caller's current stream wait until the marked stream has reached this point; the host does not
        block."""
        self._event.wait(self._module.current_stream(self._device))

    def wait_on_host(self) -> None:
        """Block the calling thread until the marked stream has reached this point."""
        self._event.synchronize()


class HandedOver(Generic[T]):
    """A value on its way to another stream, from the stream that is current when this is created.

    Every tensor that one thread produces and another one uses is passed in this way. So the order of streams and the
    lifetime of memory are handled in one place. On a CPU work is done when its call returns, and nothing needs an
    order.

    Args:
        value: anything that `used_on_current_stream` takes.
        device: the device of the value's tensors.
    """

    def __init__(self, value: T, device: torch.device) -> None:
        self._value, self._made = value, None if device.type == "cpu" else StreamMark(device)

    def take(self) -> T:
        """Return the value for use on the caller's current stream, which waits for the stream that made it; the host
        does not block.

        The value's memory is kept until this stream is done with it, even if it is freed before.
        """
        if self._made is not None:
            self._made.wait()
            used_on_current_stream(self._value)
        return self._value


class LaneFuture(Generic[T]):
    """The result of a job that was submitted to a `Lane`, a background thread, and may not have ended yet."""

    def __init__(self, future: Future[HandedOver[T]], health: Health) -> None:
        self._future, self._health = future, health

    def wait(self) -> T:
        """Wait for the job and return its result. Raise what the job raised, or PeerLost if a rank was lost."""
        while not self._future.done():
            try:
                self._future.exception(CHECK_S)
            except FutureTimeout:  # the job's own error is returned by `exception`, and raised below
                self._health.still_waiting()
        with self._health.blaming():
            handed = self._future.result()
        return handed.take()


class Worker:
    """A thread that runs jobs one after the other. As a daemon it never keeps a process alive."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()  # None: end the thread
        self._thread = threading.Thread(target=self._work, name=f"lane-{name}", daemon=True)
        self._thread.start()

    def run(self, job: Callable[[], None]) -> None:
        """Run a job on the thread after all earlier ones, without waiting for it.

        If a job on this thread calls this, the new job is run at once.

        Args:
            job: function without arguments.
        """
        if threading.current_thread() is self._thread:
            job()
        else:
            self._jobs.put(job)

    def close(self) -> None:
        """End the thread after the jobs that were given to it so far."""
        self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # frees its arguments while the thread waits


class Lane:
    """A background thread that runs jobs in order, such as packing and sending.

    On accelerators it has a stream of its own. Tensors pass between the caller's stream and the lane's only as a job's
    arguments and its result, where `used_on_current_stream` finds them.
    """

    def __init__(self, name: str, device: torch.device, health: Health, worker: Worker | None = None) -> None:
        """Start the lane.

        Args:
            health: the watch over lost ranks, which ends waits for a job.
            worker: the thread that runs the jobs; by default a new one.
        """
        self.name, self.worker = name, worker or Worker(name)
        self._device, self._health, self._open = device, health, True
        self._stream = None if device.type == "cpu" else torch.get_device_module(device).Stream(device=device)

    def submit(self, work: Callable[..., T], *given: Any) -> LaneFuture[T]:
        """Run `work(*given)` after all earlier jobs of this lane, and after what is on the caller's stream now. Return
        its future."""
        if not self._open:
            raise RuntimeError(f"lane {self.name} is closed, and its transport with it: nobody would run this job")
        future: Future[Any] = Future()
        inference = torch.is_inference_mode_enabled()  # this mode belongs to the thread
        handed = HandedOver(given, self._device)

        def run() -> None:
            try:
                module = torch.get_device_module(self._device)
                module.set_device(self._device)
                # Tensors made in inference mode can be changed in place only in that mode, on any thread. Leaving the
                # mode turns gradients on, so they are turned off inside.
                with module.stream(self._stream), torch.inference_mode(inference), torch.no_grad():
                    future.set_result(HandedOver(work(*handed.take()), self._device))
            except BaseException as error:
                future.set_exception(error)

        self.worker.run(partial(copy_context().run, run))
        return LaneFuture(future, self._health)

    def close(self) -> None:
        """End the lane after the jobs that were submitted so far, without waiting for them."""
        self._open = False
        self.worker.close()
