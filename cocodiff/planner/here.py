"""What this host does in a second, measured: for the times of a run on it where its machine file tells no rates."""

from __future__ import annotations

import os
import socket
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from math import ceil

import torch

from cocodiff.attention.strategy import LazyQKV, Site
from cocodiff.comm.loopback import run_ranks
from cocodiff.comm.trace import Trace
from cocodiff.comm.transport import Transport
from cocodiff.config.config import Config
from cocodiff.config.machine import Device, Links, Topology
from cocodiff.engine.assemble import AttentionWork, build_strategy, mesh_of
from cocodiff.kernels import Kernels
from cocodiff.models.adapter import image_and_text
from cocodiff.planner.memory import Load, ModelShape
from cocodiff.planner.roofline import DTYPES
from cocodiff.topology.links import wires

TRIAL_S = 0.4  # of each of the trials, about
HANDLED_CALLS = 5
LAYER_FLOP = 2e10  # of the layer that is tried, at most
COPIED_BYTES, SENT_BYTES = 2**25, 2**22


def measured_here(topology: Topology, shape: ModelShape, load: Load, sharing: int) -> Topology:
    """The same ranks, all of this host and on its CPU, with the rates that were measured in their machine's place.

    sharing: ranks that share a sequence. Cores and memory are shared by all ranks: each has its part of them, and of
    what the host can send itself each link has an equal part. Links whose rates the machine file tells stay.
    """
    share, machine = rank_share(topology.size), topology.machine
    device = measure_device(share, shape, load, sharing)
    links = machine.links if machine.links != Links() else measure_links(topology, share)
    return replace(topology, machine=replace(machine, device=device, links=links))


def rank_share(ranks: int) -> float:
    """The part of the time that each of so many ranks has its threads' cores for itself."""
    return min(1.0, core_count() / (ranks * torch.get_num_threads()))


def core_count() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def measure_device(share: float, shape: ModelShape, load: Load, sharing: int) -> Device:
    """A rank of this CPU, as if it were a tile: arithmetic as fast as in a layer of the model of a rank's size."""
    layer, flop = trial_layer(shape, load, sharing)
    copy = torch.zeros(COPIED_BYTES, dtype=torch.uint8)
    onto, few = torch.empty_like(copy), torch.zeros(16)
    with torch.no_grad():
        rate = share * flop / seconds_of(layer)
        copied = share * 2 * COPIED_BYTES / seconds_of(lambda: onto.copy_(copy))
        launch_s = seconds_of(lambda: few + few) / share
    return Device(memory_gb_s=copied / 1e9, bf16_tflop_s=rate / 1e12, launch_us=launch_s * 1e6)


