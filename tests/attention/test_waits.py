"""Every message that an attention call has posted is waited for: a send that nobody waits for changes no number here,
but on a device its memory may be written over while it leaves."""

from __future__ import annotations

from typing import Any

import pytest
from residual_worlds import RUN, Ranks, World

from cocodiff.comm.loopback import LoopbackGroup
from cocodiff.exchange.messages import InFlight, Target


class Watched:
    """A transfer that notes who has waited for it."""

    def __init__(self, pending: Any, unwaited: set[Watched]) -> None:
        self._pending, self._unwaited = pending, unwaited
        unwaited.add(self)

    def wait(self) -> None:
        self._pending.wait()
        self._unwaited.discard(self)


ROUTES: dict[str, dict[str, Any]] = {
    "flat": {"exchange": "flat"},
    "tapa": {"exchange": "tapa"},
    "split": {"exchange": "split"},
    "chunks": {"exchange": "split", "chunks": 3},
    "chunks of tapa": {"exchange": "tapa", "chunks": 2, "order": "v_first"},
    "ring": {"exchange": "flat", "ring": 2},
    "ring and chunks": {"exchange": "split", "ring": 2, "chunks": 2},
}


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("name", ROUTES)
def test_no_message_is_left_when_a_call_ends(name: str, ahead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    world, post, unwaited = World(4, heads=6, image=24), LoopbackGroup.send_recv, set()

    def send_recv(group: LoopbackGroup, sends: Any, recvs: Any) -> Any:
        return Watched(post(group, sends, recvs), unwaited)

    monkeypatch.setattr(LoopbackGroup, "send_recv", send_recv)
    monkeypatch.setattr(LoopbackGroup, "receives_ahead", ahead)
    Ranks(world, **ROUTES[name]).attend([(call, world.tensors(call)) for call in RUN[:2]])
    assert not unwaited


def test_a_chunk_of_the_output_that_cannot_be_put_in_place_fails_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever it is: here the first of three on each rank."""
    world, land, seen = World(4, heads=6, image=24), InFlight.land, set[int]()
    whole = sum(world.layout(RUN[0]).rows)

    def fail_at_first(flight: InFlight, target: Target) -> None:
        (x_BLHW,) = target.tensors
        if x_BLHW.shape[1] < whole and id(x_BLHW) not in seen:
            seen.add(id(x_BLHW))
            raise RuntimeError("out of memory")
        land(flight, target)

    monkeypatch.setattr(InFlight, "land", fail_at_first)
    with pytest.raises(RuntimeError, match="out of memory"):
        Ranks(world, **ROUTES["chunks"]).attend([(RUN[0], world.tensors(RUN[0]))])
