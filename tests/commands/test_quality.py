"""A bound on quality: which setting is chosen, on which slices."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import yaml
from cocodiff_eval.harness import quality as bounds
from cocodiff_eval.harness.quality import MARGIN_DB, Bound, Figure, Quality, SettingGroup, Slices, read_ladder
from hypothesis import given, settings, strategies
from launching import assert_succeeded
from warm import forked

from cocodiff.config.config import load_machine
from cocodiff.config.errors import UserError
from cocodiff.engine.assemble import AttentionWork
from cocodiff.planner.traffic import slowed
from cocodiff.topology import Topology

BOUND = "65.8dB"
CASES = yaml.safe_load(Path(__file__).with_name("bounds.yaml").read_text())
CODECS = {"int2", "int4", "int8", "none"}
SLICE = Path(__file__).parents[2] / "cocodiff" / "demo_model" / "samples" / "synthetic_organ_1.tif"


def asked(bound: str, **settings: Any) -> Quality:
    values = {"preset": None, "quality": bound, "exact": True, "quality_slices": 2, "quality_every": 20, **settings}
    quality = Quality.asked(values)
    assert quality is not None and values["preset"] == [quality.preset]
    return quality


@pytest.mark.parametrize(("text", "db", "of"), CASES["bounds"])
def test_a_bound_is_a_distance_or_a_loss(text: str, db: float, of: str) -> None:
    assert Bound.parse(text) == Bound(db, of)


@pytest.mark.parametrize("text", [*CASES["no bounds"], "9" * 400])
def test_what_is_no_bound_is_refused_with_the_remedy(text: str) -> None:
    with pytest.raises(UserError, match=r"^--quality .*(\b200\b.*50dB.*\b5\b.*0\.3dB|at least)"):
        Bound.parse(text)


@given(strategies.data())
@settings(max_examples=60, deadline=None)
def test_the_cheapest_setting_that_all_checked_slices_keep_is_found_in_few_trials(data: Any) -> None:
    """Of settings that are the better the dearer they are, whatever the slices."""
    candidates, count = data.draw(strategies.integers(1, 9)), data.draw(strategies.integers(1, 40))
    steps = strategies.lists(strategies.floats(0, 30), min_size=candidates, max_size=candidates)
    of_slices = data.draw(strategies.tuples(*[steps] * count))
    db = [[20 + sum(more[: candidate + 1]) for candidate in range(candidates)] for more in of_slices]
    slices = Slices.chosen(count, data.draw(strategies.integers(1, 4)), data.draw(strategies.integers(1, 20)))
    bound = Bound(data.draw(strategies.floats(20, 120)), "exact")
    figures: dict[int, dict[int, float | None]] = {}
    tried = set()
    while isinstance(found := bounds.next_trial(bound, slices, candidates, figures), bounds.CandidateTrial):
        assert found.candidate < candidates - 1, "the exact one needs no trial"
        tried.add(found.candidate)
        figures.setdefault(found.candidate, {}).update({one: db[one][found.candidate] for one in found.slices})
    needed = bound.db + slices.margin_db
    keep = [r for r in range(candidates - 1) if all(db[one][r] >= needed for one in slices.checks)]
    assert found == (keep[0] if keep else candidates - 1)
    calibrated = [r for r in range(candidates - 1) if all(db[one][r] >= needed for one in slices.calibration)]
    broken = found - (calibrated[0] if calibrated else candidates - 1)
    assert len(tried) <= math.ceil(math.log2(candidates)) + 1 + broken


def test_fewer_checked_slices_than_enough_need_a_margin() -> None:
    assert Slices.chosen(100, 2, 20) == Slices(count=100, calibration=(0, 1), checks=(0, 1, 20, 40, 60, 80))
    assert Slices.chosen(100, 2, 20).margin_db == MARGIN_DB
    assert Slices.chosen(100, 2, 20, (7, 9, 11)).margin_db == 0, f"{bounds.ENOUGH} are enough"
    assert Slices.chosen(3, 2, 1).margin_db == 0, "none is left that was not checked"
    loss = Bound(0.3, "truth")
    assert loss.with_margin(20).db == pytest.approx(0.03) and Bound(50, "exact").with_margin(3).db == 53
    assert loss.keeps(-1.0) and loss.keeps(0.3) and loss.keeps(None) and not loss.keeps(0.31)
    assert loss.worst({0: -0.2, 1: None, 2: 0.1}) == (2, 0.1)


@pytest.mark.parametrize(
    ("machine", "ranks", "codecs"),
    [("aurora", 12, {"none"}), ("slow", 12, CODECS), ("local", 12, CODECS), ("local", 1, CODECS)],
)
def test_the_ladder_suits_the_links_and_ends_exactly(machine, ranks, codecs) -> None:
    """Where links are quick no codec is tried, as its passes would take longer than the bytes that it saves; where they
    are slow, or nothing is known, codes come first. Every setting says all that it changes."""
    known = load_machine("aurora" if machine == "slow" else machine)
    topology = Topology.build(slowed(known, 10.0) if machine == "slow" else known, ranks)
    quality = asked("50dB").for_links(topology, AttentionWork(heads=24))
    assert [config.exact for config in quality.candidates.values()] == [False] * (len(quality.candidates) - 1) + [True]
    assert {config.codec for config in quality.candidates.values()} == codecs
    assert [*quality.changes] == [*quality.candidates]
    assert (
        len({frozenset(change) for name in (bounds.CODED, bounds.UNCODED) for change in read_ladder(name).values()})
        == 1
    )


def test_a_bound_chooses_the_threshold_of_a_step_cache() -> None:
    """On top of whatever preset, on one rank as on many; what it does not choose is settled."""
    quality = asked("40dB", step_cache="first_block")
    topology = Topology.build(load_machine("aurora"), 12)
    assert quality.for_links(topology, AttentionWork(heads=24)) == quality and quality.caches
    *cached, exact = quality.candidates.values()
    thresholds = [config.step_cache_threshold for config in cached]
    assert thresholds == sorted(thresholds, reverse=True)
    assert {(config.step_cache, config.exact_attention) for config in cached} == {("first_block", True)}
    assert exact.exact and not any(config.exact for config in cached)
    assert len({frozenset(change) for change in read_ladder(bounds.CACHED).values()}) == 1
    with pytest.raises(UserError, match=r"step_cache_threshold 0\.1: --quality 40dB "):
        asked("40dB", step_cache="first_block", step_cache_threshold=0.1)


def restored(tmp_path: Path, *words: object) -> tuple[dict[str, Any], str]:
    """Run the command to its end: what metrics.json of the folder `out` has, and what was printed."""
    done = forked("inpaint", *words, "--quiet", folder=tmp_path)
    assert_succeeded(done)
    out = Path(str(words[words.index("--out") + 1]))
    return json.loads((out / "metrics.json").read_text()), done.stdout


def test_a_bounded_run_with_a_step_cache_tells_how_many_calls_were_cached(tmp_path: Path) -> None:
    words = ("--input", SLICE, "--out", tmp_path / "out", "--steps", 12, "--ranks", 2)
    metrics, _ = restored(tmp_path, *words, "--quality", "25dB", "--step_cache", "first_block")
    (found,), (row,) = metrics["quality"], metrics["images"]
    assert found["setting"].startswith("cache ") and row["psnr_vs_exact_db"] >= 25
    assert 0 < row["cached_fraction"] < 1 and row["drift"][0]["cached_fraction"] == 0
    assert row["cached_fraction"] == pytest.approx(sum(step["cached_fraction"] for step in row["drift"]) / 12)


def test_the_record_names_what_was_tried_and_every_slice_below_the_bound() -> None:
    asked_for = asked("60dB")
    kept = [*[*asked_for.candidates][:3], asked_for.exact]
    quality = replace(asked_for, candidates={name: asked_for.candidates[name] for name in kept})
    group = SettingGroup("mask block", Slices.chosen(30, 2, 10), {0: "a", 1: "b", 10: "k", 20: "u"}, {})
    known = {0: {0: 64.0, 1: 65.0, 10: 59.0, 20: 62.0}, 1: {0: 70.0, 1: None, 10: 63.5, 20: 71.0}}
    for candidate, db in known.items():
        group.figures[candidate] = {place: Figure(one, 1 + candidate, 10) for place, one in db.items()}
    assert group.next(quality) is None
    found = group.record(quality)
    first, second = found["tried"]
    assert (found["setting"], found["below"], found["checked"]) == (second["setting"], [], ["a", "b", "k", "u"])
    assert (first["kept"], first["below"], first["worst"], first["worst_db"]) == (False, ["k"], "k", 59.0)
    assert second["kept"] and second["db"]["b"] is None and second["bytes_of_whole"] == 0.2
    assert found["changes"] == read_ladder()[found["setting"]]


@pytest.mark.full
def test_a_bounded_run_checks_and_tightens(tmp_path: Path) -> None:
    """The first two slices show nothing, and any setting restores them: the checks choose."""
    organ = tifffile.imread(SLICE)
    tifffile.imwrite(tmp_path / "scan.tif", np.stack([organ * 0, organ * 0 + 9, organ, organ[::-1], organ.T]))

    words = ("--input", tmp_path / "scan.tif", "--out", tmp_path / "whole", "--steps", 4, "--samples", 2, "--ranks", 4)
    asked = ("--replicas", 2, "--quality", BOUND, "--quality_every", 4, "--exact_slices", 1)
    metrics, said = restored(tmp_path, *words, *asked)
    (found,) = metrics["quality"]
    setting = found["setting"]
    cheapest = next(iter(read_ladder()))
    assert (setting != cheapest, found["below"], found["margin_db"]) == (True, [], MARGIN_DB)
    assert found["calibrated_on"] == ["scan[0]", "scan[1]"]
    assert found["checked"] == ["scan[0]", "scan[1]", "scan[4]"]
    tried = {one["setting"]: one for one in found["tried"]}
    assert (tried[cheapest]["kept"], tried[cheapest]["worst"]) == (False, "scan[4]")
    assert max(one["bytes_of_whole"] for one in found["tried"]) < 0.6
    assert f"{cheapest} on 3 of 5 does not keep {BOUND}" in said and f"block: {setting} is taken" in said
    assert f"<b>{setting}</b> is taken" in (tmp_path / "whole" / "report.html").read_text()
    record = yaml.safe_load((tmp_path / "whole" / "run.yaml").read_text())
    assert record["quality_found"] == metrics["quality"] and record["preset"] == ["ahead"]
    rows = metrics["images"]
    of_checks = {row["name"]: row["psnr_vs_exact_db"] for row in rows if row["exact_compared"]}
    assert of_checks == pytest.approx(tried[setting]["db"], abs=1e-3)
    assert len({json.dumps(row["bytes"]) for row in rows}) == 1, "one setting restored all"
    assert all(0 < sum(row["bytes"].values()) < 0.6 * sum(row["bytes_whole"].values()) for row in rows)
    assert all(row["psnr_db_single"] < row["psnr_db"] for row in rows[2:])


def test_one_rank_alone_restores_exactly_and_says_so(tmp_path: Path) -> None:
    words = ("--input", SLICE, "--steps", 1, "--quality", "0.3dB", "--preset", "split", "--out", tmp_path / "out")
    document, said = restored(tmp_path, *words)
    assert "one rank alone sends nothing" in said
    assert [one["setting"] for one in document["quality"]] == ["exact"]
    assert [(row["mode"], row["psnr_vs_exact_db"]) for row in document["images"]] == [("split", None)]