def trial_layer(shape: ModelShape, load: Load, sharing: int) -> tuple[Callable[[], object], float]:
    """A layer of the model as one of so many ranks has it, with fewer rows and heads where it is a large one, and its
    floating point operations, counted as in `roofline`."""
    W, D, dtype = shape.width, shape.head_dim, DTYPES[load.itemsize]
    hidden, gated = int(shape.mlp_ratio * W), 1 + shape.gated_mlp
    tokens = sum(segment.tokens for segment in load.segments)
    of_row, S = 2 * W * (4 * W + (1 + gated) * hidden), min(tokens, 1024)
    L = max(1, min(ceil(load.batch * tokens / sharing), int(LAYER_FLOP / of_row)))
    of_head = 4 * load.batch * S**2 * D
    G = max(1, min(shape.heads // sharing, int(LAYER_FLOP / of_head)))
    x_LW = torch.ones(L, W, dtype=dtype)
    square_WW, up, down = (torch.full(size, 1e-3, dtype=dtype) for size in ((W, W), (gated * hidden, W), (W, hidden)))
    q, k, v = (torch.ones(load.batch, G, S, D, dtype=dtype) for _ in range(3))

    def layer() -> object:
        normed_LW = torch.nn.functional.layer_norm(x_LW, (W,))
        projected = [torch.nn.functional.linear(normed_LW, square_WW) for _ in range(4)]
        torch.nn.functional.scaled_dot_product_attention(q, k, v)
        wide = torch.nn.functional.gelu(
            torch.nn.functional.linear(torch.stack(projected).sum(0), up)[:, :hidden], approximate="tanh"
        )
        return x_LW + torch.nn.functional.linear(wide, down)

    return layer, L * of_row + of_head * G


def handling_s(run: Topology, sharing: int, config: Config, shape: ModelShape) -> float:
    """Seconds that an attention call takes beside arithmetic and bytes, for what the engine does to cut, send and place
    on all ranks of this host: those that share a sequence are measured on tensors of a few rows, in this process, and
    all cores share the work of all. Of a lossy setting it is that of the exchange alone."""
    if sharing == 1:
        return 0.0
    topology, heads, head_dim = run.part(range(sharing)), shape.heads, shape.head_dim
    config = config.with_(selection="full", codec="none", arrival="now")
    mesh, segments = mesh_of(config, topology, AttentionWork(heads, head_dim)), image_and_text(2 * topology.size, 1)
    spent = [0.0, 0.0]

    def work(transport: Transport) -> None:
        group, slot = mesh.group_and_slot(transport.rank)
        strategy = build_strategy(config, mesh, transport, Trace(transport.rank), Kernels("torch"))
        x_BLHD = torch.ones(1, mesh.layouts(segments, heads)[group].rows[slot], heads, head_dim)
        qkv = LazyQKV(lambda: x_BLHD, lambda: x_BLHD, lambda: x_BLHD, segments, heads)
        for number in range(1 + HANDLED_CALLS):
            if number < 2 and transport.rank == 0:
                spent[number] = time.process_time()
            strategy.attend(qkv, Site("trial"))

    run_ranks(topology.size, work)
    of_call = (time.process_time() - spent[1]) / HANDLED_CALLS
    return of_call * run.size / sharing / min(core_count(), run.size)


def seconds_of(call: Callable[[], object]) -> float:
    """The median of as many calls as TRIAL_S has room for, after one that is not counted."""
    call()
    found: list[float] = []
    while sum(found) < TRIAL_S:
        started = time.perf_counter()
        call()
        found.append(time.perf_counter() - started)
    return statistics.median(found)


def measure_links(topology: Topology, share: float) -> Links:
    """Links of one host: a message is copied by both of its ends, so two cores carry one at a time."""
    rate, delay_s = over_loopback()
    of_link = rate * max(1, core_count() // 2) / max(1, 2 * len(wires(topology))) / 1e9
    delay_us = delay_s * 1e6 / share
    return Links(sibling_gb_s=of_link, plane_gb_s=of_link, latency_us=delay_us, message_us=delay_us)


def over_loopback() -> tuple[float, float]:
    """Bytes a second of large messages through this host's own network, and seconds of a small one's way."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    with near, far:
        for end in (near, far):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        echo = threading.Thread(target=_answer, args=(far,), daemon=True)
        echo.start()
        large, small = bytes(SENT_BYTES), bytes(1)

        def send(message: bytes) -> None:
            near.sendall(len(message).to_bytes(8, "little") + message)
            near.recv(1)

        whole_s, delay_s = seconds_of(lambda: send(large)), seconds_of(lambda: send(small)) / 2
        near.shutdown(socket.SHUT_WR)
        echo.join()
    return SENT_BYTES / max(whole_s - delay_s, 1e-9), delay_s


def _answer(end: socket.socket) -> None:
    """A byte for every message, until the other end closes."""
    room = bytearray(2**18)
    while head := end.recv(8, socket.MSG_WAITALL):
        left = int.from_bytes(head, "little")
        while left:
            left -= end.recv_into(room, min(left, len(room)))
        end.sendall(b"1")
