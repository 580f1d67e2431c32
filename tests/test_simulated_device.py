"""The simulated device itself: what it finds, and what it lets pass."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import numpy as np
import pytest
import tifffile
import torch
from cocodiff_bench.alltoall import check_results, exchange_variant, random_blocks
from warm import COCODIFF, forked
from worlds import topology_of

from cocodiff.cli.doctor.trials import READ_EARLY, SENT_EARLY
from cocodiff.cli.main import main
from cocodiff.comm.connect import place_rank
from cocodiff.comm.health import Health
from cocodiff.comm.lane import HandedOver, Lane
from cocodiff.comm.launch import Launch
from cocodiff.comm.trace import Trace
from cocodiff.config.config import Config
from cocodiff.config.errors import OwnRankError
from cocodiff.kernels.device import free_memory, kept_for_all_streams, used_on_current_stream
from cocodiff.kernels.dispatch import OPS


@pytest.fixture
def sim(simulated: Any) -> Any:
    return simulated


def on_another_stream(sim: Any, device: torch.device, forgotten: str = "") -> torch.Tensor:
    """What another stream computes from a tensor whose memory is used again meanwhile: 3, if all is in order. What is
    forgotten shows, for the stream that it lets be overtaken is held back."""
    module, may_go_on = torch.get_device_module(device), threading.Event()
    first, second, made = module.current_stream(device), module.Stream(device), module.Event()
    held_back = {"wait": first, "record": second}.get(forgotten)
    if held_back is not None:
        sim.launch(held_back, "hold back", [], [], may_go_on.wait)
    x = torch.full((1000,), 2.0, device=device)
    made.record(first)
    with module.stream(second):
        if forgotten != "wait":
            second.wait_event(made)
        y = x + 1
    if forgotten != "record":
        x.record_stream(second)
    else:
        del x
        torch.zeros(1000, device=device)
    if held_back is not None:
        (second if held_back is first else first).synchronize()
        may_go_on.set()
    second.synchronize()
    return y.cpu()


@pytest.mark.parametrize(
    ("forgotten", "said"),
    [
        ("", None),
        ("wait", "no event orders two accesses"),
        ("record", "memory is used again that another stream was not recorded"),
    ],
)
def test_what_was_forgotten_is_reported_and_gives_other_values(sim, forgotten, said):
    """What is in order gives the CPU's values and no report."""
    with sim.devices(1, delayed=0.0 if forgotten else 0.5, lines="tests") as found:
        values = on_another_stream(sim, found[0], forgotten)
    assert torch.equal(values, torch.full((1000,), 3.0)) is not bool(forgotten)
    assert (
        any(said in one and "test_simulated_device.py:" in one for one in found.reports) if said else not found.reports
    )


def test_a_kept_value_is_whole_on_every_stream_and_outlives_its_last_reader(sim):
    """Made on a stream that is slow, read on another one, and dropped while that one is held back."""
    with sim.devices(1, delayed=0.5, lines="tests") as found:
        (device,) = found
        module, may_go_on = torch.get_device_module(device), threading.Event()
        tables = kept_for_all_streams(lambda value, device: torch.full((1000,), float(value), device=device), 1)
        maker, reader = module.Stream(device), module.Stream(device)
        with module.stream(maker):
            tables(2, device)
        with module.stream(reader):
            sim.launch(reader, "hold back", [], [], may_go_on.wait)
            read = tables(2, device) + 1
        with module.stream(maker):
            tables(5, device)
            torch.zeros(1000, device=device)
        may_go_on.set()
        reader.synchronize()
        assert torch.equal(read.cpu(), torch.full((1000,), 3.0))
    assert found.reports == []


def test_forked_ranks_that_outnumber_devices_share_them_and_a_launchers_ranks_only_where_they_are_told(sim):
    with sim.devices(2) as found:
        for rank in range(4):
            assert place_rank(Launch("forked", rank, 4, rank, 4), "auto", "auto") == (found[rank % 2], "host")
        held = torch.get_device_module(found[0]).memory_allocated(found[0])  # by this process alone
        of_ranks = {ranks: (free_memory(found[0], ranks) or 0) + held for ranks in (1, 3, 4)}
        assert of_ranks[4] == of_ranks[3] == of_ranks[1] // 2
        assert place_rank(Launch("forked", 1, 2, 1, 2), "auto", "auto") == (found[1], "auto")
        assert place_rank(Launch("torchrun", 3, 4, 3, 4), "auto", "host") == (found[1], "host")
        assert place_rank(Launch("mpi", 3, 4, 3, 4), "auto", "mpi-rma") == (found[1], "mpi-rma")
        with pytest.raises(OwnRankError, match="local rank 2 has no sim device: 2 found"):
            place_rank(Launch("torchrun", 2, 4, 2, 4), "auto", "auto")


# What lanes hand over -------------------------------------------------------------------------------------------------


