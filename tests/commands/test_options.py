"""Options of a subcommand: the command line over a settings file over defaults, and mistakes in one line."""

import re
import subprocess
import sys
from importlib import import_module

import pytest
from cocodiff_bench.command import KINDS

from cocodiff.cli.main import MODULES, main
from cocodiff.config.config import Config
from cocodiff.config.errors import UserError
from cocodiff.config.setting import settings_of
from cocodiff.demo_model import SAMPLES
from cocodiff.jobs.options import (
    MOST,
    PARTITION_OPTIONS,
    RUN_OPTIONS,
    Option,
    check_counts,
    check_strength,
    engine_settings,
    parse,
    preset_configs,
    with_settings,
)

OPTIONS = (
    Option("input", "files to read", many=True, required=True),
    Option("steps", "denoising steps", 20, type=int),
    Option("strength", "how much noise", 1.0, type=float),
    Option("noise_seed", "where noise starts", 0, type=int),
    Option("mask", "what to restore", "block", choices=("block", "center")),
    Option("exact", "compare with the exact run", True, type=bool),
    Option("overwrite", "replace results", False, type=bool),
)
EVERY = with_settings(RUN_OPTIONS)


def values(*words: str) -> dict:
    return parse("inpaint", "restores slices", OPTIONS, ("--input", "a.png", *words))


def mistake(*words: str, options: tuple[Option, ...] = OPTIONS) -> str:
    with pytest.raises(UserError) as caught:
        parse("inpaint", "restores slices", options, words)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_defaults():
    assert values() == {
        "input": ["a.png"],
        "steps": 20,
        "strength": 1.0,
        "noise_seed": 0,
        "mask": "block",
        "exact": True,
        "overwrite": False,
    }


@pytest.mark.parametrize("words", [("--noise-seed", "7"), ("--noise_seed", "7"), ("--noise-seed=7",)])
def test_hyphen_and_underscore_are_the_same(words):
    assert values(*words)["noise_seed"] == 7


@pytest.mark.parametrize(
    ("words", "exact", "overwrite"),
    [
        (("--overwrite",), True, True),
        (("--no-exact",), False, False),
        (("--no_exact", "--overwrite"), False, True),
        (("--exact", "false", "--overwrite", "true"), False, True),
        (("--no-exact", "--overwrite", "False"), False, False),
        (("--exact=false", "--overwrite", "--steps", "3"), False, True),
        (("--no-overwrite",), True, False),
    ],
)
def test_booleans(words, exact, overwrite):
    found = values(*words)
    assert (found["exact"], found["overwrite"]) == (exact, overwrite)


def test_several_values():
    assert parse("inpaint", "", OPTIONS, ("--input", "a.png", "b.tif", "--steps", "3"))["input"] == ["a.png", "b.tif"]


@pytest.mark.parametrize(
    "words",
    [
        ("--input", "a.png", "--steps", "3", "--input", "b.tif", "c.tif"),
        ("--input=a.png", "--steps=3", "--input=b.tif", "--input", "c.tif"),
        ("--input", "a.png", "b.tif", "--input", "c.tif", "--steps", "3"),
    ],
)
def test_a_repeated_option_adds_where_it_takes_several_values(words):
    found = parse("inpaint", "", OPTIONS, words)
    assert (found["input"], found["steps"]) == (["a.png", "b.tif", "c.tif"], 3)


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (("--steps", "3", "--steps", "4"), "steps"),
        (("--noise-seed=3", "--noise_seed", "3"), "noise_seed"),
        (("--exact", "--no-exact"), "exact"),
        (("--mask", "block", "--overwrite", "--mask", "center"), "mask"),
        (("--config", "a.yaml", "--config", "b.yaml"), "config"),
    ],
)
def test_a_repeated_option_is_refused_where_it_takes_one(words, name):
    assert mistake("--input", "a.png", *words) == f"--{name} is given more than once: it takes one value, give it once"


