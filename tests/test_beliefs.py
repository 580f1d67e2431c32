"""Values that a machine file has without a measurement: their effect on plans, and what hangs on them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from worlds import topology_of

from cocodiff.config.config import Config
from cocodiff.config.machine import Belief
from cocodiff.models.adapter import image_and_text
from cocodiff.planner.case import Case, ModelShape
from cocodiff.planner.choice import Division, ends_of, pays, turning_points, with_value
from cocodiff.planner.layers import LayerPlan, plan_layers
from cocodiff.planner.rings import ring_of
from cocodiff.planner.traffic import PlannedAllToAll
from cocodiff.topology import Topology
from cocodiff.topology.axes import Partition

SHAPE = ModelShape("toy", heads=48, head_dim=64, joint_layers=3, parameters=10**6, text_tokens=24)


def aurora(**values: float) -> Topology:
    """A node with other values, and without launches, which take most of so small a layer."""
    topology = topology_of("aurora", 12)
    for name, value in {"launch_us": 0.0, "wait_us": 0.0, **values}.items():
        topology = replace(topology, machine=topology.machine.with_value(name, value))
    return topology


def case(preset: str, topology: Topology, **more: object) -> Case:
    return Case(SHAPE, topology, Config.preset(preset, **more), image_and_text(1008, 24), steps=20)


def layer(of: Case) -> LayerPlan:
    """Plan a layer in calls of the kind that a run has most of."""
    return list(plan_layers(of)[0][1].values())[-1]


@pytest.mark.parametrize(
    ("preset", "settings"),
    [("flat", {"ring": 1}), ("v_first", {"ring": 1}), ("tapa", {"ring": 1}), ("flat", {"arrival": "displaced"})],
)
def test_without_overlap_a_layer_takes_its_arithmetic_and_all_its_messages(preset, settings):
    hidden, none = (layer(case(preset, aurora(overlap_share=share), **settings)) for share in (1, 0))
    of_messages = sum(span.end_s - span.start_s for span in none.spans if span.lane != "main")
    assert none.seconds == pytest.approx(none.compute_s + of_messages)
    assert hidden.compute_s == pytest.approx(none.compute_s)
    assert (hidden.seconds < 0.99 * none.seconds) == (settings != {"ring": 1} or preset == "v_first")


def test_without_overlap_a_ring_moves_its_keys_beside_no_attention():
    ring = {"ring": 12, "ring_kind": "keys", "placement": "topology"}
    hidden, none = (case("flat", aurora(overlap_share=share), **ring) for share in (1, 0))
    moves_s = sum(ring_of(none.mesh, none.mesh.layouts(none.segments, 48), none.work, 10e-6).moves_s)
    assert layer(none).seconds == pytest.approx(layer(none).compute_s + moves_s)
    assert layer(hidden).seconds < layer(none).seconds


def test_what_siblings_forward_takes_its_links_longer():
    """Of the two blocks on a plane's fullest link, one comes from the other plane. Split sends none across planes."""
    for exchange, blocks in (("flat", 3), ("split", 2)):
        topology = aurora(forwarding_share=0.5, latency_us=0)
        sent, slow = PlannedAllToAll(topology, exchange, 48), topology.machine
        assert sent.seconds(slow) == pytest.approx(sent.block_bytes * blocks / 11.5e9, rel=1e-6)
        assert sent.seconds(slow.with_value("link_share", 0.5)) == pytest.approx(2 * sent.seconds(slow))


def test_arithmetic_that_reaches_a_share_of_the_peak():
    wide = image_and_text(4096, 24)
    whole, half = (
        layer(replace(case("flat", aurora(peak_share=share), ring=1), segments=wide, batch=8)) for share in (1, 0.5)
    )
    assert half.compute_s == pytest.approx(2 * whole.compute_s, rel=0.1)


def with_beliefs(of: Case, *beliefs: Belief) -> Division:
    machine = replace(of.topology.machine, beliefs=beliefs)
    return Division(Partition(), [replace(of, topology=replace(of.topology, machine=machine))])


def test_both_ends_of_what_is_believed():
    """The file's own value is no end; the other values stay as they are."""
    of = with_beliefs(
        case("flat", aurora(), ring=1),
        Belief(name="link_share", low=0.5, high=1, source="a page"),
        Belief(name="latency_us", low=5, high=50, source="guessed"),
    )
    found = {(end.belief.name, end.value): end.division for end in ends_of(of)}
    assert list(found) == [("link_share", 0.5), ("latency_us", 5), ("latency_us", 50)]
    slow = found["link_share", 0.5].cases[0].topology.machine
    assert (slow.links.link_share, slow.links.latency_us, slow.device.bf16_tflop_s) == (0.5, 10, 207)
    assert found["latency_us", 50].steps[0].step_s > of.steps[0].step_s > found["latency_us", 5].steps[0].step_s


def test_the_value_from_which_on_a_codec_pays():
    of = with_beliefs(
        case("coded", aurora(instructions_g_s=30), ring=1),
        Belief(name="link_share", low=0.05, high=1, source="a page"),
        Belief(name="latency_us", low=5, high=20, source="guessed"),
    )
    assert not pays(of)
    ((end, at),) = turning_points(of, pays)
    assert end.belief.name == "link_share" and end.value < end.believed
    assert [pays(with_value(of, "link_share", at * factor)) for factor in (0.9, 1.1)] == [True, False]
