"""V-First (CoCoDiff section III-C): v needs neither normalisation nor rotation, so it is projected first and travels
while q and k are still being made. Packing is the lanes' work as well, so v costs this thread its projection alone."""

from __future__ import annotations

from cocodiff.attention.strategy import nothing
from cocodiff.attention.ulysses import Call, Sent


def v_first(call: Call) -> Sent:
    """Projects and sends v, then q and k. v is on its way through all phases before q and k are asked for."""
    with call.trace.span("project v", layer=call.layer):
        v_BLHD = call.qkv.v()
    call.know_v(v_BLHD)
    v_travelling = call.send("v", [v_BLHD])
    with call.trace.span("project qk", layer=call.layer):
        q_BLHD, k_BLHD = call.qkv.q(), call.qkv.k()
    qk_travelling = call.send("qk", [q_BLHD, k_BLHD], soon=call.qkv.meanwhile is nothing)
    with call.trace.span("meanwhile", layer=call.layer):
        call.qkv.meanwhile()
    return v_travelling + qk_travelling