@pytest.mark.parametrize("words", [("--mask-range", "-1000,3000"), ("--mask_range=-1000,3000",)])
def test_values_may_begin_with_a_minus(words):
    options = (*OPTIONS, Option("mask_range", "intensities"), Option("prompt", "texts", many=True))
    given = (
        "--prompt",
        "-a tooth",
        "b",
        "-h",
        *words,
        "--input",
        "-1.png",
        "-2.png",
        "--noise_seed",
        "-7",
        "--overwrite",
    )
    found = parse("inpaint", "", options, given)
    assert (found["mask_range"], found["prompt"], found["input"]) == (
        "-1000,3000",
        ["-a tooth", "b", "-h"],
        ["-1.png", "-2.png"],
    )
    assert (found["noise_seed"], found["overwrite"]) == (-7, True)


def test_a_value_that_is_missing_or_one_too_many():
    assert "--steps: expected one argument" in mistake("--input", "a", "--steps", "--overwrite")
    assert "--steps: expected one argument" in mistake("--input", "a", "--steps")
    assert "unrecognized arguments: 4" in mistake("--input", "a", "--steps", "3", "4")
    assert "unrecognized arguments: -4" in mistake("-4", "--input", "a")


def test_numbers_are_typed():
    found = values("--steps", "3", "--strength", "0.5")
    assert (found["steps"], found["strength"]) == (3, 0.5)
    assert values("--strength", "1")["strength"] == 1


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (("--stpes", "3"), ("unknown option --stpes", "did you mean steps?", "cocodiff inpaint --help")),
        (("--no-stesp",), ("unknown option --no_stesp",)),
        (("--input", "a", "--steps", "many"), ("--steps many: not a number", "cocodiff inpaint --help")),
        (("--input", "a", "--strength", "high"), ("--strength high: not a number",)),
        (("--input", "a", "--mask", "blok"), ("mask", "blok", "block", "center")),
        (("--steps", "3"), ("--input is missing: files to read", "cocodiff inpaint --help")),
        (("--config", "absent.yaml"), ("cannot read absent.yaml: No such file",)),
    ],
)
def test_mistakes_on_the_command_line(words, parts):
    message = mistake(*words)
    for part in parts:
        assert part in message


def test_a_settings_file_and_the_command_line_over_it(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("input: scan.tif\nsteps: 5\nstrength: 1\nmask: center\nexact: false\n")
    found = parse("inpaint", "", OPTIONS, ("--config", str(path), "--steps", "7", "--exact"))
    assert found == {
        "input": ["scan.tif"],
        "steps": 7,
        "strength": 1,
        "noise_seed": 0,
        "mask": "center",
        "exact": True,
        "overwrite": False,
    }


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("input: [a]\nstpes: 3\n", ("unknown key stpes", "did you mean steps?")),
        ("input: [a]\nsteps: many\n", ("steps: 'many' is not of type int",)),
        ("input: [a]\nsteps: true\n", ("steps: True is not of type int",)),
        ("input: [a]\nexact: 3\n", ("exact: 3 is not of type bool",)),
        ("input: [1]\n", ("input: 1 is not of type str",)),
        ("input: [a]\nmask: centre\n", ("mask: 'centre', did you mean center?", "choose from block, center")),
        ("input: [a]\nmask: [center]\n", ("mask: ['center'] is not of type str",)),
        ("input: [a, null]\n", ("input: None is not of type str",)),
        ("input: [a]\nsteps: &a [*a]\n", ("is not of type int",)),
        (f"input: [a]\nsteps: {2**64}\n", ("steps: a number of more than 64 bits",)),
        (f"input: [a]\nnoise_seed: 0x{'f' * 5000}\n", ("noise_seed: a number of more than 64 bits",)),
        (f"input: [a]\nstrength: {10**400}\n", ("strength: a number of more than 64 bits",)),
        ("input: [a\n", ("not valid YAML",)),
        ("- input\n", ("no key: value pairs",)),
    ],
)
def test_mistakes_in_a_settings_file(tmp_path, text, parts):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    message = mistake("--config", str(path))
    for part in (*parts, "run.yaml"):
        assert part in message


@pytest.mark.parametrize("name", [option.name for option in OPTIONS if not option.required])
def test_a_key_without_a_value_is_not_given(tmp_path, name):
    path = tmp_path / "run.yaml"
    path.write_text(f"input: [a.png]\n{name}: null\n")
    assert parse("inpaint", "", OPTIONS, ("--config", str(path))) == values()
    path.write_text("input: null\n")
    assert "--input is missing" in mistake("--config", str(path))


