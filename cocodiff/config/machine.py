"""Machines: pure data.

A *machine* describes one kind of node: its cards, the tiles of a card, and the planes. A plane is a set of tiles that
have direct links to each other across cards (Xe Links on Aurora). The machine file says which tile belongs to which
plane; it is never computed from the rank. On Aurora two of the six cards are wired the other way round.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace

from cocodiff.config.errors import UserError

LINK_RATES = ("sibling_gb_s", "plane_gb_s", "nic_gb_s")


@dataclass(frozen=True)
class Links:
    """The rates and delays of the links of one node's tiles, and of its NICs. Rates are of one direction."""

    sibling_gb_s: float = 10.0  # GB/s between tiles of a card
    plane_gb_s: float = 10.0  # GB/s of a link between two tiles of a plane
    nic_gb_s: float = 10.0  # GB/s of a NIC
    nics: int = 1  # number of NICs of a node
    nic_of: tuple[int, ...] = ()  # NIC of every tile of a node; (): tile number modulo `nics`
    latency_us: float = 0.0  # microseconds from the start of a message to its first byte
    message_us: float = 0.0  # microseconds between two messages that a rank starts
    blocked_us: float = 0.0  # microseconds for which each message that is sent or received blocks the rank's host
    link_share: float = 1.0  # share of these rates that messages reach
    forwarding_share: float = 1.0  # further share for messages to another plane, which a tile of the card forwards

    def __post_init__(self) -> None:
        object.__setattr__(self, "nic_of", tuple(self.nic_of))
        if self.nics < 1 or any(not 0 <= nic < self.nics for nic in self.nic_of):
            raise UserError(f"links: nics {self.nics}, nic_of {list(self.nic_of)}: number the NICs of a node from 0")
        for name in LINK_RATES:
            if not getattr(self, name) > 0:
                raise UserError(f"links: {name} {getattr(self, name)}: give a rate above 0")
        check_shares("links", link_share=self.link_share, forwarding_share=self.forwarding_share)
        for name in ("latency_us", "message_us", "blocked_us"):
            if not getattr(self, name) >= 0:
                raise UserError(f"links: {name} {getattr(self, name)}: give microseconds, 0 or more")


def check_shares(where: str, least: float = 1e-3, **shares: float) -> None:
    """Raise UserError if one of the given shares of a machine file is not a number from `least` to 1.

    Args:
        where: the part of the machine file, which begins the message.
        least: smallest valid share.
        shares: the shares to check, by name.
    """
    for name, value in shares.items():
        if not least <= value <= 1:
            raise UserError(f"{where}: {name} {value}: give a share from {least:g} to 1")


