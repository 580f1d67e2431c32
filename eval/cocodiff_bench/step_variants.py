"""What `cocodiff bench step --model NAME` measures: exchanges, orders and codings by name. Plain data."""

from __future__ import annotations

from typing import NamedTuple

from cocodiff.planning.costs import WHOLE, CallKind

STABLE = (WHOLE, CallKind(stable=0.5), CallKind(stable=1.0))  # calls of V-Major that are measured


class Variant(NamedTuple):
    """parts: of the ranks, each of which computes a guidance branch."""

    exchange: str
    order: str = "joint"
    selection: str = "full"
    chunks: int = 1
    parts: int = 1
    codec: str = "none"
    arrival: str = "now"

    @property
    def exact(self) -> bool:
        return self.selection == "full" and self.codec == "none" and self.arrival == "now"


VARIANTS = {
    "flat_serial": Variant("flat"),
    "flat": Variant("flat"),
    "tapa": Variant("tapa"),
    "tapa v_first": Variant("tapa", "v_first"),
    "cocodiff": Variant("tapa", "v_first", "v_major"),
    "split": Variant("split"),
    "split v_first": Variant("split", "v_first"),
    "split v_major": Variant("split", "v_first", "v_major"),
}
# Beside those that are measured where none are named.
MORE_VARIANTS = {
    "flat chunks": Variant("flat", chunks=2),
    "split chunks": Variant("split", chunks=2),
    "guidance flat": Variant("flat", parts=2),
    "guidance flat v_first": Variant("flat", "v_first", parts=2),
    "guidance split": Variant("split", parts=2),
    "guidance split v_first": Variant("split", "v_first", parts=2),
    "guidance flat chunks": Variant("flat", chunks=2, parts=2),
    "guidance split chunks": Variant("split", chunks=2, parts=2),
}
CODECS = ("lossless", "int8", "int4", "int2")
CODED_VARIANTS = {  # of the residual codec: whatever sends tensors whole, with a codec's name behind
    f"{name} {codec}": variant._replace(codec=codec)
    for name, variant in {**VARIANTS, **MORE_VARIANTS}.items()
    for codec in CODECS
    if variant.selection == "full"
}
ARRIVALS = {"ahead": "adaptive", "displaced": "displaced"}
LATE_VARIANTS = {  # of displaced exchange: the same, coded or not
    f"{name} {word}": variant._replace(arrival=arrival)
    for name, variant in {**VARIANTS, **MORE_VARIANTS, **CODED_VARIANTS}.items()
    for word, arrival in ARRIVALS.items()
    if variant.selection == "full"
}
ALL_VARIANTS = VARIANTS | MORE_VARIANTS | CODED_VARIANTS | LATE_VARIANTS
USUAL_VARIANTS = (*VARIANTS, "split v_first int4", "split v_first int2")
