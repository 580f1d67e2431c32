"""Machines and the places of ranks on them: pure data and arithmetic, no communication.

A *machine* describes one kind of node: its cards, the tiles of a card, and the planes. A plane is a set of tiles that
have direct links to each other across cards (Xe Links on Aurora). The machine file says which tile belongs to which
plane; it is never computed from the rank. On Aurora two of the six cards are wired the other way round.

A *topology* places the ranks of one run on a machine: one rank is one tile.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from cocodiff.config.errors import UserError
from cocodiff.config.grouping import by_key

MOST_RANKS = 2**17  # more tiles than the largest machine has; placing so many ranks takes a second and 50 MB


@dataclass(frozen=True)
class Links:
    """The rates and delays of a node's links. Rates are unidirectional."""

    sibling_gb_s: float = 10.0  # GB/s between tiles of a card
    plane_gb_s: float = 10.0  # GB/s of a link between two tiles of a plane
    nic_gb_s: float = 10.0  # GB/s of a NIC
    nics: int = 1  # number of NICs of a node
    nic_of: tuple[int, ...] = ()  # NIC of every tile of a node; (): tile number modulo `nics`
    latency_us: float = 0.0  # microseconds from the start of a message to its first byte
    message_us: float = 0.0  # microseconds between two messages that a rank starts
    blocked_us: float = 0.0  # microseconds for which each message that is sent or received blocks the rank's host
    link_share: float = 1.0  # share of these rates that messages reach
    forwarding_share: float = 1.0  # share of it that messages to another plane reach, which a sibling forwards

    def __post_init__(self) -> None:
        object.__setattr__(self, "nic_of", tuple(self.nic_of))
        if self.nics < 1 or any(not 0 <= nic < self.nics for nic in self.nic_of):
            raise UserError(f"links: nics {self.nics}, nic_of {list(self.nic_of)}: number the NICs of a node from 0")
        for name in ("sibling_gb_s", "plane_gb_s", "nic_gb_s"):
            if not getattr(self, name) > 0:
                raise UserError(f"links: {name} {getattr(self, name)}: give a rate above 0")
        check_shares("links", link_share=self.link_share, forwarding_share=self.forwarding_share)
        for name in ("latency_us", "message_us", "blocked_us"):
            if not getattr(self, name) >= 0:
                raise UserError(f"links: {name} {getattr(self, name)}: give microseconds, 0 or more")


def check_shares(where: str, least: float = 1e-3, **shares: float) -> None:
    """Raise UserError for a share that is not between `least` and 1."""
    for name, value in shares.items():
        if not least <= value <= 1:
            raise UserError(f"{where}: {name} {value}: give a share from {least:g} to 1")


@dataclass(frozen=True)
class Device:
    """One tile: its memory and its speed. A memory or rate of 0 is unknown."""

    memory_gib: float = 0.0  # GiB of memory
    memory_gb_s: float = 0.0  # GB/s that its memory reads and writes
    bf16_tflop_s: float = 0.0  # TFLOP/s of dense bf16 matrix products
    launch_us: float = 0.0  # microseconds to launch a kernel
    wait_us: float = 0.0  # microseconds from a computed number until the host has read it and the next kernel runs
    instructions_g_s: float = 0.0  # 10^9 instructions of 16 lanes that its vector engines start in a second
    peak_share: float = 1.0  # share of bf16_tflop_s that the arithmetic of a model reaches
    overlap_share: float = 1.0  # share of a message's time that arithmetic can hide
    library_mib: float = 0.0  # MiB of the tile that the communication library takes for a process
    across_mib: float = 0.0  # MiB that it takes in addition if ranks are on several nodes
    # True if its torch has an attention kernel that returns the log-sum-exp, which merging needs
    sums_kernel: bool = True

    def __post_init__(self) -> None:
        check_shares("device", peak_share=self.peak_share)
        check_shares("device", 0, overlap_share=self.overlap_share)

    @property
    def memory(self) -> int | None:
        """The bytes of memory; None if the machine file does not say."""
        return int(self.memory_gib * 2**30) or None


@dataclass(frozen=True)
class Belief:
    """A value of `Links` or `Device` that was not measured on the machine, with the range in which it may lie."""

    name: str  # the value's
    low: float
    high: float
    source: str  # of the range: where it is said, or an assumption


