"""Messages through host memory: which stream waits for what."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from cocodiff.comm import host
from cocodiff.comm.host import HostPending, Staged

CPU, XPU = torch.device("cpu"), torch.device("xpu", 0)


class JobResult:
    """A transfer that needs no waiting."""

    def wait(self) -> None:
        return


class Streams:
    """A device's module: streams note what they wait for, and copies and other work that is queued on them."""

    def __init__(self) -> None:
        self.log: list[tuple[str, str, str]] = []
        self._of = threading.local()
        outer = self

        class Event:
            def record(self, stream: str) -> None:
                self.at = stream

            def synchronize(self) -> None:
                outer.log.append(("host", "waits for", self.at))

        self.Event = Event

    def current_stream(self, _: Any = None) -> Any:
        name, log = getattr(self._of, "name", "posting"), self.log

        class Stream(str):
            def wait_event(self, event: Any) -> None:
                log.append((name, "waits for", event.at))

        return Stream(name)

    def use(self, name: str) -> None:
        self._of.name = name


def test_streams_are_ordered_by_events_and_the_host_waits_for_its_copies_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    streams, received = Streams(), torch.zeros(4)
    monkeypatch.setattr(torch, "get_device_module", lambda *_: streams)

    def use(x: torch.Tensor) -> torch.Tensor:
        streams.log.append((streams.current_stream(), "uses", "it"))
        return x

    monkeypatch.setattr(host, "used_on_current_stream", use)
    staged = Staged([(received, 1)], CPU)
    staged.on_host[0][0].copy_(torch.arange(4.0).view(torch.uint8))
    pending = HostPending(XPU, None, (staged, [JobResult()]))
    assert received.tolist() == [0, 0, 0, 0]
    streams.use("waiting")
    pending.wait()
    assert received.tolist() == [0, 1, 2, 3]
    assert streams.log == [("waiting", "waits for", "posting"), ("waiting", "uses", "it")]
    streams.use("another")
    pending.wait()  # behind the copy that the first one has made
    assert streams.log[2:] == [("another", "waits for", "waiting"), ("another", "uses", "it")]


def test_what_is_sent_leaves_when_its_copies_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = Streams()
    monkeypatch.setattr(torch, "get_device_module", lambda *_: streams)

    class Carrier:
        ranks, index = (0, 1), 0

        def send_recv(self, sends: list[Any], recvs: list[Any]) -> JobResult:
            streams.log.append(("host", "sends", f"{sum(len(x) for x, _ in sends)} bytes"))
            return JobResult()

    monkeypatch.setattr(host, "host_memory", lambda size, _: torch.empty(size, dtype=torch.uint8))
    group = host.HostGroup(Carrier(), XPU)  # type: ignore[arg-type]
    group.send_recv([(torch.ones(3), 1), (torch.ones(0), 1), (torch.ones(5).half(), 1)], [])
    assert streams.log == [("host", "waits for", "posting"), ("host", "sends", "22 bytes")]


def test_memory_is_the_hosts_whatever_the_callers_default_device():
    with torch.device("meta"):
        assert host.host_memory(10, CPU).device.type == "cpu"
