"""What a lane's result is to the one who waits, when the wait's own clock and the job's end meet."""

from concurrent.futures import Future

import pytest
import torch

from cocodiff.comm.health import Alone
from cocodiff.comm.loopback import LoopbackTransport, LoopbackWorld
from cocodiff.comm.transport import LanePending
from cocodiff.device import StreamMark

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
    ended = DoneTooLate(lambda future: future.set_result((5, StreamMark(CPU))))
    assert LanePending(ended, Alone()).wait() == 5


def test_a_job_that_itself_times_out_says_so():
    late = TimeoutError("no answer from the store")
    with pytest.raises(TimeoutError, match="no answer from the store"):
        LanePending(DoneTooLate(lambda future: future.set_exception(late)), Alone()).wait()


def test_a_closed_lane_refuses_jobs_that_nobody_would_run():
    transport = LoopbackTransport(LoopbackWorld(1), 0)
    transport.close()
    transport.close()  # leaving twice is leaving
    assert transport.closed
    with pytest.raises(RuntimeError, match="lane control is closed"):
        transport.blocking(lambda: None)
