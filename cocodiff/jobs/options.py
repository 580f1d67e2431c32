"""The parser of a subcommand's options, on the command line and in a YAML file. Errors are one line with the remedy."""

from __future__ import annotations

import re
import reprlib
from argparse import SUPPRESS, Action, ArgumentParser, HelpFormatter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from cocodiff.config.config import Config, preset_names, read_yaml
from cocodiff.config.errors import UserError, check_choice, check_keys, suggestion
from cocodiff.config.registry import RECORDS, load
from cocodiff.config.setting import Option, settings_of
from cocodiff.jobs.record import FOUND, beside_the_record

CONFIG = Option("config", "YAML file with any of the options")
RANKS = Option("ranks", "local ranks to start; leave away under mpiexec or torchrun", type=int)
LOG_LEVEL = Option("log_level", "library messages to show", "error", choices=("debug", "info", "warning", "error"))
RUN_OPTIONS = (RANKS, Option("quiet", "no progress bars", False, type=bool), LOG_LEVEL)
PARTITION_OPTIONS = (
    Option(
        "parallel",
        "how ranks are divided (to replicas and guidance branches): auto (memory first, then the least predicted time "
        "of the whole job) or off (one replica, guidance as given or 1)",
        "auto",
        choices=("auto", "off"),
    ),
    Option(
        "replicas",
        "sets of ranks with images of their own: a number that divides the ranks, or auto",
        "auto",
        type=int | str,
        choices=("auto",),
        wanted="a number that divides the ranks, or auto",
    ),
    Option("dry_run", "say partition, memory and predicted time; start nothing", False, type=bool),
)
RESUME = Option("resume", "go on with a run into the same folder that did not end; else start one", False, type=bool)
JOB_OPTIONS = (
    Option("overwrite", "replace the results of an earlier run", False, type=bool),
    RESUME,
    *PARTITION_OPTIONS,
    *RUN_OPTIONS,
)
# Options that --help shows for a job, under these headings and after the job's own; --help-all also shows the others.
HEADINGS = {
    "ranks": "ranks preset parallel replicas dry_run machine device exchange codec guidance_parallel vae compile",
    "results": "out format keep_samples exact quality overwrite resume report_only quiet",
}
FILES = ("input", "mask", "truth", "image", "out")  # options that name files or folders: "" is refused
# Largest number for each option. A larger one is a typing error: no memory holds such schedules, batches or images.
MOST = {"steps": 10**6, "batch": 10**6, "ranks": 10**6, "nodes": 10**5, "samples": 1000, "branches": 100, "fps": 1000}
MOST |= dict.fromkeys(("height", "width", "size", "frames"), 2**16)


def engine_record() -> type[Config]:
    """Return the dataclass whose fields are the engine's settings: `Config`, or a class that the registry has instead.

    The flags of commands, the keys of settings files and of sweeps, and the engines that commands start follow from it.
    """
    return cast("type[Config]", load(RECORDS, "engine"))


def with_settings(own: Sequence[Option], wanted: Callable[[Option], bool] = lambda setting: True) -> tuple[Option, ...]:
    """Return all options of a command that starts an engine: its own, then a flag for each of the engine's settings.

    A setting that has the name of one of the command's own options gets no flag. Nor has one that only code can give.

    Args:
        own: the command's own options
        wanted: function that is True for the settings to include; by default all
    """
    flags = [one for one in settings_of(engine_record()).values() if one.given != "code"]
    return beside(own, [_flag(one) for one in flags if wanted(one)])


def beside(own: Sequence[Option], others: Iterable[Option]) -> tuple[Option, ...]:
    """Return a command's own options, then those of `others` whose names none of its own options has."""
    names = {option.name for option in own}
    return (*own, *(one for one in others if one.name not in names))


def _flag(setting: Option) -> Option:
    """Return the option of the command line by which users give a setting of the engine.

    Its default is None, since the preset's value is used. Settings that describe the machine keep their own default.
    """
    if setting.given == "machine":
        return setting
    told = "".join(f"; with {other} {' or '.join(values)}" for other, *values in filter(None, [setting.only_with]))
    return replace(setting, default=None, help=f"{setting.help}{told} (default: the preset's)")