@dataclass(frozen=True)
class Machine:
    """One kind of node. Ranks of a node are numbered card by card."""

    name: str
    tiles: int  # number of tiles of a card
    # plane of every tile of a node in rank order, or of every tile of one card, repeated for each card
    planes: tuple[int, ...]
    cards: int | None = None  # number of cards of a node; None: as many as the ranks need
    nodes: int | None = None  # number of nodes of the machine; None: any number
    links: Links = field(default_factory=Links)
    device: Device = field(default_factory=Device)
    beliefs: tuple[Belief, ...] = ()  # the values above that nobody has measured

    def __post_init__(self) -> None:
        if self.tiles < 1 or (self.cards is not None and self.cards < 1):
            raise UserError(f"machine {self.name}: {self.cards} cards of {self.tiles} tiles: both must be at least 1")
        whole_node = self.tiles_per_node
        if self.links.nic_of and len(self.links.nic_of) != whole_node:
            raise UserError(
                f"machine {self.name}: nic_of names the NICs of {len(self.links.nic_of)} tiles: give one for each of "
                f"the {whole_node or 'tiles of a node of fixed size'}"
            )
        if len(self.planes) not in (self.tiles, whole_node):
            raise UserError(
                f"machine {self.name}: {len(self.planes)} plane entries; give one for each of the {self.tiles} tiles "
                f"of a card" + ("" if whole_node is None else f" or one for each of the {whole_node} tiles of a node")
            )
        for first in range(0, len(self.planes), self.tiles):
            of_card = self.planes[first : first + self.tiles]
            if sorted(of_card) != list(range(self.tiles)):
                raise UserError(
                    f"machine {self.name}: tiles {first}..{first + self.tiles - 1} form a card and have planes "
                    f"{list(of_card)}; every card needs one tile in each of the planes 0..{self.tiles - 1}"
                )

    @property
    def tiles_per_node(self) -> int | None:
        """The number of tiles of a node; None if nodes have no fixed number of cards."""
        return None if self.cards is None else self.cards * self.tiles

    def check_beliefs(self) -> None:
        """Raise UserError for a belief of no known name, or whose range does not include the machine's own value."""
        for belief in self.beliefs:
            if not belief.low <= self.value(belief.name) <= belief.high:
                raise UserError(
                    f"machine {self.name}: belief {belief.name} from {belief.low:g} to {belief.high:g} does not "
                    f"include the machine's own value, {self.value(belief.name):g}"
                )

    def value(self, name: str) -> float:
        """Return a number of the links or the device by its name. Raises UserError for a name that neither has."""
        for part in (self.links, self.device):
            if isinstance(value := getattr(part, name, None), (int, float)):
                return value
        raise UserError(f"machine {self.name}: belief {name}: neither links nor device has a number of this name")

    def with_value(self, name: str, value: float) -> Machine:
        """Return the machine with another number of its links or device, which then is no belief."""
        part = "links" if hasattr(self.links, name) else "device"
        beliefs = tuple(belief for belief in self.beliefs if belief.name != name)
        return replace(self, beliefs=beliefs, **{part: replace(getattr(self, part), **{name: value})})

    @property
    def missing_rates(self) -> list[str]:
        """The parts without rates in the machine file: "its device", "its links", both or none."""
        device = ["its device"] if not (self.device.bf16_tflop_s and self.device.memory_gb_s) else []
        return device + (["its links"] if self.links == Links() else [])


@dataclass(frozen=True)
class Place:
    """The place of one rank on the machine."""

    rank: int
    node: int
    card: int  # number of the card, counted over all nodes
    plane: int  # number of the plane; a plane spans all nodes
    tile: int  # number of the tile, counted on its node