def test_numbers_have_bounds():
    for name, most in MOST.items():
        check_counts({name: most}, name)
        check_counts({name: [1, None, most]}, name)
        for value, said in ((0, "at least 1"), (most + 1, f"at most {most:,}"), (2**70, "more than 64 bits: at most")):
            with pytest.raises(UserError, match=f"--{name} .*{said}"):
                check_counts({name: value}, name)
    check_strength(1.0, [MOST["steps"]])
    check_strength(0.001, [50, 1000])
    for strength in (0.0, -1.0, 1.1, float("nan"), float("inf")):
        with pytest.raises(UserError, match="above 0 and up to 1"):
            check_strength(strength, [50])
    for strength in (1e-300, 5e-324, 1e-9):
        with pytest.raises(UserError, match=r"50 steps .* a schedule of more than 1,000,000; give at least 5e-05"):
            check_strength(strength, [20, 50])


@pytest.mark.parametrize("word", ["\N{SUPERSCRIPT TWO}", "9" * 5000])
def test_digits_that_are_no_number(word):
    with pytest.raises(UserError, match="not a whole number"):
        parse("inpaint", "", EVERY, ("--chunks", word))


def test_run_options_become_the_engines_settings():
    found = parse("inpaint", "", EVERY, ("--machine", "aurora", "--timeout-s", "9", "--transport", "gloo"))
    assert Config(**engine_settings(found)) == Config(machine="aurora", timeout_s=9.0, transport="gloo")
    assert found["ranks"] is None and found["quiet"] is False


def test_run_options_go_over_what_a_preset_says():
    found = parse("inpaint", "", EVERY, ()) | {"preset": ["flat,tapa"]}
    assert [config.exchange for config in preset_configs(found).values()] == ["flat", "tapa"]
    over = parse("inpaint", "", EVERY, ("--exchange", "flat", "--order", "v_first", "--vae", "all"))
    for config in preset_configs(over | {"preset": ["flat", "tapa"]}).values():
        assert config == Config(exchange="flat", order="v_first", vae="all")


def test_selection_is_set_over_a_preset():
    words = (
        "--selection",
        "v_major",
        "--schedule",
        "list",
        "--ratios",
        "0",
        "0.5",
        "--warmup",
        "0",
        "--scoring",
        "card",
    )
    found = parse("inpaint", "", EVERY, words)
    assert Config.preset("tapa", **engine_settings(found)) == Config(
        selection="v_major", schedule="list", ratios=(0.0, 0.5), warmup=0, scoring="card"
    )
    wrong = parse("inpaint", "", EVERY, ("--selection", "v_major", "--ratio", "1.5"))
    with pytest.raises(UserError, match=r"ratio is 1\.5: give a fraction from 0 to 1"):
        Config.preset("tapa", **engine_settings(wrong))
    with pytest.raises(UserError, match="names none; choose from ahead, cocodiff"):
        preset_configs(found | {"preset": [","]})


def test_a_ring_on_the_command_line_and_in_a_file(tmp_path):
    (tmp_path / "run.yaml").write_text("ring: 4\nplacement: usp\n")
    for words in (("--ring", "4", "--placement", "usp"), ("--config", str(tmp_path / "run.yaml"))):
        settings = engine_settings(parse("inpaint", "", EVERY, words))
        assert (Config(**settings).ring, Config(**settings).placement) == (4, "usp")
    assert "'auto', 'topology', 'usp'" in mistake("--placement", "up", options=EVERY)


def test_help_names_every_benchmark(capsys):
    assert main(["--help"]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("  bench "))
    assert sorted(line.partition(": ")[2].split(", ")) == sorted(KINDS)


@pytest.mark.sample(1)
@pytest.mark.parametrize("command", ["inpaint", "generate", "sweep", "bench", "doctor"])
def test_cores_are_shared_before_libraries_are_imported(command):
    """Which count the cores when they are imported: how many ranks share them is known once the options are read."""
    script = f"import sys, {MODULES[command]}; print({{'numpy', 'scipy', 'torch'}} & {{*sys.modules}})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "set()\n"), done.stderr


