"""What an exchange delivers: the very bits of slicing one global tensor, whatever the route."""

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from byte_formulas import Formulas
from worlds import back, forward, topology_of

from cocodiff.comm.loopback import LoopbackGroup, LoopbackTransport, run_ranks
from cocodiff.comm.trace import Trace
from cocodiff.comm.transport import RankContext
from cocodiff.config.errors import UserError
from cocodiff.exchange.exchange import Exchange
from cocodiff.exchange.outgoing import Encoded, EncodedCall, Outgoing
from cocodiff.exchange.transfer import Transfer
from cocodiff.kernels import Kernels
from cocodiff.models.adapter import image_and_text
from cocodiff.topology.layout import Layout, slices
from cocodiff.topology.routes.chunks import Chunking


@pytest.mark.parametrize(
    ("ahead", "launches"), [(False, ["pack", "unpack", "unpack"]), (True, ["pack"] * 3 + ["unpack"] * 4)]
)
def test_a_device_moves_a_phase_in_one_launch(ahead, launches, monkeypatch):
    """Where receives are posted ahead each message leaves as soon as it is packed and is put in place as it comes; else
    all go together. The own block is put in place meanwhile."""
    monkeypatch.setattr(LoopbackGroup, "receives_ahead", ahead)
    topology = topology_of("local", 4)
    layout = Layout.build(topology, image_and_text(10, 3), 6)
    whole_BSHD = torch.randn(1, 13, 6, 2)

    def work(transport: LoopbackTransport) -> list[str]:
        packs: list[str] = []
        kernels = Kernels("torch", lambda op, _: packs.append(op))
        ours = Exchange("flat", RankContext(transport, topology, Trace(transport.rank), kernels))
        (x_BSGD,) = forward(ours, [whole_BSHD[:, layout.row_slices[transport.rank]]], layout).wait()
        assert torch.equal(x_BSGD, whole_BSHD[:, :, slices(layout.heads)[transport.rank]])
        return packs

    assert all(sorted(moves) == launches for moves in run_ranks(topology.size, work, timeout_s=60.0))


def test_auto_takes_what_its_table_has_for_the_size():
    """By the mean rank's bytes: the same on ranks with unequal shares, and for q, k and v together three times one."""
    topology, seen = topology_of("local", 5), []
    layout = Layout.build(topology, image_and_text(23, 4), 11)
    table = ((27 * 11 * 2 * 4 / 5 / 1e6, "tapa"), (float("inf"), "split"))
    whole_BSHD = torch.randn(1, 27, 11, 2)

    def work(transport: LoopbackTransport) -> None:
        trace = Trace(transport.rank)
        ours = Exchange("auto", RankContext(transport, topology, trace, Kernels()), table)
        rows = layout.row_slices[transport.rank]
        for tensors in (1, 3):
            trace.clear()
            received = forward(ours, [whole_BSHD[:, rows]] * tensors, layout).wait()
            assert all(torch.equal(x, whole_BSHD[:, :, slices(layout.heads)[transport.rank]]) for x in received)
            seen.append((tensors, transport.rank, trace.bytes()))
            assert torch.equal(back(ours, received[0], layout), whole_BSHD[:, rows])

    run_ranks(topology.size, work, timeout_s=60.0)
    formulas = Formulas(topology, layout)
    for tensors, rank, counted in seen:
        assert counted == formulas.sent("tapa" if tensors == 1 else "split", "forward", rank, 8 * tensors)


def test_messages_in_stages_are_no_all_to_alls():
    """Which these ranks have not, and would say so."""
    topology, chunked = topology_of("local", 4), Chunking(2, 0.0)
    more = topology, Trace(), Kernels()
    run_ranks(4, lambda t: Exchange("flat", RankContext(t, *more), chunking=chunked, together=True))


def test_what_is_encoded_ahead_of_its_lane_keeps_its_code_alone():
    class Halved(EncodedCall):
        def encode(self, tensors, rows, ranks):
            return Encoded([x.half() for x in tensors.values()], self.layout)

    topology = topology_of("local", 2)
    alone: Any = SimpleNamespace(rank=0)
    here, layout = RankContext(alone, topology, Trace(), Kernels()), Layout.build(topology, image_and_text(4, 0), 2)
    ahead = Outgoing(Halved(here, layout), {"v": torch.zeros(1, 2, 2, 4)})
    ahead.encode_now()
    assert [x.dtype for x in ahead.contained_tensors()] == [torch.float16]


@pytest.mark.parametrize("error", [UserError("which all ranks have"), RuntimeError("lost")])
def test_jobs_go_on_after_a_users_mistake_alone(error):
    class Mistaken(Transfer):
        def encode(self, tensors, rows, ranks):
            raise error

    topology, whole_BSHD = topology_of("local", 2), torch.randn(1, 6, 2, 4)
    layout = Layout.build(topology, image_and_text(6, 0), 2)

    def work(transport: LoopbackTransport) -> bool:
        ours = Exchange("flat", RankContext(transport, topology, Trace(), Kernels()))
        own = whole_BSHD[:, layout.row_slices[transport.rank]]
        with pytest.raises(type(error)):
            Mistaken(ours, layout).send(q=own)["q"].wait()
        with contextlib.suppress(RuntimeError):
            forward(ours, [own], layout).wait()
            return True
        return False

    assert run_ranks(2, work, timeout_s=60.0) == [isinstance(error, UserError)] * 2
