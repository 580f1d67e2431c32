"""Checked messages: a wrong one ends the run on every rank, with one line that names both ranks."""

from __future__ import annotations

import copy
import re
from typing import Any
from unittest import mock

import pytest
import torch
from seams import group_of_part
from tiny_models import FAMILIES
from warm import forked
from wrong_messages import Faulty, spoil

from cocodiff.cli.doctor.trials import all_to_alls
from cocodiff.comm.checked import PIECE, CheckedGroup, check_messages, checksum
from cocodiff.comm.health import Health
from cocodiff.comm.host import HostTransport
from cocodiff.comm.loopback import LoopbackGroup, run_ranks
from cocodiff.config.errors import PeerLost
from cocodiff.engine.engine import parallelize

RANKS = 4


def send_to_next(group: Any) -> None:
    size = len(group.ranks)
    message = (torch.ones(9, dtype=torch.bfloat16), (group.index + 1) % size)
    group.send_recv([message], [(torch.empty_like(message[0]), group.index - 1 if group.index else size - 1)]).wait()


def all_gather(group: Any) -> None:
    group.all_gather(torch.ones(7, 3), [torch.empty(7, 3) for _ in group.ranks]).wait()


def all_to_all(group: Any) -> None:
    sends = [torch.ones(group.index + peer) for peer in range(len(group.ranks))]
    group.all_to_all(sends, [torch.empty_like(one) for one in sends]).wait()


@pytest.mark.parametrize(
    ("call", "bytes_and_form"),
    [
        (send_to_next, "18 bytes, bfloat16 [9]"),
        (all_gather, "84 bytes, float32 [7, 3]"),
        (all_to_all, "12 bytes, float32 [3]"),
    ],
)
@pytest.mark.parametrize("through_host", [False, True])
@pytest.mark.parametrize("fault", ["flipped", "lost"])
def test_a_wrong_message_is_an_error_on_every_rank(
    call: Any, bytes_and_form: str, through_host: bool, fault: str
) -> None:
    """One with a flipped bit, and one that takes the place of a lost one: the third from rank 1 to rank 2."""

    def work(transport: Any) -> str:
        over = HostTransport(transport, transport.device) if through_host else transport
        check_messages(over)
        group = over.group(range(RANKS))
        if transport.rank == 1:
            spoil(group, fault, 2, 3)
        with pytest.raises(PeerLost) as caught:
            for _ in range(20):
                over.lane("plane").submit(lambda: call(group)).wait()
        return str(caught.value)

    (said,) = {*run_ranks(RANKS, work, timeout_s=30.0)}
    values = rf" message 3 .* plane .* 4 ranks .*0 to 3, {re.escape(bytes_and_form)}; .*--transport$"
    assert re.match("rank 2 failed: received other bytes than rank 1 .*:" + values, said)


def test_a_part_names_ranks_of_the_whole_run() -> None:
    def work(transport: Any) -> str:
        check_messages(transport)
        part = transport.part((1, 3) if transport.rank % 2 else (0, 2))
        group = part.group([0, 1])
        if transport.rank % 2 == 0:
            return ""
        if transport.rank == 3:
            spoil(group_of_part(group), "flipped", 0, 1)
        with pytest.raises(PeerLost) as caught:
            for _ in range(200):
                part.control.submit(lambda: all_gather(group)).wait()
        return str(caught.value)

    said = run_ranks(RANKS, work, timeout_s=30.0)
    assert said[1] == said[3] and re.match("rank 1 failed: received other bytes than rank 3 .* message 1 ", said[1])


def test_every_bit_of_a_message_counts() -> None:
    """Also of a long one, which is summed piece by piece; and two pieces that have changed places."""
    piece, generator = PIECE["cpu"], torch.Generator().manual_seed(1)
    for length in (1, 7, 8, 25, 120, 2 * piece + 3):
        message = torch.randint(0, 255, (length,), dtype=torch.uint8, generator=generator)
        others = [torch.cat([message[piece : 2 * piece], message[:piece], message[2 * piece :]])] * (length > piece)
        for place in (0, piece, 2 * piece - 1, 2 * piece, 2 * piece + 2) if others else range(length):
            for bit in range(8):
                others.append(message.clone())
                others[-1][place] ^= 1 << bit
        sums = {int(checksum(message, 1)), int(checksum(message, 2)), *(int(checksum(one, 1)) for one in others)}
        assert len(sums) == 2 + len(others)


@pytest.mark.parametrize("ahead", [True, False])
def test_a_message_is_compared_once_and_awaited_until_it_is_here(ahead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits again later, as several users of a transfer do, finds a buffer that may have been written over."""
    monkeypatch.setattr(LoopbackGroup, "receives_ahead", ahead)

    def work(transport: Any) -> None:
        health, other, came = mock.Mock(wraps=Health()), 1 - transport.rank, torch.empty(5)
        group = CheckedGroup(transport.group([0, 1]), health)
        pending = group.send_recv([(torch.ones(5), other)], [(came, other)])
        pending.wait()
        noted = [call.args[0] for call in health.awaits.mock_calls]
        assert came.tolist() == [1] * 5 and (other,) in noted and noted[-1] == ()
        came.zero_()
        pending.wait()

    run_ranks(2, work, timeout_s=30.0)


def test_checks_change_no_bit_and_no_count() -> None:
    model, inputs = FAMILIES["sd3"][0](6), FAMILIES["sd3"][1](1, 4, 4, 3)

    def work(transport: Any) -> tuple[torch.Tensor, dict[str, int]]:
        own = copy.deepcopy(model)
        with parallelize(own, "cocodiff", transport=transport, steps=2) as engine:
            return own(**inputs).sample, engine.bytes()

    def checked(transport: Any) -> tuple[torch.Tensor, dict[str, int]]:
        check_messages(transport)
        return work(transport)

    for plain, same in zip(run_ranks(3, work), run_ranks(3, checked), strict=True):
        assert torch.equal(plain[0], same[0]) and plain[1] == same[1]


def test_doctor_checks_its_own_messages() -> None:
    """The second exchange of each trial has checksums: its wrong message is named, and the run lives."""

    def work(transport: Any) -> list[str]:
        group: Any = transport.group([0, 1])
        if transport.rank == 0:
            group = Faulty(group, "flipped", 1, 1, unchecked=1)
        return [word for trial in all_to_alls(transport, group) for word in trial.wrong]

    ((said,), _) = run_ranks(2, work, timeout_s=30.0)
    assert re.match("rank 1 failed: received other bytes than rank 0 .* message 1 ", said)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("flipped", "rank 2 failed: received other bytes than rank 1 .* message 4 "),
        ("lost", "rank 0 has gone on to broadcast_value: .* rank 1"),
    ],
)
def test_a_run_of_processes_ends_with_one_line(fault: str, said: str, tmp_path: Any) -> None:
    done = forked(fault, folder=tmp_path, module="wrong_messages")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert re.search(f"{said}.*; 2 of 2 other ranks noticed ", line)
