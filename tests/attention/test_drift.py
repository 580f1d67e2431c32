"""What V-Major notes of a run: sums that are read between runs, and the profile of all ranks."""

from __future__ import annotations

import pytest
import torch

from cocodiff.attention.v_major.selection import Drift, DriftNotes
from cocodiff.exchange.codec import merge_notes


def test_notes_are_sums_over_calls_and_runs_that_take_no_more_memory_than_one_run():
    notes = DriftNotes()
    for run in range(3):
        notes.ensure_step(0)
        for layer_key in range(4):
            change_BN, norm_BN = torch.full((2, 5), 0.5), torch.full((2, 5), float(1 + layer_key))
            notes.scored(1, change_BN, norm_BN)
            notes.chosen(1, torch.tensor([[True, False, True, True, False]] * 2))
        if run < 2:
            notes.sync_to_host()
            assert not notes._sums
    assert notes.by_step() == {0: Drift(), 1: Drift(12 * 5.0, 3 * 10 * (1 + 2 + 3 + 4), 120, 48)}
    assert notes.by_step() == notes.by_step()
    notes.clear()
    assert notes.by_step() == {}


def test_the_profile_of_ranks_weighs_them_by_what_they_compared():
    of_ranks = [{0: Drift(), 1: Drift(1.0, 4.0, 10, 5)}, {1: Drift(2.0, 8.0, 30, 5)}]
    first, second = merge_notes(of_ranks)
    assert first == {"step": 0, "change": None, "stable_fraction": 0.0}
    assert second == {"step": 1, "change": pytest.approx(3 / 12), "stable_fraction": 10 / 40}
