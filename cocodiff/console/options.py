"""Options of a subcommand from the command line and a YAML file, with errors that are one line and name the remedy."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from jsonargparse import SUPPRESS, ArgumentError, ArgumentParser

from cocodiff.config import Config, preset_names, read_yaml
from cocodiff.errors import UserError, check_choice, check_keys, suggestion
from cocodiff.outputs.settings import FOUND, beside_the_record
from cocodiff.registry import RECORDS, load
from cocodiff.setting import Option, settings_of

RANKS = Option("ranks", "local ranks to start; leave away under mpiexec or torchrun", type=int)
LOG_LEVEL = Option("log_level", "library messages to show", "error", choices=("debug", "info", "warning", "error"))
RUN_OPTIONS = (RANKS, Option("quiet", "no progress bars", False, type=bool), LOG_LEVEL)
DEAL_OPTIONS = (
    Option(
        "parallel",
        "how ranks are dealt to replicas and guidance branches: auto (memory first, then the least predicted time of "
        "the whole job) or off (one replica, guidance as given or 1)",
        "auto",
        choices=("auto", "off"),
    ),
    Option(
        "replicas",
        "sets of ranks that each work on images of their own: a number that divides the ranks, or auto",
        "auto",
        type=int | str,
        choices=("auto",),
        least=1,
        wanted="a number that divides the ranks, or auto",
    ),
    Option("dry_run", "say the deal of the ranks, memory and predicted time, and start nothing", False, type=bool),
)
RESUME = Option(
    "resume",
    "go on with what a run into the same folder that did not end has finished, with the same settings and inputs; "
    "where there is none, start afresh",
    False,
    type=bool,
)
FILES = ("input", "mask", "truth", "image", "out")  # name files or folders: an empty name is the current folder
MOST_OF_OTHERS = 10**9
# Beyond these a number is a slip of the pen: schedules, batches and images of such sizes fit in no memory.
MOST = {"steps": 10**6, "batch": 10**6, "ranks": 10**6, "nodes": 10**5, "samples": 1000, "branches": 100, "fps": 1000}
MOST |= dict.fromkeys(("height", "width", "size", "frames"), 2**16)


def engine_record() -> type[Config]:
    """The settings that commands give flags to, read from files, sweep over and start engines with: `Config`, or the
    dataclass derived from it that the registry names in its place."""
    return cast("type[Config]", load(RECORDS, "engine"))


def with_settings(own: Sequence[Option], wanted: Callable[[Option], bool] = lambda setting: True) -> tuple[Option, ...]:
    """A command's own options, and those of the engine's settings that it has none of the same name for."""
    names = {option.name for option in own}
    flags = [one for one in settings_of(engine_record()).values() if one.given != "code" and one.name not in names]
    return (*own, *(_flag(one) for one in flags if wanted(one)))


def _flag(setting: Option) -> Option:
    """A setting's flag. One that presets say has no default of its own: where it is not given, the preset's holds."""
    if setting.given == "machine":
        return setting
    told = "".join(f"; with {other} {' or '.join(values)}" for other, *values in filter(None, [setting.only_with]))
    return replace(setting, default=None, help=f"{setting.help}{told} (default: the preset's)")


def parse(
    command: str, about: str, options: Sequence[Option], words: Sequence[str], sections: Sequence[str] = ()
) -> dict[str, Any]:
    """The options' values: defaults, then the file named by `--config`, then the command line.

    `--any-key` and `--any_key` are the same. Booleans are `--key`, `--no_key` or `--key true`.
    sections: keys that only the file may have; they are returned as they stand there, None where they do not.
    Raises UserError for unknown options and keys (with a suggestion), wrong types and missing values.
    """
    parser = ArgumentParser(prog=f"cocodiff {command}", description=about, exit_on_error=False)
    parser.add_argument("--config", help="YAML file with any of the options below")
    for option in options:
        # words that are listed have no type besides: the help would show a function's address for it
        extra: dict[str, Any] = {"choices": list(option.words)} if option.closed else {"type": option.type}
        if option.many:
            extra |= {"nargs": "+", "action": "extend"}
        shown = "" if option.default in (None, False, "") or option.many else f" (default: {option.default})"
        parser.add_argument(f"--{option.name}", default=SUPPRESS, help=option.help + shown, **extra)
    given = {key: value for key, value in vars(_parse_words(parser, options, words)).items() if value is not None}
    values = {option.name: option.default for option in options} | dict.fromkeys(sections)
    if "config" in given:
        path = given.pop("config")
        of_file = _from_file(path, options, sections)
        # a sweep goes on where it was
        values |= of_file if sections or given.get("overwrite") else beside_the_record(of_file, path)
    values |= given
    for option in options:
        if option.type == int | str:
            _check_number_or_word(option, values[option.name])
        if option.name in FILES and (values[option.name] == "" or (option.many and "" in (values[option.name] or ()))):
            raise UserError(f"--{option.name} '': an empty name: name a file or a folder, . for the current one")
        if option.required and not values[option.name]:
            raise UserError(f"--{option.name} is missing: {option.help}; see cocodiff {command} --help")
    return values


def engine_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """The engine's settings among the options' values."""
    flags = [name for name, one in settings_of(engine_record()).items() if one.given != "code"]
    return {name: values[name] for name in flags if values.get(name) is not None}


def preset_configs(values: dict[str, Any]) -> dict[str, Config]:
    """The presets that `--preset` names (A,B or A B), each with the engine's settings among the options on top."""
    names = list(dict.fromkeys(name for word in values["preset"] for name in word.split(",") if name))
    for name in names:
        check_choice("preset", name, preset_names())
    if not names:
        raise UserError(f"--preset {' '.join(values['preset'])!r} names none; choose from {', '.join(preset_names())}")
    return {name: engine_record().preset(name, **engine_settings(values)) for name in names}