HEAVY = "{'torch', 'diffusers', 'transformers', 'scipy', 'skimage', 'matplotlib', 'jinja2', 'jsonargparse'}"


@pytest.mark.parametrize(
    "script",
    [
        "main.main(['--help'])",
        "inpaint.find_tasks(inpaint.parse('inpaint', '', inpaint.with_settings(inpaint.OPTIONS), ['--input', sample]))",
    ],
)
def test_help_and_reading_inputs_import_neither_torch_nor_what_draws_and_judges(script):
    """Ranks import what they need when they need it, and the reports' libraries once they are written."""
    sample = str(SAMPLES / "tooth.tif")
    modules = "from cocodiff.cli import main; from cocodiff_eval.cli import inpaint"
    script = f"import sys; {modules}; sample = {sample!r}; {script}"
    done = subprocess.run(
        [sys.executable, "-c", f"{script}; print({HEAVY} & {{*sys.modules}})"], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["set()"]), done.stderr


def test_help_of_a_sweep_names_the_formats(capsys):
    with pytest.raises(SystemExit):
        main(["sweep", "--help"])
    assert "a folder of TIFF files" in (told := " ".join(capsys.readouterr().out.split())) and "OME-Zarr" in told


def test_a_range_and_a_bound_in_a_settings_file_are_what_they_are_on_the_command_line(tmp_path):
    options = (*OPTIONS, Option("slices", "which"), Option("quality", "a bound", numbers=True))
    (tmp_path / "run.yaml").write_text("input: a.png\nslices: 1:2\nquality: 50\nsteps: 62\n")
    of_file = parse("inpaint", "", options, ("--config", str(tmp_path / "run.yaml")))
    assert of_file == parse(
        "inpaint", "", options, ["--input", "a.png", "--slices", "1:2", "--quality", "50", "--steps", "62"]
    )
    (tmp_path / "run.yaml").write_text("input: a.png\nsteps: 1:2\n")
    assert "steps: '1:2' is not of type int" in mistake("--config", str(tmp_path / "run.yaml"))


def test_words_in_the_place_of_a_number_and_empty_names(tmp_path):
    options = with_settings((*PARTITION_OPTIONS, *OPTIONS, Option("truth", "the original")))
    assert "--replicas 'two': give a number that divides the ranks, or auto" in mistake(
        "--input", "a.png", "--replicas", "two", options=options
    )
    assert "--input '': an empty name" in mistake("--input", "a.png", "", options=options)
    assert "--truth '': an empty name" in mistake("--input", "a.png", "--truth", "", options=options)
    (tmp_path / "run.yaml").write_text("input: a.png\nreplicas: two\n")
    assert "give a number that divides" in mistake("--config", str(tmp_path / "run.yaml"), options=options)


@pytest.mark.parametrize(
    ("command", "headings"),
    [
        ("inpaint", ["data:", "restoring:", "ranks:", "results:"]),
        ("sweep", ["data:", "restoring:", "ranks:", "results:"]),
        ("generate", ["images:", "ranks:", "results:"]),
        ("train", ["data:", "training:", "ranks:", "results:"]),
    ],
)
def test_help_is_short_and_grouped_and_a_long_one_shows_every_option(monkeypatch, capsys, command, headings):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main([command, "--help"])
    short = capsys.readouterr().out.splitlines()
    assert len(short) <= 60
    assert [line for line in short if line in (*headings, "for experts:")] == headings
    with pytest.raises(SystemExit):
        main([command, "--help-all"])
    shown = set(re.findall(r"^  --(\w+)", capsys.readouterr().out, re.MULTILINE))
    flags = {one.name for one in settings_of(Config).values() if one.given == "machine"}
    own = {one.name for one in import_module(f"cocodiff_eval.cli.{command}").OPTIONS}
    assert shown >= own | flags | {"config"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--no-exat",), "unknown option --no_exat, did you mean no_exact?"),
        (("--exact", "maybe"), "argument --exact: invalid choice: 'maybe'"),
        (("--no-exact", "true"), "unrecognized arguments: true"),
    ],
)
def test_mistakes_with_flags(words, said):
    assert said in mistake("--input", "a", *words)
