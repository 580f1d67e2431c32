"""Worlds of ranks whose attention is exact, coded or displaced, call after call."""

from __future__ import annotations

import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from late import Late, dawdle
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from worlds import topology_of

from cocodiff.attention.local import LocalAttention
from cocodiff.attention.strategy import LayerKey, LazyQKV
from cocodiff.comm.loopback import LoopbackGroup, run_ranks
from cocodiff.comm.trace import Trace
from cocodiff.comm.transport import RankContext
from cocodiff.config.config import Config
from cocodiff.engine.assemble import build_strategy
from cocodiff.exchange.codec import StepInfo
from cocodiff.kernels import Kernels
from cocodiff.models.adapter import image_and_text
from cocodiff.topology import Topology
from cocodiff.topology.axes import Mesh
from cocodiff.topology.layout import Layout, Segments

SIGMAS = [1.0, 0.97, 0.93, 0.87, 0.87, 0.86, 0.7, 0.6, 0.5, 0.45, 0.4, 0.3, 0.2, 0.1]
LAYER = LayerKey("layer")


@dataclass(frozen=True)
class Call:
    """One call of a layer. spoilt: one number of q that no scale fits. steps: of the run, where they are known."""

    step: int
    run: int = 0
    text: int = 7
    spoilt: float = 0.0
    steps: int | None = None
    layer: LayerKey = LAYER

    @property
    def sigma(self) -> float:
        return SIGMAS[min(self.step, len(SIGMAS) - 1)]

    @property
    def step_info(self) -> StepInfo:
        return StepInfo(self.run, self.step, self.steps, self.sigma)


RUN = [*map(Call, range(7))]
# Residuals without a scale, of which the next call is whole; a step that skips the layer; another image, whose text
# then has another length.
TROUBLED = [
    *(*map(Call, range(4)), Call(4, spoilt=math.nan), Call(5), Call(6), Call(8), Call(9)),
    *(Call(0, 1), Call(1, 1), Call(2, 1, text=9), Call(3, 1, 9, -math.inf), Call(4, 1, 9)),
    *(Call(5, 1, 9, 1e7), Call(6, 1, 9), Call(7, 1, 9)),
]


@dataclass(frozen=True)
class World:
    """The ranks of a call and what they attend to. given: a topology in place of so many ranks of the machine."""

    size: int
    heads: int = 5
    image: int = 23
    channels: int = 40
    batch: int = 2
    machine: str = "local"
    kernels: str = "torch"
    dtype: torch.dtype = torch.float32
    given: Topology | None = None

    @property
    def topology(self) -> Topology:
        return self.given or topology_of(self.machine, self.size)

    def segments(self, call: Call) -> Segments:
        return image_and_text(self.image, call.text)

    def layout(self, call: Call) -> Layout:
        return Layout.build(self.topology, self.segments(call), max(self.heads, self.size))

    def rows(self, call: Call, rank: int) -> Any:
        """A rank's rows of the tensors: here these have the rows of rank after rank."""
        return self.layout(call).row_slices[rank]

    def masks(self) -> dict[str, Tensor]:
        return {}

    def tensors(self, call: Call) -> list[Tensor]:
        """q, k and v [B, S, H, D], rank by rank, on curves over the noise level."""
        generator = torch.Generator().manual_seed(7)
        shape = (3, self.batch, self.image + call.text, self.heads, self.channels)
        start, drift, pace = (torch.randn(shape, generator=generator) for _ in range(3))
        x = start + 0.3 * drift * torch.sin(3 * call.sigma + pace)
        if call.spoilt:
            x[0, -1, 3, -1, -1] = call.spoilt
        return list(x.to(self.dtype))

    def qkv(self, call: Call, tensors: Sequence[Tensor], rank: int) -> LazyQKV:
        rows = self.rows(call, rank)
        q, k, v = ((lambda x=x: x[:, rows]) for x in tensors)
        return LazyQKV(q, k, v, self.segments(call), self.heads, self.masks())


class OfRank(NamedTuple):
    """One rank's rows of the outputs of all calls, the bytes that it had sent after each of them by purpose and link
    class, and its codec."""

    outputs: list[Tensor]
    sent: list[dict[str, dict[str, int]]]
    codec: Any

    def bytes_of_calls(self) -> list[int]:
        """Of attention, on all links."""
        total = [0, *(sum(sent["attention"].values()) for sent in self.sent)]
        return [after - before for before, after in pairwise(total)]