@dataclass(frozen=True)
class Topology:
    """The ranks of one run on a machine. A card may have fewer tiles than the others: with 5 ranks on cards of two
    tiles the last card has one. If a card has no tile in plane k, its lowest rank serves plane k: it forwards that
    plane's data and owns none of its heads."""

    machine: Machine
    places: tuple[Place, ...]

    @classmethod
    def build(cls, machine: Machine, size: int, ranks_per_node: int | None = None) -> Topology:
        """Place `size` ranks, node by node and card by card. ranks_per_node: the launcher's number, for machines
        without a fixed node size; default: all ranks on one node. Raise UserError if nodes of a fixed size are not
        filled exactly, and for more than MOST_RANKS ranks."""
        if size < 1:
            raise UserError(f"{size} ranks: at least 1 is needed")
        if size > MOST_RANKS:
            raise UserError(f"{size} ranks: up to {MOST_RANKS} can be placed, more than any machine has tiles")
        fixed = machine.tiles_per_node
        if fixed is not None and (size % fixed or (machine.nodes and size > machine.nodes * fixed)):
            whole = f"{machine.nodes} node(s) of {fixed}" if machine.nodes else f"nodes of {fixed}"
            below = size // fixed * fixed
            nearest = [n for n in (below, below + fixed) if n and n <= (machine.nodes or size) * fixed]
            raise UserError(
                f"machine {machine.name} has {whole} ranks and {size} rank(s) were started: start "
                f"{' or '.join(str(n) for n in nearest) or fixed} ranks, or use --machine local"
            )
        per_node = fixed or ranks_per_node or size
        cards_per_node = math.ceil(per_node / machine.tiles)
        places = []
        for rank in range(size):
            node, local = divmod(rank, per_node)
            card = node * cards_per_node + local // machine.tiles
            places.append(Place(rank, node, card, machine.planes[local % len(machine.planes)], local))
        return cls(machine, tuple(places))

    def part(self, ranks: Sequence[int]) -> Topology:
        """Return some of the ranks, at their places, as a topology of their own. Ranks are numbered from 0 in the given
        order, which must go node by node. Their nodes are numbered from 0 as well; cards and planes keep their
        numbers."""
        chosen = [self.places[rank] for rank in ranks]
        numbers = {node: number for number, node in enumerate(sorted({place.node for place in chosen}))}
        places = [replace(place, rank=new, node=numbers[place.node]) for new, place in enumerate(chosen)]
        return Topology(self.machine, tuple(places))

    @property
    def relative_places(self) -> tuple[tuple[int, int, int], ...]:
        """The (node, card, plane) of every rank, each numbered by first appearance. Two groups of ranks that are
        arranged in the same way on different hardware have equal values."""
        kinds = zip(*((p.node, p.card, p.plane) for p in self.places), strict=True)
        orders = [(numbers, list(dict.fromkeys(numbers))) for numbers in kinds]
        return tuple(zip(*([order.index(n) for n in numbers] for numbers, order in orders), strict=True))

    @property
    def size(self) -> int:
        return len(self.places)

    @property
    def nodes(self) -> int:
        return self.places[-1].node + 1

    @cached_property
    def on_node(self) -> dict[int, tuple[int, ...]]:
        """The ranks of each node, ascending."""
        return self._grouped("node")

    @cached_property
    def cards(self) -> dict[int, tuple[int, ...]]:
        """The ranks of each card, ascending."""
        return self._grouped("card")

    @cached_property
    def planes(self) -> dict[int, tuple[int, ...]]:
        """The ranks of each plane on all nodes, ascending. Planes without a rank are absent."""
        return self._grouped("plane")

    @cached_property
    def served_planes(self) -> tuple[frozenset[int], ...]:
        """The planes that each rank serves on its card, by rank: its own, and those for which its card has no tile."""
        served: list[set[int]] = [set() for _ in self.places]
        for card in self.cards:
            for plane in self.planes:
                served[self.server(card, plane)].add(plane)
        return tuple(frozenset(planes) for planes in served)

    def siblings(self, rank: int) -> tuple[int, ...]:
        """Return the other ranks of this rank's card."""
        return tuple(other for other in self.cards[self.places[rank].card] if other != rank)

    def server(self, card: int, plane: int) -> int:
        """Return the rank that carries the traffic of `plane` for `card`: the tile in that plane, else the card's
        lowest rank."""
        ranks = self.cards[card]
        return next((rank for rank in ranks if self.places[rank].plane == plane), ranks[0])

    @cached_property
    def nics(self) -> tuple[int, ...]:
        """The NIC of every rank, numbered on its node."""
        links = self.machine.links
        return tuple(links.nic_of[p.tile] if links.nic_of else p.tile % links.nics for p in self.places)

    def link_class(self, sender: int, receiver: int) -> str | None:
        """Return the class of the link between two ranks: "node", "sibling", "plane" or "cross_plane". None for a rank
        and itself."""
        a, b = self.places[sender], self.places[receiver]
        if sender == receiver:
            return None
        if a.node != b.node:
            return "node"
        if a.card == b.card:
            return "sibling"
        return "plane" if a.plane == b.plane else "cross_plane"

    @cached_property
    def shard_order(self) -> tuple[int, ...]:
        """The ranks in the order in which they get one more if a number does not divide evenly. Consecutive ranks of it
        are on different nodes, then on different cards, then on different planes."""
        first_card = {node: min(self.places[rank].card for rank in ranks) for node, ranks in self.on_node.items()}
        order = sorted(self.places, key=lambda p: (p.plane, p.card - first_card[p.node], p.node, p.rank))
        return tuple(place.rank for place in order)

    def _grouped(self, attribute: str) -> dict[int, tuple[int, ...]]:
        """Return the ranks by an attribute of their places, both ascending."""
        groups = by_key((getattr(place, attribute), place.rank) for place in self.places)
        return {key: tuple(ranks) for key, ranks in sorted(groups.items())}
