"""The scaffolding of all benchmarks: measuring variants in turn, the rows of `bench.json`, and printing them.

`bench.json` is {"schema": 1, "rows": [...]}, a row for each variant:

    case, variant            what was measured, and in which mode;
    median_s, p10_s, p90_s   seconds of one unit of the benchmark (a step, an attention call), by rank 0's clock; of
                             alltoall and attention by that of the slowest rank;
    n                        number of measurements;
    bytes                    of one unit, by class of link, all ranks together; null if none are exchanged or counted;
    ratio_vs_X               median of the paired ratios to X, one for each round; null if X was not measured.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from cocodiff.comm.trace import LINK_CLASSES, Trace
from cocodiff.config.config import Config
from cocodiff.config.setting import settings_of
from cocodiff.config.text_table import aligned
from cocodiff.jobs.folder import OutputFolder
from cocodiff.jobs.options import RUN_OPTIONS, Option, beside, engine_record
from cocodiff.jobs.record import write_document
from cocodiff.jobs.terminal import progress_bar, say

Values = dict[str, Any]
Row = dict[str, Any]
OUTPUT_OPTIONS = (
    Option("repeats", "measurements of each variant", 9, type=int),
    Option("out", "folder of bench.json", "bench"),
    Option("overwrite", "replace the results of an earlier run", False, type=bool),
)
TRANSPORT = Option(
    "transport", "how ranks talk", "gloo", choices=("gloo", "host", "mpi", "mpi-rma", "xccl", "ccl", "nccl")
)
# Settings that presets set and benchmarks have flags for.
OF_PRESETS = ("exchange", "exchange_table", "order", "chunks", "vae")


# Settings -------------------------------------------------------------------------------------------------------------


def with_common_options(*own: Option) -> tuple[Option, ...]:
    """Return a benchmark's options and those that all benchmarks have, such as `--repeats`.

    Args:
        own: the benchmark's own options. They replace common ones of the same name.
    """
    return beside(own, (*OUTPUT_OPTIONS, *RUN_OPTIONS))


def of_benchmarks(setting: Option) -> bool:
    """Return True if benchmarks let users give this setting of the engine on the command line.

    It is the test that `with_settings` applies. Settings that a benchmark has an option of its own for are left out
    there.
    """
    return setting.given == "machine" or setting.name in OF_PRESETS


def engine_config(values: Values, preset: str | None = None, **own: Any) -> Config:
    """Return the engine's settings for one variant of a benchmark.

    Raise UserError for values that do not fit together.

    Args:
        values: the command's options. Those that describe the machine become settings.
        preset: name of a preset whose settings precede those of the machine.
        own: settings of the variant alone, which precede all others.
    """
    record = engine_record()
    of_machine = [name for name, one in settings_of(record).items() if one.given == "machine"]
    shared = {name: values[name] for name in of_machine if name in values}
    return record.preset(preset, **shared | own) if preset else record(**shared | own)


def with_compiled(configs: Mapping[str, Config]) -> dict[str, Config]:
    """Return the settings of a benchmark's variants, with those to compile in two forms.

    All variants are returned without compiling. Those that ask for it are returned as "NAME compiled" too.

    Args:
        configs: settings by the variants' names.
    """
    plain = {name: config.with_(compile=False) for name, config in configs.items()}
    return plain | {f"{name} compiled": config for name, config in configs.items() if config.compile}


# Measuring ------------------------------------------------------------------------------------------------------------


def meet(transport: Any) -> None:
    """Block until all ranks have called this.

    Args:
        transport: this rank's connection to the other ranks.
    """
    transport.all_gather_values(None)


def measure_in_turns(
    title: str,
    variants: Mapping[str, Callable[[], Any]],
    values: Values,
    transport: Any,
    *,
    units: int = 1,
    barrier: Callable[[], Any] | None = None,
    begin: Mapping[str, Callable[[], Any]] | None = None,
    traces: Iterable[Trace] = (),
) -> dict[str, list[float]]:
    """Measure all variants of a benchmark. Return, by variant, the seconds of each round by this rank's clock.

    Seconds are those of one unit, such as a step. There is one round to warm up, then `--repeats` rounds. Every round
    runs all variants, each round in another order (the same on all ranks). So drift of the machine and after-effects of
    a variant affect all variants equally.

    Args:
        title: title of rank 0's progress bar.
        variants: the functions to time, by name.
        values: the command's options, of which `repeats` and `quiet` are used.
        transport: this rank's connection to the other ranks.
        units: number of units in one call of a variant.
        barrier: function called before each call of a variant, which returns when all ranks have called it. Default:
            `meet`.
        begin: by variant, a function to call before `barrier`; it is not timed.
        traces: traces to clear after the warm-up, so that they hold only the measured rounds.
    """
    import torch

    def one_round(seed: int) -> dict[str, float]:
        """Time every variant once, in an order that follows from `seed`. Return the seconds of one unit, by variant."""
        found = {}
        for name in random.Random(seed).sample(list(variants), len(variants)):
            if begin and name in begin:
                begin[name]()
            together()
            started = time.perf_counter()
            variants[name]()
            found[name] = (time.perf_counter() - started) / units
            bar.update()
        return found

    together, shown = barrier or partial(meet, transport), not values["quiet"] and not transport.rank
    with torch.no_grad(), progress_bar(title, (values["repeats"] + 1) * len(variants), shown) as bar:
        one_round(0)
        for trace in traces:
            trace.clear()
        rounds = [one_round(number) for number in range(values["repeats"])]
    return {name: [of_round[name] for of_round in rounds] for name in variants}


def measure_slowest(
    title: str,
    variants: Mapping[str, Callable[[], Any]],
    values: Values,
    transport: Any,
    traces: Mapping[str, Trace],
    barrier: Callable[[], Any] | None = None,
) -> tuple[dict[str, list[float]], dict[str, dict[str, int]]]:
    """Measure all variants of a benchmark in turn, on all ranks. Return two mappings by variant: seconds and bytes.

    Seconds are a list, one for each round, by the clock of the slowest rank. Bytes are those that all ranks sent in a
    mean call, by class of link. All ranks call this; only rank 0's results are complete.

    Args:
        title: title of rank 0's progress bar.
        variants: the functions to time, by name.
        values: the command's options, of which `repeats` and `quiet` are used.
        transport: this rank's connection to the other ranks.
        traces: the traces that count bytes, by variant. Variants without a trace have no bytes.
        barrier: function called before each call of a variant, which returns when all ranks have called it.
    """
    seconds = measure_in_turns(title, variants, values, transport, barrier=barrier, traces=traces.values())
    slowest = of_slowest_rank(seconds, transport)
    own = {name: trace.bytes() for name, trace in traces.items()}
    of_ranks, calls = transport.gather_values(own) or [own], values["repeats"]
    sent = {name: {link: sum(one[name][link] for one in of_ranks) // calls for link in LINK_CLASSES} for name in own}
    return slowest, sent


def of_slowest_rank(seconds: Mapping[str, list[float]], transport: Any) -> dict[str, list[float]]:
    """Return, by variant, the longest seconds of each measurement on any rank.

    All ranks call this; only rank 0's result is complete.

    Args:
        seconds: this rank's measurements by variant, in the same order on all ranks.
        transport: this rank's connection to the other ranks.
    """
    of_ranks = transport.gather_values(seconds) or [seconds]
    return {name: [max(turn) for turn in zip(*(one[name] for one in of_ranks), strict=True)] for name in seconds}


# Results --------------------------------------------------------------------------------------------------------------


def rows(
    case: str,
    seconds: Mapping[str, list[float]],
    sent: Mapping[str, Mapping[str, int]],
    references: Mapping[str, Mapping[str, str]],
) -> list[Row]:
    """Return the rows of bench.json, one for each variant: median and spread of its seconds, bytes, and ratios.

    Args:
        case: what was measured, for example the model and the number of ranks.
        seconds: seconds of each round, by variant.
        sent: bytes by variant and class of link.
        references: by variant, the variants that it is compared with. Key X gives the column ratio_vs_X.
    """

    def ratio(name: str, to: str) -> float | None:
        """Return the median over rounds of `name`'s seconds divided by `to`'s; None if `to` was not measured."""
        if to not in seconds:
            return None
        return statistics.median(a / b for a, b in zip(seconds[name], seconds[to], strict=True))

    result = []
    for name, values in seconds.items():
        cuts = statistics.quantiles(values, n=10, method="inclusive") if len(values) > 1 else values * 9
        row = {"case": case, "variant": name, "median_s": statistics.median(values), "p10_s": cuts[0]}
        row |= {"p90_s": cuts[-1], "n": len(values), "bytes": sent.get(name)}
        result.append(row | {f"ratio_vs_{of}": ratio(name, to) for of, to in references.get(name, {}).items()})
    return result


def compared_with(names: Sequence[str] | Mapping[str, Any], *others: str) -> dict[str, dict[str, str]]:
    """Return the mapping `references` for `rows`, by which all variants are compared with the same ones.

    Args:
        names: the variants of the benchmark.
        others: the variants to compare each of them with.
    """
    return {name: {other.replace(" ", "_"): other for other in others} for name in names}


def say_rows(
    measured: Sequence[Row], unit: str = "", more: Callable[[Row], Sequence[str]] = lambda row: (), title: str = ""
) -> None:
    """Print the rows of a benchmark's results: a line for each, with its median, spread and ratios.

    Args:
        measured: the rows, as `rows` returns them.
        unit: word behind the milliseconds, such as "a step".
        more: function of a row that returns more text about it, in parts, which follows its ratios.
        title: first line; by default what the rows measured.
    """
    say(title or measured[0]["case"])
    table = []
    for row in measured:
        ratios = [key for key in row if key.startswith("ratio_vs_") and row[key] is not None]
        about = [f"{key.removeprefix('ratio_')} {row[key]:.3f}" for key in ratios]
        spread = f"(p10 {_ms(row['p10_s'])}, p90 {_ms(row['p90_s'])}, n {row['n']})" if row["n"] else ""
        table.append(
            [row["variant"], _ms(row["median_s"]), f"ms {unit}".strip(), spread, "  ".join([*about, *more(row)])]
        )
    say("\n".join(aligned(table, "<><<<", "  ")))


def _ms(seconds: float) -> str:
    """Format seconds as milliseconds, without the unit."""
    return f"{seconds * 1e3:.{2 if seconds >= 0.01 else 3}f}"


def publish(
    output: OutputFolder,
    values: Values,
    measured: Sequence[Row],
    files: Mapping[str, Callable[[Path], Any]] | None = None,
) -> None:
    """Write bench.json and the settings that repeat the run into the results' folder. Print where the files are.

    Args:
        output: folder of the results.
        values: the command's options.
        measured: the rows of bench.json.
        files: further files, by name. Each value is a function that writes the file to the path it gets.
    """
    folder = output.open()
    write_document(folder, "bench.json", {"schema": 1, "rows": measured}, values)
    for name, write in (files or {}).items():
        write(folder / name)
    output.publish()
    say("results: " + ", ".join(str(output.final / name) for name in ("bench.json", *(files or {}))))


class SerialGroup:
    """A group of ranks whose messages are exchanged with one peer at a time, as a baseline.

    At step s a rank sends to the rank that is s places after it, and receives from the one s places before it.
    """

    receives_ahead = False  # a call lists all its peers, so that they can take turns

    def __init__(self, group: Any) -> None:
        """Wrap a group of ranks. All that is not defined here is the group's own."""
        self._inner, self.ranks, self.index = group, group.ranks, group.index

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def send_recv(self, sends: list[tuple[Any, int]], recvs: list[tuple[Any, int]]) -> Any:
        """Send and receive tensors, with one peer after the other, and wait for each. Return the messages to the last
        peer: callers wait for what a group returns, though all have arrived here.

        Args:
            sends: pairs of a tensor and the index of the peer that it goes to.
            recvs: pairs of a tensor to receive into and the index of the peer that it comes from.
        """
        size, pending = len(self.ranks), self._inner.send_recv([], [])
        for step in range(1, size):
            to, source = (self.index + step) % size, (self.index - step) % size
            sent, received = ([one for one in some if one[1] == peer] for some, peer in ((sends, to), (recvs, source)))
            pending = self._inner.send_recv(sent, received)
            pending.wait()
        return pending

    collective = send_recv


class SerialTransport:
    """A transport whose groups exchange messages with one peer at a time, see `SerialGroup`."""

    group_of: Any = SerialGroup  # class of the groups it makes

    def __init__(self, transport: Any) -> None:
        """Wrap a transport. All that is not defined here is the transport's own."""
        self._inner, self.world = transport, self.group_of(transport.world)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def group(self, ranks: Sequence[int], together: bool | None = None) -> Any:
        """Return a group of some ranks that exchanges messages with one peer at a time.

        Args:
            ranks: numbers of the members.
            together: not used.
        """
        return self.group_of(self._inner.group(ranks))

    def part(self, ranks: Sequence[int]) -> Any:
        """Return a transport of some of the ranks, whose groups are of this kind too.

        Args:
            ranks: its ranks, see `Transport.part`.
        """
        from cocodiff.comm.transport import SubTransport  # imports torch

        whole: Any = self
        return SubTransport(whole, ranks)
