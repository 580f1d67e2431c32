"""Lanes: what a job's result is to the one who waits for it, and jobs that their waiter runs."""

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch

from cocodiff.comm.health import Health
from cocodiff.comm.loopback import LoopbackTransport, LoopbackWorld
from cocodiff.comm.transport import Lane, LanePending
from cocodiff.kernels.device import HandedOver

CPU = torch.device("cpu")


class DoneTooLate(Future):
    """Ends right after the first wait for it gave up."""

    def __init__(self, end):
        super().__init__()
        self._end = end

    def result(self, timeout=None):
        if not self.done():
            self._end(self)
            raise TimeoutError
        return super().result(timeout)


def test_a_job_that_ends_as_a_wait_gives_up_has_its_result():
    ended = DoneTooLate(lambda future: future.set_result(HandedOver(5, CPU)))
    assert LanePending(ended, Health()).wait() == 5


def test_a_job_that_itself_times_out_says_so():
    late = TimeoutError("no answer from the store")
    with pytest.raises(TimeoutError, match="no answer from the store"):
        LanePending(DoneTooLate(lambda future: future.set_exception(late)), Health()).wait()


def test_a_closed_lane_refuses_jobs_that_nobody_would_run():
    transport = LoopbackTransport(LoopbackWorld(1), 0)
    transport.close()
    transport.close()  # leaving twice is leaving
    assert transport.closed
    with pytest.raises(RuntimeError, match="lane control is closed"):
        transport.blocking(lambda: None)


# Jobs that are waited for at once, which the waiter runs --------------------------------------------------------------

SOON_S = 20.0  # a test that waits longer for a thread has failed


class Watched(Health):
    """Knows when a thread is blocked in a wait, and ends a wait that has no end."""

    def __init__(self):
        self.blocked = threading.Event()
        self._until = time.monotonic() + SOON_S

    def still_waiting(self):
        self.blocked.set()
        assert time.monotonic() < self._until, "nobody runs this job"


@pytest.fixture
def lane():
    lane = Lane("test", CPU, Watched())
    yield lane
    lane.close()


def held(started, go_on, value):
    """A job that says that it has started, and ends when it is told to."""

    def work():
        started.set()
        assert go_on.wait(SOON_S)
        return value, threading.current_thread().name

    return work


def here():
    return threading.current_thread()


def test_who_waits_at_once_runs_the_job_and_all_before_it(lane):
    ran = []
    waiting = [lane.submit_inline(lambda number=number: (ran.append(number), here())[1]) for number in range(4)]
    assert ran == []
    assert waiting[2].wait() is here() and ran == [0, 1, 2]
    assert waiting[0].wait() is here() and ran == [0, 1, 2]
    assert lane.submit(here).wait() is not here() and ran == [0, 1, 2, 3]
    assert waiting[3].wait() is not here() and ran == [0, 1, 2, 3]


def test_an_error_is_raised_to_the_one_who_waits_for_that_job(lane):
    failing = lane.submit_inline(lambda: 1 / 0)
    following = lane.submit_inline(lambda: 7)
    assert following.wait() == 7
    with pytest.raises(ZeroDivisionError):
        failing.wait()


def test_a_job_runs_in_its_submitters_mode_whoever_runs_it(lane):
    def modes():
        return torch.is_inference_mode_enabled(), torch.is_grad_enabled()

    with torch.inference_mode():
        submitted_in_it = lane.submit_inline(modes)
    submitted_outside = lane.submit_inline(modes)
    with torch.inference_mode():
        assert submitted_outside.wait() == (False, False)
    assert submitted_in_it.wait() == (True, False)


@pytest.mark.parametrize("first_runs_on", ["the waiter", "the lane"])
def test_two_threads_that_wait_at_once_have_their_jobs_one_after_the_other(lane, first_runs_on):
    """The second finds the lane at work: it waits like anyone, noticing lost peers, and its job follows the first."""
    started, go_on, second_ran = threading.Event(), threading.Event(), threading.Event()
    submit = lane.submit_inline if first_runs_on == "the waiter" else lane.submit
    with ThreadPoolExecutor(2, "waiter") as threads:
        try:
            first = threads.submit(submit(held(started, go_on, 1)).wait)
            assert started.wait(SOON_S)
            lane._health.blocked.clear()
            second = threads.submit(lane.submit_inline(lambda: second_ran.set() or 2).wait)
            assert lane._health.blocked.wait(SOON_S) and not second_ran.is_set()
        finally:
            go_on.set()
        value, thread = first.result(SOON_S)
        assert value == 1 and thread.startswith("waiter" if first_runs_on == "the waiter" else "lane-")
        assert second.result(SOON_S) == 2


def test_jobs_of_many_threads_run_once_in_order_and_never_two_at_a_time(lane):
    submitted, ran, at_once = [], [], threading.Lock()
    order = threading.Lock()

    def job(name):
        assert at_once.acquire(blocking=False), "two jobs at a time"
        ran.append(name)
        at_once.release()
        return name

    def submit_and_wait(thread):
        for number in range(150):
            name = (thread, number)
            with order:
                submitted.append(name)
                soon = (thread + number) % 3  # some leave their job to the lane's own thread
                pending = (lane.submit_inline if soon else lane.submit)(lambda name=name: job(name))
            assert pending.wait() == name

    with ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(submit_and_wait, thread) for thread in range(4)]:
            done.result(SOON_S)
    assert ran == submitted and len(ran) == 600
