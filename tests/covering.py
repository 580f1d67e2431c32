"""Worlds that are chosen instead of multiplied. `launch/test --all` runs the whole products, and more examples."""

from __future__ import annotations

from itertools import combinations, product
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

EXHAUSTIVE = "exhaustive"  # the marker, and hypothesis's profile where everything runs


def covering(*axes: Any) -> list[Any]:
    """The product of the axes as parametrize takes it; all but a covering set of it is marked `exhaustive`.

    In the covering set every two values of different axes meet at least once. It is chosen greedily, always the same.
    """
    missing = {pair for values in product(*axes) for pair in _pairs(values, axes)}
    left = list(product(*axes))
    chosen = []
    while missing:
        best = max(left, key=lambda values: len(missing & _pairs(values, axes)))
        missing -= _pairs(best, axes)
        left.remove(best)
        chosen.append(pytest.param(*best))
    return chosen + [pytest.param(*values, marks=pytest.mark.exhaustive) for values in left]


def _pairs(values: tuple[Any, ...], axes: tuple[Any, ...]) -> set[tuple[Any, ...]]:
    places = [(n, list(axis).index(value)) for n, (axis, value) in enumerate(zip(axes, values, strict=True))]
    return set(combinations(places, 2))


def all_but(chosen: Any, *axes: Any) -> list[Any]:
    """The product of the axes as parametrize takes it, of which everything not in `chosen` is marked `exhaustive`."""
    chosen = set(chosen)
    unknown = chosen - set(product(*axes))
    assert not unknown, unknown
    return [
        pytest.param(*values, marks=() if values in chosen else pytest.mark.exhaustive) for values in product(*axes)
    ]


def thorough() -> bool:
    """Whether everything runs. Known before tests are collected."""
    return settings.get_current_profile_name() == EXHAUSTIVE


def examples(count: int, exhaustive: int) -> settings:
    """So many examples of hypothesis, and so many where everything runs; none is slow."""
    most = exhaustive if thorough() else count
    return settings(max_examples=most, deadline=None, suppress_health_check=list(HealthCheck))
