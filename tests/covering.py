"""Worlds that are chosen instead of multiplied. `launch/test --all` runs the whole products, and more examples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations, product
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

EXHAUSTIVE = "exhaustive"  # the marker, and hypothesis's profile where everything runs


def covering(*axes: Any, fits: Callable[..., bool] = lambda *_: True) -> list[Any]:
    """The product of the axes as parametrize takes it; all but a covering set of it is marked `exhaustive`."""
    chosen = covering_set(*axes, fits=fits)
    left = [values for values in product(*axes) if fits(*values) and values not in chosen]
    return [
        *(pytest.param(*values) for values in chosen),
        *(pytest.param(*values, marks=pytest.mark.exhaustive) for values in left),
    ]


def covering_set(*axes: Any, fits: Callable[..., bool] = lambda *_: True) -> list[tuple[Any, ...]]:
    """Some of the product of the axes, in which every two values of different axes meet at least once, where they fit
    at all. It is chosen greedily, always the same."""
    number = {pair: 1 << n for n, pair in enumerate({pair for values in product(*axes) for pair in _pairs(values)})}
    pairs = {values: sum(number[pair] for pair in _pairs(values)) for values in product(*axes) if fits(*values)}
    missing, chosen = 0, []
    for of_values in pairs.values():
        missing |= of_values
    while missing:
        chosen.append(max(pairs, key=lambda values: (missing & pairs[values]).bit_count()))
        missing &= ~pairs.pop(chosen[-1])
    return chosen


def _pairs(values: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    return combinations(enumerate(values), 2)


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
