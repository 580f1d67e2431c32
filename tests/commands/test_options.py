"""Options of a subcommand: the command line over a settings file over defaults, and mistakes in one line."""

import re
import shlex
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml
from cocodiff_bench.command import KINDS

from cocodiff.cli.main import MODULES, main
from cocodiff.config.config import Config
from cocodiff.config.errors import UserError
from cocodiff.config.setting import settings_of
from cocodiff.demo_model import SAMPLES
from cocodiff.jobs import options as jobs
from cocodiff.jobs.options import Option, check_counts, check_strength, parse, preset_configs, with_settings

OPTIONS = (
    Option("input", "files to read", many=True, required=True),
    Option("steps", "denoising steps", 20, type=int),
    Option("strength", "how much noise", 1.0, type=float),
    Option("noise_seed", "where noise starts", 0, type=int),
    Option("mask", "what to restore", "block", choices=("block", "center")),
    Option("exact", "compare with the exact run", True, type=bool),
    Option("overwrite", "replace results", False, type=bool),
    Option("mask_range", "intensities"),
    Option("prompt", "texts", many=True),
    Option("quality", "a bound", numbers=True),
    Option("truth", "the original"),
)
DEFAULTS = {option.name: option.default for option in OPTIONS}
EVERY = with_settings(jobs.RUN_OPTIONS)
CASES = yaml.safe_load(Path(__file__).with_name("options.yaml").read_text())
BEYOND_64_BITS = [(f"noise_seed: 0x{'f' * 5000}", "noise_seed 64 bits"), (f"strength: {10**400}", "strength 64 bits")]


def parsed(line: str, options: tuple[Option, ...] = OPTIONS) -> dict[str, Any]:
    return parse("inpaint", "restores slices", options, shlex.split(line))


def mistake(line: str, options: tuple[Option, ...] = OPTIONS) -> str:
    with pytest.raises(UserError) as caught:
        parsed(line, options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(("line", "changed"), CASES["taken"].items())
def test_what_a_command_line_takes(line, changed):
    assert parsed(f"--input a.png {line}") == DEFAULTS | {"input": ["a.png"]} | changed


@pytest.mark.parametrize(
    ("line", "values"), [*CASES["refused"].items(), (f"--chunks {'9' * 5000}", "chunks whole number")]
)
def test_what_a_command_line_is_refused_for(line, values):
    message = mistake(f"--input a {line}", with_settings((*jobs.PARTITION_OPTIONS, *OPTIONS)))
    assert [value for value in values.split() if value not in message] == [], message


def test_inputs_are_asked_for_and_words_before_any_option_are_none():
    assert all(part in mistake("--steps 3") for part in ("--input is missing", "files to read", "--help"))
    assert "unrecognized arguments: -4" in mistake("-4 --input a")


@pytest.mark.parametrize(
    ("text", "line", "changed"),
    [
        *CASES["settings taken"],
        *((f"input: a\n{name}: null\n", "", {"input": ["a"]}) for name in DEFAULTS if name != "input"),
    ],
)
def test_a_settings_file_without_a_value_and_the_command_line_over_it(tmp_path, text, line, changed):
    (tmp_path / "run.yaml").write_text(text)
    found = parsed(f"--config {tmp_path / 'run.yaml'} {line}")
    assert found == DEFAULTS | changed and type(found["strength"]) is float


@pytest.mark.parametrize(("text", "values"), [*CASES["settings refused"].items(), *BEYOND_64_BITS])
def test_what_a_settings_file_is_refused_for(tmp_path, text, values):
    (tmp_path / "run.yaml").write_text(text if "input" in text else f"input: a\n{text}\n")
    message = mistake(f"--config {tmp_path / 'run.yaml'}", (*jobs.PARTITION_OPTIONS, *OPTIONS))
    assert [value for value in values.split() if value not in message] == [] and len(message) < 600
    assert "--" in values or "run.yaml" in message


def test_numbers_have_bounds():
    for name, most in jobs.MOST.items():
        check_counts({name: most}, name)
        check_counts({name: [1, None, most]}, name)
        for value, said in ((0, "at least 1"), (most + 1, f"at most {most:,}"), (2**70, "more than 64 bits: at most")):
            for given in (value, [1, value]):
                with pytest.raises(UserError, match=f"--{name} .*{said}"):
                    check_counts({name: given}, name)
    check_strength(1.0, [jobs.MOST["steps"]])
    check_strength(0.001, [50, 1000])
    for strength in (0.0, -1.0, 1.1, float("nan"), float("inf")):
        with pytest.raises(UserError, match=r"--strength .* 0 .*1"):
            check_strength(strength, [50])
    for strength in (1e-300, 5e-324, 3e-5):  # the last is too little for the 50 alone
        with pytest.raises(UserError, match=r"50 steps .*1,000,000.*5e-05"):
            check_strength(strength, [20, 50])


@pytest.mark.parametrize(("line", "listed"), CASES["engine"].items())
def test_run_options_become_the_engines_settings_over_what_presets_say(tmp_path, line, listed):
    """The command line and a settings file say the same."""
    settings = {name: tuple(value) if isinstance(value, list) else value for name, value in listed.items()}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(listed))
    for words in (line, f"--config {tmp_path / 'run.yaml'}"):
        found = parsed(words, EVERY)
        assert found["ranks"] is None and found["quiet"] is False
        configs = preset_configs(found | {"preset": ["flat,tapa", "flat"]})
        assert [*configs] == ["flat", "tapa"]
        assert configs["flat"] == Config(**{"exchange": "flat"} | settings) and configs["tapa"] == Config(**settings)


