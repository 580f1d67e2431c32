"""Every message that an attention call has posted is waited for: a send that nobody waits for changes no number here,
but on a device its memory may be written over while it leaves."""

from __future__ import annotations

from typing import Any

import pytest
from residual_worlds import RUN, Ranks, World

from cocodiff.comm.loopback import LoopbackGroup


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
