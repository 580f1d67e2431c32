"""Lanes: what a job's result is to the one who waits for it, and in which order jobs run."""

import threading
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch

from cocodiff.comm.health import Health
from cocodiff.comm.lane import CHECK_S, HandedOver, Lane, LaneFuture
from cocodiff.comm.loopback import LoopbackTransport, LoopbackWorld

CPU = torch.device("cpu")


def test_a_job_that_takes_longer_than_between_two_looks_at_the_watch_has_its_result():
    late = Future()
    threading.Timer(2 * CHECK_S, late.set_result, [HandedOver(5, CPU)]).start()
    assert LaneFuture(late, Health()).wait() == 5


def test_a_job_that_itself_times_out_says_so():
    late = Future()
    threading.Timer(2 * CHECK_S, late.set_exception, [TimeoutError("no answer from the store")]).start()
    with pytest.raises(TimeoutError, match="no answer from the store"):
        LaneFuture(late, Health()).wait()


def test_a_closed_lane_refuses_jobs_that_nobody_would_run():
    transport = LoopbackTransport(LoopbackWorld(1), 0)
    transport.close()
    transport.close()  # leaving twice is leaving
    assert transport.closed
    with pytest.raises(RuntimeError, match="lane control is closed"):
        transport.blocking(lambda: None)


SOON_S = 20.0  # a test that waits longer for a thread has failed


@pytest.fixture
def lane():
    lane = Lane("test", CPU, Health())
    yield lane
    lane.close()


def test_a_job_runs_in_its_submitters_mode(lane):
    def modes():
        return torch.is_inference_mode_enabled(), torch.is_grad_enabled()

    with torch.inference_mode():
        submitted_in_it = lane.submit(modes)
    submitted_outside = lane.submit(modes)
    with torch.inference_mode():
        assert submitted_outside.wait() == (False, False)
    assert submitted_in_it.wait() == (True, False)


def test_a_jobs_error_reaches_who_waits_and_the_lane_goes_on(lane):
    """In the background: this thread has not waited for what it has not asked for."""
    go, main = threading.Event(), threading.get_ident()
    failed, here = lane.submit(lambda: {}["a job's own error"]), lane.submit(threading.get_ident)
    last = lane.submit(go.wait, SOON_S)
    with pytest.raises(KeyError, match="a job's own error"):
        failed.wait()
    assert here.wait() == here.wait() != main
    go.set()
    assert last.wait()


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
                pending = lane.submit(lambda name=name: job(name))
            assert pending.wait() == name

    with ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(submit_and_wait, thread) for thread in range(4)]:
            done.result(SOON_S)
    assert ran == submitted and len(ran) == 600