def parse(
    command: str,
    about: str,
    options: Sequence[Option],
    words: Sequence[str],
    sections: Sequence[str] = (),
    headings: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Return the values of a command's options by name: the command line's, else those of --config, else defaults.

    `--any-key` and `--any_key` are the same. Booleans are `--key`, `--no_key`, or `--key true` or `false`. Raise
    UserError for unknown options and keys (with a suggestion), wrong types and missing values. With --help, print the
    help and exit.

    Args:
        command: words after "cocodiff", for help and errors
        about: what the command does, for its help
        options: the options it takes
        words: the command line after the command
        sections: keys that only the file of --config may have; their values are returned unchecked, None if absent
        headings: for a job, the text of names of options, separated by spaces, that --help shows under each heading,
            before those of HEADINGS; None to show all options
    """
    full = headings is None or not {"--help-all", "--help_all"}.isdisjoint(words)
    parser = _parser(command, about, options, {**headings, **HEADINGS} if headings else {}, full)
    given = _of_words(parser, options, words)
    values = {option.name: option.default for option in options} | dict.fromkeys(sections)
    if "config" in given:
        path = given.pop("config")
        of_file = _from_file(path, options, sections)
        # a sweep, and a run with --overwrite, keeps its folder; another run from its own run.yaml gets a new one
        kept = sections or given.get("overwrite")
        values |= of_file if kept else beside_the_record(of_file, path, given.get("resume", False))
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
    """Return the engine's settings that a user has given, by name.

    values: values of a command's options, by name, from `parse`; None for those that were not given
    """
    flags = [name for name, one in settings_of(engine_record()).items() if one.given != "code"]
    return {name: values[name] for name in flags if values.get(name) is not None}


def preset_configs(values: dict[str, Any]) -> dict[str, Config]:
    """Return the engine's settings for each preset that --preset names (A,B or A B), by the preset's name.

    Settings that are given as options replace those of each preset. Raise UserError for an unknown preset, or if none
    is named.

    Args:
        values: values of the command's options, by name; `preset` is a list of words
    """
    names = list(dict.fromkeys(name for word in values["preset"] for name in word.split(",") if name))
    for name in names:
        check_choice("preset", name, preset_names())
    if not names:
        raise UserError(f"--preset {' '.join(values['preset'])!r} names none; choose from {', '.join(preset_names())}")
    configs = {name: engine_record().preset(name, **engine_settings(values)) for name in names}
    if values.get("quality") is None:  # which sets others itself
        check_effects(engine_settings(values), configs.values(), "--")
    return configs


def check_effects(given: Iterable[str], configs: Collection[Config], where: str) -> None:
    """Raise UserError if a setting that a user gives has no effect in any of the settings that result.

    Args:
        given: names of the settings
        configs: all settings, for each preset
        where: the beginning of the error, before the setting's name
    """
    for name in given:
        other, *values = settings_of(engine_record())[name].only_with or (name,)
        found = dict.fromkeys(str(getattr(config, other)) for config in configs)
        if other != name and found.keys().isdisjoint([*values, "auto"]):  # auto may choose one of the values
            said = f"{where}{name} does nothing with {other} {' or '.join(found)}"
            raise UserError(f"{said}: add {other}: {' or '.join(values)}")


def check_counts(values: dict[str, Any], *names: str) -> None:
    """Raise UserError if one of the named options has a value below 1, or above its limit in MOST (else 10**9).

    Args:
        values: values of the command's options, by name: a number, a list of numbers or None each
        names: the options to check
    """
    for name in names:
        most = MOST.get(name, 10**9)
        for value in values[name] if isinstance(values[name], list) else [values[name]]:
            if value is not None and not 1 <= value <= most:
                said = "at least 1 is needed" if value < 1 else f"at most {most:,} are possible"
                raise UserError(f"--{name} {_shown(value)}: {said}")


def check_strength(strength: float, steps: Sequence[int]) -> None:
    """Raise UserError if the option --strength is not in (0, 1], or makes a schedule of more than MOST["steps"] steps.

    Args:
        strength: share of the denoising schedule that runs, its end: inpainting then starts from less noise
        steps: the numbers of denoising steps of the job's runs, which are that share of their schedules
    """
    if not 0 < strength <= 1:
        raise UserError(f"--strength {strength}: give a number above 0 and up to 1")
    if max(steps) / strength > MOST["steps"]:
        least = max(steps) / MOST["steps"]
        whole = f"{max(steps)} steps that run would be the end of a schedule of more than {MOST['steps']:,}"
        raise UserError(f"--strength {strength:g}: {whole}; give at least {least:g}")


def _check_number_or_word(option: Option, value: Any) -> None:
    """Raise UserError if a text given for an option is neither one of its words nor a number of at most 18 digits.

    Args:
        option: an option that takes a whole number or a word, such as "auto"
        value: its value; other values than texts are accepted
    """
    if isinstance(value, str) and value not in option.words and not re.fullmatch(r"[0-9]{1,18}", value):
        said = "not a whole number of at most 18 digits" if value.isdigit() else f"give {option.wanted}"
        raise UserError(f"--{option.name} {value[:20]!r}: {said}")


class _Parser(ArgumentParser):
    """A parser of command lines for which `-` and `_` in options' names are the same.

    Words that begin with one hyphen, as -1000,3000, are values. A mistake raises UserError instead of exiting.
    """

    def _parse_optional(self, arg_string: str) -> Any:
        """Return argparse's options for a word of the command line; None if the word is a value."""
        name, equals, value = arg_string.partition("=")
        long = f"--{name[2:].replace('-', '_')}{equals}{value}"
        return super()._parse_optional(long) if name.startswith("--") else None

    def error(self, message: str) -> Any:
        """Raise UserError with argparse's message on a wrong command line, as one line."""
        raise UserError(f"{' '.join(message.split())}; see {self.prog} --help")


class _Help(HelpFormatter):
    """A formatter of --help that shows a boolean option as `--x`, and an option of several values as `--x X ...`."""

    def _format_args(self, action: Action, default_metavar: str) -> str:
        """Return the placeholder for an option's values in --help: "" for booleans, "X ..." for several values."""
        plain = super()._format_args(action, default_metavar)
        return {"?": "", "+": f"{plain.partition(' [')[0]} ..."}.get(str(action.nargs), plain)


def _parser(
    command: str, about: str, options: Sequence[Option], headings: Mapping[str, str], full: bool
) -> ArgumentParser:
    """Return the parser of a command line for a command's options.

    Args:
        command: words after "cocodiff"
        about: what the command does, for its help
        options: the options it takes
        headings: text with names of options, separated by spaces, by the heading of the help under which they stand;
        all
            others follow
        full: True to show all options in the help, each with its whole text
    """
    needed = "".join(f" --{option.name} {option.name.upper()}" for option in options if option.required)
    more = "" if full else " --help-all shows all options, and all that is said of each."
    parser = _Parser(
        prog=f"cocodiff {command}",
        usage=f"%(prog)s{needed} [options]",
        description=about,
        epilog=f"--config FILE: YAML with any of the options. Flags: --x, --no-x, or --x true or false.{more}",
        formatter_class=partial(_Help, max_help_position=28),
        argument_default=SUPPRESS,
        add_help=False,
        allow_abbrev=False,
    )
    parser.add_argument("-h", "--help", "--help_all", action="help", help=SUPPRESS)
    titled = [(parser.add_argument_group(title), names.split()) for title, names in headings.items()]
    group_of = {name: group for group, names in titled for name in names}
    others = parser.add_argument_group("for experts" if headings else "options")
    for option in (CONFIG, *options):
        add = group_of.get(option.name, others).add_argument
        extra: dict[str, Any] = {"choices": option.words} if option.closed else {}
        if option.type is bool:
            add(f"--no_{option.name}", dest=option.name, action="append_const", const="false", help=SUPPRESS)
            extra = {"nargs": "?", "const": "true", "type": str.lower, "choices": ("true", "false")}
        if not full and not (option.closed and len(",".join(option.words)) < 15):
            extra["metavar"] = {int: "N", float: "X", int | str: "N"}.get(option.type, "NAME")
        extra |= {"nargs": "+", "action": "extend"} if option.many else {"action": "append"}
        said = option.help if full else re.split("[:;] | \\(", option.help)[0]
        said += "" if option.default in (None, False, "") or option.many else f" (default: {option.default})"
        shown = full or option.name in group_of
        add(f"--{option.name}", help=said.replace("%", "%%") if shown else SUPPRESS, **extra)
    return parser


def _of_words(parser: ArgumentParser, options: Sequence[Option], words: Sequence[str]) -> dict[str, Any]:
    """Return the values on a command line by the option's name, each in its option's type.

    Raise UserError for an unknown option, a value of a wrong type, or one option given twice.

    Args:
        parser: the parser that `_parser` returns for these options
        options: the options of the command
        words: the command line after the command
    """
    found, extra = parser.parse_known_args(words)
    if "-h" in extra:
        parser.print_help()
        parser.exit()
    by_name = {option.name: option for option in (CONFIG, *options)}
    for word in extra:
        name = word[2:].partition("=")[0].replace("-", "_")
        if word.startswith("--"):
            known = [*by_name, *(f"no_{option.name}" for option in options if option.type is bool)]
            parser.error(f"unknown option --{name}{suggestion(name, known)}")
    if extra:
        parser.error(f"unrecognized arguments: {' '.join(extra)}")
    for name, given in vars(found).items():
        if len(given) > 1 and not by_name[name].many:  # argparse itself would silently take the last
            raise UserError(f"--{name} is given more than once: it takes one value, give it once")
    typed = {name: [_typed(by_name[name], word, parser) for word in given] for name, given in vars(found).items()}
    return {name: given if by_name[name].many else given[0] for name, given in typed.items()}


def _typed(option: Option, word: str, parser: ArgumentParser) -> Any:
    """Return a word of the command line as a bool, number or text, by its option's type. Raise UserError if it is none.

    parser: the command's parser, which raises the error
    """
    if option.type is bool:
        return word == "true"
    for kind in option.kinds:
        with suppress(ValueError):
            return kind(word)
    return parser.error(f"--{option.name} {word[:20]}: not a number")


def _from_file(path: str, options: Sequence[Option], sections: Sequence[str]) -> dict[str, Any]:
    """Return the values of options in a YAML file (--config), by name, checked as those of the command line are.

    Keys without a value (null) are left out. Raise UserError for an unknown key or a wrong value.

    Args:
        path: the file
        options: the options of the command
        sections: other keys that the file may have, whose values are not checked
    """
    values = read_yaml(Path(path))
    by_name = {option.name: option for option in options}
    if "quality" in by_name:
        values.pop(FOUND, None)
    check_keys(map(str, values), [*sections, *by_name], path)
    return {
        name: value if name in sections else _checked(path, by_name[name], value, by_name[name].many)
        for name, value in values.items()
        if value is not None
    }


def _checked(path: str, option: Option, value: Any, many: bool = False) -> Any:
    """Return the value of an option in a settings file, in the option's type. Raise UserError if it has another type.

    Args:
        path: the file, for errors
        option: the option
        value: its value in the file
        many: True if the option takes several values: a list is returned, also for a single value
    """
    if many:
        return [_checked(path, option, one) for one in (value if isinstance(value, list) else [value])]
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
        near = suggestion(str(value), option.words)
        raise UserError(f"{path}: {option.name}: {_shown(value)}{near}; choose from {', '.join(option.words)}")
    return value


def _shown(value: Any) -> str:
    """Return a wrong value for an error, as Python writes it, but shortened.

    A value from a file may have any number of digits, or be a list that contains itself.
    """
    if type(value) is int and abs(value) >= 2**63:
        return "a number of more than 64 bits"
    shown = reprlib.Repr()
    shown.maxstring = shown.maxother = 100
    return shown.repr(value)