def test_a_lanes_arguments_and_results_are_ordered_and_kept(sim):
    """Arguments are freed before the job runs and its result as soon as it was used, and their memory is used again."""
    with sim.devices(1, strict=True, delayed=0.5, lines="tests") as found:
        lane = Lane("test", found[0], Health())
        for number in range(20):
            pending = lane.submit(lambda x: {"twice": [x * 2]}, torch.full((100,), float(number), device=found[0]))
            torch.full((100,), -1.0, device=found[0])
            result = pending.wait()["twice"][0] + 1
            del pending
            assert result.cpu().eq(2 * number + 1).all()
        lane.close()
    assert found.reports == []


def test_what_does_not_tell_its_tensors_is_not_handed_over(sim):
    class Forgetful:
        x = torch.ones(1)

    with sim.devices(1) as found:
        handed = HandedOver([1, "a", None, Forgetful()], found[0])
        with pytest.raises(TypeError, match="a Forgetful passes to another stream and does not tell what tensors"):
            handed.take()
    assert used_on_current_stream([1, "a", None, {"b": torch.ones(1)}])


# A library that blocks ------------------------------------------------------------------------------------------------


def in_two_groups(transport: Any) -> list[float]:
    """What a rank of four gets from a sibling and along a plane, over two lanes; half of the ranks come late to the
    first message, as those do that have more to encode, the others to the second."""
    rank, device = transport.rank, transport.device
    pairs = {"sibling": rank ^ 1, "plane": rank ^ 2}
    groups = {lane: transport.group(sorted((rank, peer))) for lane, peer in pairs.items()}

    def exchange(lane: str, into: torch.Tensor) -> torch.Tensor:
        time.sleep(1.0 if (lane == "sibling") == (rank in (1, 2)) else 0.0)
        peer, own = groups[lane].ranks.index(pairs[lane]), torch.full((4,), float(rank), device=device)
        groups[lane].send_recv([(own, peer)], [(into, peer)]).wait()
        return into

    pending = [transport.lane(lane).submit(exchange, lane, torch.empty(4, device=device)) for lane in pairs]
    return [float(one.wait().cpu()[0]) for one in pending]


def test_lanes_of_one_thread_post_in_one_order_and_those_of_threads_of_their_own_never_end(sim):
    """Four ranks on two cards: each waits for the next one in a circle, where a late rank posts its second batch first,
    which the library lets nothing overtake."""
    from simulated_device.ranks import SimulatedTransport, run_ranks

    class Threads(SimulatedTransport):
        one_thread, timeout_s = False, 3.0

    with sim.devices(4) as found:
        assert run_ranks(4, in_two_groups) == [[float(rank ^ 1), float(rank ^ 2)] for rank in range(4)]
    assert found.reports == []
    before = {*threading.enumerate()}
    # Raised by a rank's wait, or when the devices go, which look for operations that failed.
    with pytest.raises(Exception, match=r"posts a receive: rank . sent nothing for 3 s"), sim.devices(4):
        run_ranks(4, in_two_groups, Threads)
    for left in {*threading.enumerate()} - before:  # what fails in them later would fail another test
        left.join(20)
    assert {*threading.enumerate()} <= before
    with sim.devices(4):  # which waits for their operations
        pass


def test_messages_one_way_alone_have_a_byte_the_other_way(sim):
    from simulated_device.ranks import run_ranks

    def work(transport: Any) -> list[float]:
        group, x = transport.group(range(3)), torch.full((2,), float(transport.rank), device=transport.device)
        to_the_next = [(x, 1)] if transport.rank == 0 else []
        from_the_last = [(x, 0)] if transport.rank == 1 else []
        group.send_recv(to_the_next, from_the_last).wait()
        return transport.broadcast_value(transport.gather_values(x.cpu().tolist()))

    with sim.devices(3) as found:
        assert run_ranks(3, work) == [[[0.0, 0.0], [0.0, 0.0], [2.0, 2.0]]] * 3
    assert found.reports == []