def check_counts(values: dict[str, Any], *names: str) -> None:
    """Raises UserError for options that are given and below 1, or beyond what any run can have."""
    for name in names:
        for value in values[name] if isinstance(values[name], list) else [values[name]]:
            if value is not None and value < 1:
                raise UserError(f"--{name} {_shown(value)}: at least 1 is needed")
            if value is not None and value > MOST.get(name, MOST_OF_OTHERS):
                raise UserError(f"--{name} {_shown(value)}: at most {MOST.get(name, MOST_OF_OTHERS):,} are possible")


def check_strength(strength: float, steps: Sequence[int]) -> None:
    """Raises UserError for a strength outside (0, 1], and for one so small that the schedule, of which the last
    `steps` run, has more than MOST["steps"]."""
    if not 0 < strength <= 1:
        raise UserError(f"--strength {strength}: give a number above 0 and up to 1")
    if max(steps) / strength > MOST["steps"]:
        least = max(steps) / MOST["steps"]
        raise UserError(
            f"--strength {strength:g}: {max(steps)} steps that run would be the end of a schedule of more than "
            f"{MOST['steps']:,}; give at least {least:g}"
        )


def _check_number_or_word(option: Option, value: Any) -> None:
    """Raises UserError for a word that is none of the option's, and for one that int() has trouble with though it is
    all digits: ² and thousands of them."""
    if not isinstance(value, str) or value in option.words:
        return
    if value.isdigit() and not (value.isascii() and len(value) < 19):
        raise UserError(f"--{option.name} {value[:20]!r}: not a whole number of at most 18 digits")
    if option.words and not value.isdigit():
        wanted = option.wanted or f"a whole number or {', '.join(option.words)}"
        raise UserError(f"--{option.name} {value[:20]!r}: give {wanted}")


def _parse_words(parser: ArgumentParser, options: Sequence[Option], words: Sequence[str]) -> Any:
    known = [option.name for option in options] + ["config"]
    flags = {option.name for option in options if option.type is bool}
    many = {option.name for option in options if option.many}
    normal: list[str] = []
    seen: set[str] = set()
    taker = ""  # the option whose value comes next
    for position, word in enumerate(words):
        if not word.startswith("--"):
            # With an equals sign, as argparse would take -1000,3000 for an option.
            normal.append(f"--{taker}={word}" if taker else word)
            taker = taker if taker in many else ""
            continue
        name, equals, value = word[2:].partition("=")
        name = name.replace("-", "_")
        following = words[position + 1] if position + 1 < len(words) else "--"
        if name.removeprefix("no_") in flags and name not in flags and not equals:
            name, equals, value = name.removeprefix("no_"), "=", "false"
        elif name in flags and not equals and following.lower() not in ("true", "false"):
            equals, value = "=", "true"
        elif name not in known and name not in ("help", ""):
            raise UserError(f"unknown option --{name}{suggestion(name, known)}; see {parser.prog} --help")
        if name in seen - many:  # argparse would silently take the last
            raise UserError(f"--{name} is given more than once: it takes one value, give it once")
        seen.add(name)
        taker = name if name in known and not equals and not following.startswith("--") else ""
        normal += [] if taker else [f"--{name}{equals}{value}"]
    try:
        return parser.parse_args(normal)
    except ArgumentError as error:
        raise UserError(_one_line(str(error), parser.prog)) from error


def _one_line(message: str, program: str) -> str:
    text = " ".join(message.split())
    found = re.match(r'Parser key "(\w+)": Expected a <class \'(\w+)\'>\. Got value: (.*)', text)
    if found:
        text = f"--{found[1]} {found[3]}: not {'a number' if found[2] in ('int', 'float') else 'a ' + found[2]}"
    return f"{text}; see {program} --help"


def _from_file(path: str, options: Sequence[Option], sections: Sequence[str]) -> dict[str, Any]:
    """A settings file's values, checked like those of the command line. A key without a value (null) is not given."""
    values = read_yaml(Path(path))
    by_name = {option.name: option for option in options}
    if "quality" in by_name:
        values.pop(FOUND, None)
    check_keys(map(str, values), [*sections, *by_name], path)
    given = {name: value for name, value in values.items() if value is not None}
    for name, value in given.items():
        if name in sections:
            continue
        option = by_name[name]
        if option.many:
            given[name] = [_checked(path, option, one) for one in (value if isinstance(value, list) else [value])]
        else:
            given[name] = _checked(path, option, value)
    return given


def _checked(path: str, option: Option, value: Any) -> Any:
    """One value of a settings file in the option's type. Raises UserError for others."""
    if option.type is float and type(value) is int and abs(value) < 2**63:
        value = float(value)
    if option.numbers and type(value) in (int, float) and abs(value) < 2**63:
        value = str(value)
    if type(value) not in option.kinds:
        names = " or ".join(kind.__name__ for kind in option.kinds)
        raise UserError(f"{path}: {option.name}: {_shown(value)} is not of type {names}")
    if type(value) is int and abs(value) >= 2**63:
        raise UserError(f"{path}: {option.name}: {_shown(value)} has more than 64 bits; give a smaller number")
    if option.closed and value not in option.words:
        raise UserError(
            f"{path}: {option.name}: {_shown(value)}{suggestion(str(value), option.words)}; "
            f"choose from {', '.join(option.words)}"
        )
    return value


def _shown(value: Any) -> str:
    """A value as Python writes it, shortened: a number may have any number of digits, a list may contain itself."""
    if type(value) is int and abs(value) >= 2**63:
        return "a number of more than 64 bits"
    shown = reprlib.Repr()
    shown.maxstring = shown.maxother = 100
    return shown.repr(value)