HEAVY = "{'torch', 'diffusers', 'transformers', 'scipy', 'skimage', 'matplotlib', 'jinja2', 'jsonargparse'}"
QUICK = "inpaint", "generate", "sweep", "bench", "doctor"
READING = "cli import inpaint; from cocodiff_eval.harness import tasks"
INPUTS = (
    f"inpaint.parse('inpaint', '', inpaint.with_settings(inpaint.OPTIONS), ['--input', {str(SAMPLES / 'tooth.tif')!r}])"
)


@pytest.mark.parametrize(
    ("script", "names"),
    [
        ("from cocodiff.cli import main; main.main(['--help'])", HEAVY),
        (f"from cocodiff_eval.{READING}; tasks.find_tasks({INPUTS})", HEAVY),
        (f"import {', '.join(MODULES[name] for name in QUICK)}", "{'numpy', 'scipy', 'torch'}"),
    ],
)
def test_libraries_are_imported_when_they_are_needed(script, names):
    """Neither for help nor to read inputs; and those that count the cores not before the options are read: how many
    ranks share the cores is known then."""
    script = f"import sys; {script}; print({names} & {{*sys.modules}})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["set()"]), done.stderr


def helped(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    with pytest.raises(SystemExit):
        main(words)
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(("command", "headings"), CASES["headings"].items())
def test_help_is_short_and_grouped_and_a_long_one_shows_every_option(monkeypatch, capsys, command, headings):
    monkeypatch.setenv("COLUMNS", "80")
    short = helped(capsys, command, "--help")
    assert len(short) <= 60 and short == helped(capsys, command, "-h")
    assert [line for line in short if re.fullmatch(r"\w+:|for experts:", line)] == headings.split()
    shown = {found[1] for line in helped(capsys, command, "--help-all") if (found := re.match(r"  --(\w+)", line))}
    flags = {one.name for one in settings_of(Config).values() if one.given == "machine"}
    own = {one.name for one in import_module(f"cocodiff_eval.cli.{command}").OPTIONS}
    assert shown >= own | flags | {"config"}


def test_help_names_formats_and_every_benchmark(capsys):
    told = " ".join(" ".join(helped(capsys, "sweep", "--help")).split())
    assert "a folder of TIFF files" in told and "OME-Zarr" in told
    assert main(["--help"]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("  bench "))
    assert sorted(line.partition(": ")[2].split(", ")) == sorted(KINDS)
