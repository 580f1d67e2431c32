"""Plane maps from colours, fabric ports and measured rates."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import topology_of

from cocodiff.cli.doctor.planes import canonical, from_color, from_links, from_rates, same_planes, spelled

AURORA = topology_of("aurora", 12)
PLANES = AURORA.machine.planes
CARDS = tuple(place.card for place in AURORA.places)
COLOR = "card:{0,1},{2,3},{4,5},{6,7},{8,9},{10,11};plane:{0,3,4,6,8,11},{1,2,5,7,9,10}"


def rates(planes: tuple[int, ...], sibling: float, plane: float, cross: float, noise: float = 0.0) -> list[list[float]]:
    chance = random.Random(0)

    def rate(a: int, b: int) -> float:
        if a == b:
            return 0.0
        of = sibling if CARDS[a] == CARDS[b] else plane if planes[a] == planes[b] else cross
        return of * (1 + noise * (chance.random() - 0.5))

    return [[rate(a, b) for b in range(12)] for a in range(12)]


def test_auroras_colour_is_auroras_machine_file():
    assert same_planes(from_color(COLOR), PLANES)
    assert spelled(PLANES) == "{0,3,4,6,8,11},{1,2,5,7,9,10}"


@pytest.mark.parametrize("color", ["", "card:{0,1}", "plane:{0,2}", "plane:{1,2}", "plane:{a}", "plane:{}"])
def test_colours_that_make_no_sense(color):
    with pytest.raises(ValueError, match="names no plane"):
        from_color(color)


def test_planes_from_measured_rates():
    planes, why = from_rates(rates(PLANES, 170, 15, 9, noise=0.2), CARDS)
    assert planes is not None and same_planes(planes, PLANES) and why == ""


def test_rates_that_show_no_planes():
    assert from_rates(rates(PLANES, 10, 10, 9.5), CARDS) == (None, "links between cards are alike (9.5 to 10 GB/s)")
    broken = rates(PLANES, 170, 15, 9)
    broken[0][4] = broken[4][0] = 9  # one link of a plane is slow: no clique
    planes, why = from_rates(broken, CARDS)
    assert planes is None and "do not fall into planes" in why
    assert from_rates([[0, 1], [1, 0]], (0, 0)) == (None, "fewer than two pairs of tiles of different cards")


@settings(deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.permutations(range(4)))
def test_numbers_of_planes_carry_no_meaning(planes, names):
    renamed = [names[plane] for plane in planes]
    assert same_planes(planes, renamed) and canonical(planes) == canonical(canonical(renamed))


@settings(deadline=None)
@given(st.integers(2, 12), st.data())
def test_planes_of_links_are_what_links_join(tiles, data):
    planes = [data.draw(st.integers(0, 2)) for _ in range(tiles)]
    members = {plane: [t for t in range(tiles) if planes[t] == plane] for plane in planes}
    chain = [(a, b) for tiles_of in members.values() for a, b in pairwise(tiles_of)]
    assert same_planes(from_links(tiles, chain), planes)
