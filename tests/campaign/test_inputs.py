"""Generated inputs and settings end right: with results that keep what they must in every format, or with one line."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import yaml
from cocodiff_eval.cli import generate, inpaint, sweep
from covering import examples
from hypothesis import given
from hypothesis import strategies as st
from inputs import MAKERS, TWISTS, run_case
from tiny_pipelines import sd3_pipeline

from cocodiff.cli.main import main
from cocodiff.jobs.options import Option, with_settings

# Of another seed, or more of them: INPUTS="SEED CASES".
SEED, CASES = map(int, os.environ.get("INPUTS", f"0 {len(MAKERS) * len(TWISTS)}").split())


@pytest.mark.sample(len(TWISTS))
@pytest.mark.parametrize("number", range(CASES))
def test_results_of_a_generated_input_are_right_in_every_format(number: int, tmp_path: Path) -> None:
    """Every maker of files, with --full each with every twist."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert not run_case(number, SEED, tmp_path)


# Words that no option takes, and settings -----------------------------------------------------------------------------

BAD_OPTIONS: dict[str, list[str]] = yaml.safe_load(Path(__file__).with_name("bad_options.yaml").read_text())
for option, word in {"model": "\ud800", "out": "y" * 300}.items():
    BAD_OPTIONS[option].append(word)
USUAL: dict[str, Any] = {"out": "out", "quiet": True, "dry_run": True}
# By command its options, and settings with which it runs.
SETTINGS: dict[str, tuple[Sequence[Option], dict[str, Any]]] = {
    "inpaint": (inpaint.OPTIONS, {"input": ["scan.tif"], "mask": ["block"], "slices": "0:1", "steps": 1, "seed": 3}),
    "generate": (generate.OPTIONS, {"model": "model", "prompt": [], "height": 32, "width": 32, "steps": 1}),
    "sweep": (sweep.OPTIONS, {"input": ["scan.tif"], "grid": {"order": ["joint"]}, "points": [{"preset": "tapa"}]}),
}
# What is no YAML of settings, with the right text in the place of {}.
NO_SETTINGS = ("\t{}", "{0}{0}", "", "- a\n- b\n", "a: &a [*a]\n", "{}seed: !!python/object/apply:os.getpid []\n", "\0")
NO_SETTINGS += ("{}seed: 2020-01-01\n", "{{" * 3000, "{}<<: [1]\n", "{}? [a]\n: 1\n", "{}seed: 0x1F\n", "~: 1\n")
NO_SETTINGS += ("{}seed: 1_000\n", "\udcff\udcfe{}")
JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=4,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("settings")
    voxels = np.random.default_rng(0).integers(0, 30000, (2, 20, 24), dtype="u2")
    tifffile.imwrite(folder / "scan.tif", voxels, photometric="minisblack")
    sd3_pipeline().save_pretrained(folder / "model")
    return folder


@pytest.fixture
def refused(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """A function that runs a command in that folder, and returns its one line of refusal, "" where it ends well."""
    monkeypatch.chdir(folder)

    def run(*words: str) -> str:
        before = {*folder.iterdir()}
        code, said = main(words), capsys.readouterr().err.splitlines()
        assert {*folder.iterdir()} == before
        assert code == 0 or (code == 2 and len(said) == 1 and said[0].startswith("cocodiff: ")), said
        return said[0] if code else ""

    return run


@pytest.mark.parametrize("name", BAD_OPTIONS)
def test_a_word_that_an_option_does_not_take_is_refused(refused: Callable[..., str], name: str) -> None:
    for word in BAD_OPTIONS[name]:
        line = refused("inpaint", "--input", "scan.tif", "--quiet", f"--{name}={word}")
        assert name in line or (word and " ".join(word.split()) in line), (word, line)


@pytest.mark.parametrize("name", SETTINGS)
def test_any_settings_are_taken_or_refused_in_one_line(refused: Callable[..., str], folder: Path, name: str) -> None:
    options, usual = SETTINGS[name][0], SETTINGS[name][1] | USUAL
    names = st.sampled_from([one.name for one in with_settings(options) if one.name not in USUAL])

    def try_text(text: str) -> str:
        (folder / "run.yaml").write_bytes(text.encode(errors="surrogateescape"))
        return refused(name, "--config", "run.yaml")

    @examples(12, 1000)
    @given(st.dictionaries(names, JUNK, min_size=1, max_size=2))
    def check(changed: dict[str, Any]) -> None:
        try_text(yaml.safe_dump(usual | changed))

    text = yaml.safe_dump(usual)
    assert try_text(text) == ""
    for other in (*(one.format(text) for one in NO_SETTINGS), text[: len(text) // 2]):
        try_text(other)
    check()
