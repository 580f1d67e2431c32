"""Messages through host memory: which stream waits for what."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cocodiff.comm import transport as transports
from cocodiff.comm.host import HostTransport, host_memory
from cocodiff.comm.loopback import run_ranks
from cocodiff.kernels.device import used_on_current_stream


def test_messages_leave_when_they_are_on_the_host_and_every_wait_orders_its_stream(
    simulated: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two ranks on one device, whose operations all start late: also the stream of who waits second, which tells the
    memory that it uses, as the first one does."""
    told = list[tuple[torch.Stream, int]]()

    def tell(used: Any) -> Any:
        stream = module.current_stream(found[0])
        told.extend((stream, x.data_ptr()) for x in (used if isinstance(used, list) else [used]))
        return used_on_current_stream(used)

    monkeypatch.setattr(transports, "used_on_current_stream", tell)
    with simulated.devices(1, strict=True, delayed=1.0) as found:
        module = torch.get_device_module(found[0])

        def work(carrier: Any) -> list[list[float]]:
            transport, other, doubled = HostTransport(carrier, found[0]), 1 - carrier.rank, []
            group, streams = transport.group([0, 1]), [module.Stream(found[0]) for _ in range(3)]
            with module.stream(streams[0]):
                sends = [torch.full((size,), float(size + carrier.rank), device=found[0]) + 1 for size in (3, 0, 5)]
                came = [torch.zeros_like(x) for x in sends]
                pending = group.send_recv([(x, other) for x in sends], [(x, other) for x in came])
            for stream in streams[1:]:
                with module.stream(stream):
                    pending.wait()
                    doubled.append(torch.cat(came) * 2)
                    assert all((stream, x.data_ptr()) in told for x in came if x.numel())
            del sends, came, pending
            module.synchronize(found[0])
            transport.close()
            return [x.cpu().tolist() for x in doubled]

        for rank, ours in enumerate(run_ranks(2, work)):
            assert ours == [[2.0 * (4 + 1 - rank)] * 3 + [2.0 * (6 + 1 - rank)] * 5] * 2
    assert found.reports == []


def test_memory_is_the_hosts_whatever_the_callers_default_device() -> None:
    with torch.device("meta"):
        assert host_memory(10, torch.device("cpu")).device.type == "cpu"