@pytest.mark.parametrize(("machine", "ranks", "of_node"), [("aurora", 12, 12), ("local", 8, 4)])
def test_tapa_is_an_all_to_all_of_each_card_and_one_of_each_plane(sim, machine, ranks, of_node):
    """On several nodes a plane's is one on each node, and one of all nodes with a byte in the place of what has come on
    the node."""
    from simulated_device.ranks import SimulatedTransport, run_ranks

    topology = topology_of(machine, ranks, of_node)
    node_of = [place.node for place in topology.places]
    config = Config(exchange="tapa", messages="alltoall", machine=machine, kernels="torch")

    class OnNodes(SimulatedTransport):
        pass

    def work(transport: Any) -> list[tuple[tuple[int, ...], list[int]]]:
        tapa = exchange_variant(config, topology, transport, Trace(transport.rank))
        blocks = random_blocks(ranks * 1024 / 1e6, transport)
        check_results(blocks, {"tapa": lambda: tapa(blocks)}, transport.rank)
        assert tapa(blocks).device == transport.device
        return transport.process.together[: len(transport.process.together) // 2]

    OnNodes.node_of = node_of
    with sim.devices(ranks) as found:
        of_ranks = run_ranks(ranks, work, OnNodes)
    assert found.reports == []
    for place, calls in zip(topology.places, of_ranks, strict=True):
        card, plane = topology.cards[place.card], topology.planes[place.plane]
        on_node = tuple(rank for rank in plane if node_of[rank] == place.node)
        swapped, across = 1024 * ranks // 2, 2 * 1024  # half of all heads, two tiles' tokens
        expected = [
            (card, [1 if rank == place.rank else swapped for rank in card]),
            (on_node, [1 if rank == place.rank else across for rank in on_node]),
            (plane, [1 if rank in on_node else across for rank in plane]),
        ]
        assert calls == expected[: 1 + topology.nodes]


# The command line -----------------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_command_line_restores_the_cpus_voxels(simulated, tmp_path, ranks):
    """`--device auto` takes the device, and all of the embedded pipeline runs there. Forked ranks that outnumber
    devices share them, which rank 0 says."""
    tifffile.imwrite(tmp_path / "scan.tif", np.random.default_rng(0).random((64, 64), np.float32))
    restored = {}
    for device, module in (("cpu", COCODIFF), ("auto", "simulated_device.command")):
        out = tmp_path / device
        words = ("--input", tmp_path / "scan.tif", "--steps", 2, "--ranks", ranks, "--device", device)
        done = forked("inpaint", *words, "--dtype", "fp32", "--out", out, "--quiet", folder=tmp_path, module=module)
        assert done.returncode == 0, done.stderr
        restored[device] = tifffile.imread(out / "images" / "scan_block_tapa.tif")
    assert np.array_equal(restored["cpu"], restored["auto"])
    shared = "up to 2 ranks share a sim device: messages pass through the host's memory"
    assert done.stderr.count(shared) == ranks - 1


def test_ranks_are_not_forked_from_a_process_that_uses_a_device(sim, tmp_path, capsys):
    words = ["doctor", "--ranks", "2", "--kernels", "torch", "--out", str(tmp_path / "d")]
    with sim.devices(1) as found:
        x = torch.ones(3, device=found[0])
        assert main(words) == 2
        del x
    assert "--ranks 2: this process uses sim already" in capsys.readouterr().err


def doctor(tmp_path: Any, module: str) -> tuple[Any, dict[str, list[tuple[str, str]]], dict[str, Any]]:
    """Of two ranks that share a device: how it ended, its findings by check, and doctor.json."""
    words = ("--ranks", 2, "--kernels", "torch", "--out", tmp_path / "d")
    done = forked("doctor", *words, folder=tmp_path, module=module)
    document = json.loads((tmp_path / "d" / "doctor.json").read_text())
    found: dict[str, list[tuple[str, str]]] = {}
    for one in document["findings"]:
        found.setdefault(one["check"], []).append((one["severity"], one["text"]))
    return done, found, document["facts"]


@pytest.mark.full
def test_doctor_looks_at_kernels_streams_and_calls_of_a_device(simulated, tmp_path):
    """How much is hidden here depends on who else computes, so its exit code is not looked at."""
    done, found, facts = doctor(tmp_path, "simulated_device.command")
    assert "ranks 0-1 share tile 0" in found["tiles"][0][1] and "6 rounds right" in found["order"][0][1]
    judged = [severity for check in ("all-to-all", "order", "kernels", "memory") for severity, _ in found[check]]
    assert set(judged) == {"ok"}
    assert len(found["kernels"]) == len(OPS)
    equal = "equal in float32, bfloat16, float16", "equal in bfloat16, float16"  # the latter of the lossless codec
    assert all(text.endswith(equal) for _, text in found["kernels"])
    assert [text.split(":")[0] for _, text in found["host"]] == ["to the next rank", "all-to-all", "all-gather"]
    assert all("4 KiB returns after" in text and "; 16 MiB returns after" in text for _, text in found["host"])
    assert len(facts["issues"]) == 12 and facts["blocked_us"] > 0 and facts["ranks"][1]["device_name"] == "simulated"
    assert str(tmp_path / "d" / "doctor.json") in done.stdout and "no event orders" not in done.stderr


@pytest.mark.sample(1)
@pytest.mark.parametrize(("left_out", "said"), [("send", SENT_EARLY), ("wait", READ_EARLY)])
def test_doctor_says_which_order_of_messages_and_streams_is_broken(simulated, tmp_path, monkeypatch, left_out, said):
    """Where others compute too it may be rank 1 alone that comes upon it, which rank 0 tells."""
    monkeypatch.setenv("UNORDERED", left_out)
    done, found, facts = doctor(tmp_path, "simulated_device.unordered")
    told = facts["stopped"]
    assert told.removeprefix("rank 1 failed: ") == said and found["order"] == [("fault", told)]
    assert done.returncode == 1 and f"FAULT  order       {told}" in done.stdout and "Traceback" not in done.stderr