@dataclass(frozen=True)
class Device:
    """The memory and speed of a tile: a GPU, or a part of a card that acts as one.

    A memory or rate of 0 is unknown.
    """

    memory_gib: float = 0.0  # GiB of memory
    memory_gb_s: float = 0.0  # GB/s that its memory reads and writes
    bf16_tflop_s: float = 0.0  # TFLOP/s of dense bf16 matrix products
    launch_us: float = 0.0  # microseconds to launch a kernel
    wait_us: float = 0.0  # microseconds lost, besides a launch, when the host reads a number that the device computed
    instructions_g_s: float = 0.0  # 10^9 vector instructions, each for 16 elements, that the tile starts in a second
    peak_share: float = 1.0  # share of bf16_tflop_s that the arithmetic of a model reaches
    overlap_share: float = 1.0  # share of a message's time that arithmetic can hide
    library_mib: float = 0.0  # MiB of the tile that the communication library takes for a process
    across_mib: float = 0.0  # MiB that the library takes in addition if ranks are on several nodes
    sums_kernel: bool = True  # True if torch's attention kernel returns the log-sum-exp, which merging needs

    def __post_init__(self) -> None:
        for name in (one.name for one in fields(self) if one.name != "sums_kernel"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UserError(f"device: {name} {getattr(self, name)}: give a number, 0 or more")
        check_shares("device", peak_share=self.peak_share)
        check_shares("device", 0, overlap_share=self.overlap_share)

    @property
    def memory(self) -> int | None:
        """The bytes of memory of a tile; None if the machine file does not say."""
        return int(self.memory_gib * 2**30) or None


@dataclass(frozen=True)
class Belief:
    """A value of `Links` or `Device` that was not measured on the machine, with the range in which it may lie.
    `cocodiff plan` predicts with both ends of the range."""

    name: str  # name of the field of `Links` or `Device`
    low: float  # lowest value that it may have, in the field's unit
    high: float  # highest value that it may have
    source: str  # the document that the range is taken from, or words that say it is an assumption


@dataclass(frozen=True)
class Machine:
    """One kind of node, with its cards, tiles, links and NICs, as a machine file describes it. Ranks of a node are
    numbered card by card."""

    name: str  # name of the machine, as in its file
    tiles: int  # number of tiles of a card
    planes: tuple[int, ...]  # plane of each tile of a node in rank order; or of one card's tiles, for all cards
    cards: int | None = None  # number of cards of a node; None: as many as the ranks need
    nodes: int | None = None  # number of nodes of the machine; None: any number
    links: Links = field(default_factory=Links)  # rates and delays between tiles, and of the NICs
    device: Device = field(default_factory=Device)  # memory and speed of one tile
    beliefs: tuple[Belief, ...] = ()  # the values of links and device that were not measured, with their ranges

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or {type(self.tiles), type(self.cards), type(self.nodes)} - {int, type(None)}:
            raise UserError(f"machine {self.name}: the name must be text, and cards, tiles and nodes whole numbers")
        if self.tiles < 1 or (self.cards is not None and self.cards < 1):
            raise UserError(f"machine {self.name}: {self.cards} cards of {self.tiles} tiles: both must be at least 1")
        whole_node = self.tiles_per_node
        if self.links.nic_of and len(self.links.nic_of) != whole_node:
            wanted = f"give one for each of the {whole_node or 'tiles of a node of fixed size'}"
            raise UserError(f"machine {self.name}: nic_of names the NICs of {len(self.links.nic_of)} tiles: {wanted}")
        if len(self.planes) not in (self.tiles, whole_node):
            wanted = f"give one for each of the {self.tiles} tiles of a card"
            wanted += "" if whole_node is None else f" or one for each of the {whole_node} tiles of a node"
            raise UserError(f"machine {self.name}: {len(self.planes)} plane entries; {wanted}")
        for first in range(0, len(self.planes), self.tiles):
            of_card = self.planes[first : first + self.tiles]
            if sorted(of_card) != list(range(self.tiles)):
                wrong = f"tiles {first}..{first + self.tiles - 1} form a card and have planes {list(of_card)}"
                wanted = f"every card needs one tile in each of the planes 0..{self.tiles - 1}"
                raise UserError(f"machine {self.name}: {wrong}; {wanted}")

    @property
    def tiles_per_node(self) -> int | None:
        """The number of tiles of a node; None if nodes have no fixed number of cards."""
        return None if self.cards is None else self.cards * self.tiles

    def check_beliefs(self) -> None:
        """Raise UserError if a belief names no value of the links or the device, or if its range does not include the
        machine's value."""
        for belief in self.beliefs:
            if not belief.low <= self.value(belief.name) <= belief.high:
                wrong = f"does not include the machine's own value, {self.value(belief.name):g}"
                ends = f"from {belief.low:g} to {belief.high:g}"
                raise UserError(f"machine {self.name}: belief {belief.name} {ends} {wrong}")

    def value(self, name: str) -> float:
        """Return a number of the machine's links or device, by the name of its field. Raise UserError for a name that
        neither has."""
        for part in (self.links, self.device):
            if isinstance(value := getattr(part, name, None), (int, float)):
                return value
        raise UserError(f"machine {self.name}: belief {name}: neither links nor device has a number of this name")

    def with_value(self, name: str, value: float) -> Machine:
        """Return a copy of the machine in which one number of its links or device is replaced. The copy has no belief
        about this number.

        Args:
            name: name of the field of `Links` or `Device`.
            value: its new value, in the field's unit.
        """
        part = "links" if hasattr(self.links, name) else "device"
        beliefs = tuple(belief for belief in self.beliefs if belief.name != name)
        return replace(self, beliefs=beliefs, **{part: replace(getattr(self, part), **{name: value})})

    @property
    def missing_rates(self) -> list[str]:
        """The parts of the machine file that give no rates: ["its device"], ["its links"], both, or an empty list. Time
        cannot be predicted if any is missing."""
        device = ["its device"] if not (self.device.bf16_tflop_s and self.device.memory_gb_s) else []
        return device + (["its links"] if replace(self.links, nics=1, nic_of=()) == Links() else [])
