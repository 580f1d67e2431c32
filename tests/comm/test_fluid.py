"""Fluids on shared links: max-min fairness, conservation, and times that can be worked out by hand."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cocodiff.planning.fluid import FluidNetwork, fair_rates, padded


@st.composite
def networks(draw):
    """Capacities, and for every flow its links and how many messages it stands for."""
    links = draw(st.integers(1, 6))
    capacity = draw(st.lists(st.integers(1, 50), min_size=links, max_size=links))
    path = st.lists(st.integers(0, links - 1), min_size=1, max_size=3, unique=True)
    return capacity, draw(st.lists(st.tuples(path, st.integers(1, 3)), min_size=1, max_size=12))


def loads(capacity, flows, rates):
    used = np.zeros(len(capacity))
    for (path, weight), rate in zip(flows, rates, strict=True):
        used[path] += weight * rate
    return used


@settings(max_examples=200, deadline=None)
@given(networks())
def test_rates_are_max_min_fair(drawn):
    """No link carries more than it can, and every flow has a full link on which nobody has more than it."""
    capacity, flows = drawn
    paths, weights = [path for path, _ in flows], np.array([float(weight) for _, weight in flows])
    rates = fair_rates(padded(paths, len(capacity)), weights, np.array(capacity, dtype=float))
    used = loads(capacity, flows, rates)
    assert (used <= np.array(capacity) * (1 + 1e-9)).all()
    for path, rate in zip(paths, rates, strict=True):
        full = [link for link in path if used[link] >= capacity[link] * (1 - 1e-6)]
        assert any(
            all(
                other <= rate * (1 + 1e-6) for other_path, other in zip(paths, rates, strict=True) if link in other_path
            )
            for link in full
        )


@settings(max_examples=60, deadline=None)
@given(networks(), st.lists(st.integers(1, 1000), min_size=12, max_size=12))
def test_every_byte_arrives_and_no_link_is_beaten(drawn, sizes):
    """All messages come through, none twice; a link's bytes take at least what its rate allows."""
    capacity, flows = drawn
    network, names = FluidNetwork(capacity), []
    messages = [(n, path, float(sizes[n])) for n, (path, _) in enumerate(flows)]
    network.start(messages)
    while np.isfinite(network.next_end()):
        names += network.advance(network.next_end())
    assert sorted(names) == list(range(len(flows)))
    for link, rate in enumerate(capacity):
        assert network.now * (1 + 1e-9) >= sum(size for _, path, size in messages if link in path) / rate


def test_times_by_hand():
    """Two messages share a link; when the shorter is through, the other has it alone; a third comes later."""
    network = FluidNetwork([10.0, 2.0])
    network.start([(0, [0], 10.0), (1, [0], 20.0)])
    assert network.next_end() == 2.0 and network.advance(2.0) == [0]
    assert network.next_end() == 3.0
    assert network.advance(2.5) == []
    network.start([(2, [0, 1], 2.0)])
    assert network.next_end() == pytest.approx(2.5 + 5 / 8)
    assert network.advance(network.next_end()) == [1]
    assert network.next_end() == pytest.approx(3.5)


def test_alike_messages_are_one_flow_and_take_as_long():
    network = FluidNetwork([10.0])
    network.start([(n, [0], 5.0) for n in range(4)])
    assert network.next_end() == 2.0 and network.advance(2.0) == [0, 1, 2, 3]
    assert network.next_end() == np.inf


def test_a_message_over_no_link_takes_no_time():
    network = FluidNetwork([1.0])
    network.start([(0, [], 5.0)])
    assert network.next_end() == 0.0 and network.advance(0.0) == [0]