class Ranks:
    """Attention of all ranks of a world, call after call. A send that nobody waits for changes no number here, but on a
    device its memory may be written over while it leaves: a call that ends has waited for all its messages."""

    def __init__(
        self,
        world: World,
        delayed: bool = False,
        mesh: Mesh | None = None,
        local: Callable[[int], LocalAttention] = lambda rank: LocalAttention(),
        **settings: Any,
    ) -> None:
        """delayed: every message, lane and rank is late now and then. local: what computes on a rank."""
        self.world, self.delayed, self.local = world, delayed, local
        where = settings.get("ring", 1), settings.get("placement", "topology")
        self.mesh = mesh or Mesh.build(world.topology, *where, kind=settings.get("ring_kind", "keys"))
        self.config = Config(**{"ring": self.mesh.ring, "ring_kind": self.mesh.kind, **settings})
        self.messages = Messages()

    def attend(
        self, calls: Sequence[tuple[Call, list[Tensor]]], then: Callable[[int, Any], None] = lambda rank, codec: None
    ) -> list[OfRank]:
        """then: is called on each rank, with its codec, after the calls."""

        def work(transport: Any) -> OfRank:
            trace, outputs, sent, rank = Trace(transport.rank), [], [], transport.rank
            over = Late(transport) if self.delayed else transport
            context = RankContext(over, self.mesh.topology, trace, Kernels(self.world.kernels))
            strategy = build_strategy(self.config, self.mesh, context, self.local(rank))
            for number, (call, tensors) in enumerate(calls):
                if self.delayed:
                    dawdle()
                if not number or call.step_info != calls[number - 1][0].step_info:
                    strategy.codec.begin_step(call.step_info)
                outputs.append(strategy.attend(self.world.qkv(call, tensors, rank), call.layer).clone())
                assert self.config.arrival != "now" or not self.messages.unwaited(rank)
                sent.append({purpose: trace.bytes(purpose) for purpose in ("attention", "notes")})
            then(rank, strategy.codec)
            return OfRank(outputs, sent, strategy.codec)

        with self.messages.watched():
            return run_ranks(self.world.size, work)

    def call(self, calls: Sequence[Call], *then: Any) -> list[OfRank]:
        """`attend` to the world's own tensors."""
        return self.attend([(call, self.world.tensors(call)) for call in calls], *then)


@dataclass
class Messages:
    """What loopback ranks have posted. most_bytes: by rank, of the memory that was received into, at any one time."""

    posted: set[Watched] = field(default_factory=set)
    memory: dict[int, dict[int, StorageWeakRef]] = field(default_factory=lambda: defaultdict(dict))
    most_bytes: dict[int, int] = field(default_factory=lambda: defaultdict(int))

    def unwaited(self, rank: int | None = None) -> bool:
        """Whether nobody has waited for one of the messages."""
        return any(rank in (None, one.rank) for one in [*self.posted])

    @contextmanager
    def watched(self) -> Iterator[None]:
        post = LoopbackGroup.send_recv

        def send_recv(group: LoopbackGroup, sends: Any, recvs: Any) -> Watched:
            rank = group.ranks[group.index]
            memory = self.memory[rank]
            for tensor, _ in recvs:
                storage = tensor.untyped_storage()
                memory[storage.data_ptr()] = StorageWeakRef(storage), storage.nbytes()
            alive = sum(size for reference, size in [*memory.values()] if not reference.expired())  # lanes post as well
            self.most_bytes[rank] = max(self.most_bytes[rank], alive)
            return Watched(post(group, sends, recvs), self.posted, rank)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LoopbackGroup, "send_recv", send_recv)
            yield


class Watched:
    """A transfer that is among the posted ones until somebody has waited for it."""

    def __init__(self, pending: Any, posted: set[Watched], rank: int) -> None:
        self.rank, self._pending, self._posted = rank, pending, posted
        posted.add(self)

    def wait(self) -> None:
        self._pending.wait()
        if threading.current_thread().name == "lane-plane":
            time.sleep(0.001)  # so that who does not wait for the lane has gone on by then
        self._posted.discard(self)
