"""What an exchange delivers: the very bits of slicing one global tensor, whatever the route."""

import contextlib

import pytest
import torch
from byte_formulas import Formulas
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import back, forward, topologies, topology_of

from cocodiff.comm.loopback import LoopbackGroup, LoopbackTransport, run_ranks
from cocodiff.comm.trace import Trace
from cocodiff.config.errors import UserError
from cocodiff.config.machine import Topology
from cocodiff.exchange.exchange import Exchange
from cocodiff.exchange.messages import InOrder
from cocodiff.exchange.outgoing import CallEnd, Encoded, EncodedCall, Outgoing
from cocodiff.kernels import Kernels
from cocodiff.models.adapter import image_and_text
from cocodiff.topology.layout import Layout
from cocodiff.topology.routes.chunks import Chunking, ExchangeTable


def check_exchange(
    exchange: str, topology: Topology, image: int, text: int, heads: int, tensors: int, dtype: torch.dtype, B: int = 2
) -> None:
    """Forward gives all rows of the own heads, back gives the own rows of all heads, of random global tensors: of those
    that travel together, and of one that is under way beside them. Tensors are views of larger ones."""
    layout = Layout.build(topology, image_and_text(image, text), heads)
    generator = torch.Generator().manual_seed(image * 100 + heads)
    shape = (B, heads, image + text, 2)
    wholes_BSHD = [torch.randn(shape, generator=generator).to(dtype).transpose(1, 2) for _ in range(tensors)]

    def work(transport: LoopbackTransport) -> None:
        rows, own_heads = layout.row_slices[transport.rank], layout.head_slices[transport.rank]
        ours = Exchange(exchange, topology, transport, Trace(transport.rank))
        under_way = [forward(ours, [x[:, rows] for x in some], layout) for some in (wholes_BSHD, wholes_BSHD[-1:])]
        received = [x_BSGD for arriving in under_way for x_BSGD in arriving.wait()]
        for whole, x_BSGD in zip([*wholes_BSHD, wholes_BSHD[-1]], received, strict=True):
            assert torch.equal(x_BSGD, whole[:, :, own_heads])
            out_BSGD = x_BSGD.transpose(1, 2).contiguous().transpose(1, 2)
            assert torch.equal(back(ours, out_BSGD, layout), whole[:, rows])

    run_ranks(topology.size, work, timeout_s=60.0)


@pytest.mark.parametrize("exchange", ["flat", "tapa", "split"])
@pytest.mark.parametrize("machine", ["aurora", "local-6x2"])
def test_two_nodes_in_bf16(machine, exchange):
    check_exchange(exchange, topology_of(machine, 24), 37, 5, 38, 3, torch.bfloat16)


@given(data=st.data(), exchange=st.sampled_from(("flat", "tapa", "split")), topology=topologies(largest=12))
@settings(max_examples=40, deadline=None)
def test_any_tokens_and_heads(data, exchange, topology):
    """ahead: device backends match the sends and receives of one call, and cannot post receives ahead."""
    if topology.size == 1:
        return  # nothing to exchange; see the engine's tests
    image = data.draw(st.integers(topology.size, 40), label="image tokens")
    text = data.draw(st.integers(0, 20), label="text tokens")
    heads = data.draw(st.integers(topology.size, 25), label="heads")
    dtype = data.draw(st.sampled_from((torch.float32, torch.bfloat16, torch.float16)), label="dtype")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LoopbackGroup, "receives_ahead", data.draw(st.booleans(), label="ahead"))
        tensors, B = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 2))
        check_exchange(exchange, topology, image, text, heads, tensors, dtype, B)


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
        ours = Exchange("flat", topology, transport, Trace(transport.rank), kernels=kernels)
        (x_BSGD,) = forward(ours, [whole_BSHD[:, layout.row_slices[transport.rank]]], layout).wait()
        assert torch.equal(x_BSGD, whole_BSHD[:, :, layout.head_slices[transport.rank]])
        return packs

    assert all(sorted(moves) == launches for moves in run_ranks(topology.size, work, timeout_s=60.0))


def test_auto_takes_what_its_table_has_for_the_size():
    """By the mean rank's bytes: the same on ranks with unequal shares, and for q, k and v together three times one."""
    topology, seen = topology_of("local", 5), []
    layout = Layout.build(topology, image_and_text(23, 4), 11)
    table = ExchangeTable(((27 * 11 * 2 * 4 / 5 / 1e6, "tapa"), (float("inf"), "split")))
    whole_BSHD = torch.randn(1, 27, 11, 2)

    def work(transport: LoopbackTransport) -> None:
        trace = Trace(transport.rank)
        ours = Exchange("auto", topology, transport, trace, table)
        rows = layout.row_slices[transport.rank]
        for tensors in (1, 3):
            trace.clear()
            received = forward(ours, [whole_BSHD[:, rows]] * tensors, layout).wait()
            assert all(torch.equal(x, whole_BSHD[:, :, layout.head_slices[transport.rank]]) for x in received)
            seen.append((tensors, transport.rank, trace.bytes()))
            assert torch.equal(back(ours, received[0], layout), whole_BSHD[:, rows])

    run_ranks(topology.size, work, timeout_s=60.0)
    formulas = Formulas(topology, layout)
    for tensors, rank, counted in seen:
        assert counted == formulas.sent("tapa" if tensors == 1 else "split", "forward", rank, 8 * tensors)


def test_messages_in_stages_are_no_all_to_alls():
    """Which these ranks have not, and would say so."""
    topology, chunked = topology_of("local", 4), Chunking(2, 0.0)
    run_ranks(4, lambda t: Exchange("flat", topology, t, Trace(), chunking=chunked, together=True))


def test_what_is_encoded_ahead_of_its_lane_keeps_its_code_alone():
    class Halved(EncodedCall):
        def encode(self, tensors, rows, ranks):
            return Encoded([x.half() for x in tensors.values()], self.layout)

    layout = Layout.build(topology_of("local", 2), image_and_text(4, 0), 2)
    ahead = Outgoing(CallEnd(0, Kernels(), Halved(layout), ""), {"v": torch.zeros(1, 2, 2, 4)})
    ahead.encode_now()
    assert [x.dtype for x in ahead.contained_tensors()] == [torch.float16]


@pytest.mark.parametrize("error", [UserError("which all ranks have"), RuntimeError("lost")])
def test_jobs_go_on_after_a_users_mistake_alone(error):
    in_order, ran = InOrder(), list[int]()
    for job in (lambda: (_ for _ in ()).throw(error), lambda: ran.append(1)):
        with contextlib.suppress(UserError, RuntimeError):
            in_order.run(job)
    assert ran == [1] * isinstance(error, UserError)
