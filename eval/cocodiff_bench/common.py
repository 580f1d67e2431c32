"""The scaffolding of all benchmarks: measuring variants in turn, the rows of `bench.json`, and printing them.

`bench.json` is {"schema": 1, "rows": [...]}, a row for each variant:

    case, variant            what was measured, and in which mode;
    median_s, p10_s, p90_s   seconds of one unit of the benchmark (a step, an attention call), by rank 0's clock;
    n                        number of measurements;
    bytes                    of one unit, by class of link, all ranks together; null if nothing is exchanged;
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
    """Return a benchmark's options and those of all runs, except where the benchmark has its own of that name."""
    return beside(own, (*OUTPUT_OPTIONS, *RUN_OPTIONS))


def of_benchmarks(setting: Option) -> bool:
    """Return True if benchmarks have a flag for a setting of the engine, unless they have an option of that name."""
    return setting.given == "machine" or setting.name in OF_PRESETS


def engine_config(values: Values, preset: str | None = None, **own: Any) -> Config:
    """Return the settings of a variant: its own, over those of a preset if it has one, over those of the machine.

    Raise UserError for values that do not fit.
    """
    record = engine_record()
    of_machine = [name for name, one in settings_of(record).items() if one.given == "machine"]
    shared = {name: values[name] for name in of_machine if name in values}
    return record.preset(preset, **shared | own) if preset else record(**shared | own)


def with_compiled(configs: Mapping[str, Config]) -> dict[str, Config]:
    """Return all variants without compiling, and those that are to be compiled also as "NAME compiled"."""
    plain = {name: config.with_(compile=False) for name, config in configs.items()}
    return plain | {f"{name} compiled": config for name, config in configs.items() if config.compile}


# Measuring ------------------------------------------------------------------------------------------------------------


def meet(transport: Any) -> None:
    """Block until all ranks have called this."""
    transport.values_of_all(None)


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
    """Return the seconds per unit of each variant, by this rank's clock.

    There is one round to warm up, then `--repeats` rounds. Every round runs all variants, each round in another order
    (the same on all ranks). So drift of the machine and after-effects of a variant affect all variants equally.

    Args:
        title: of rank 0's progress bar.
        variants: the functions to time, by name.
        units: number of units in one call of a variant.
        barrier: brings the ranks together before each call, instead of `meet`.
        begin: by variant, a function to call before that.
        traces: are cleared after the warm-up, so that they hold the measured rounds.
    """
    import torch

    def one_round(seed: int) -> dict[str, float]:
        """Time every variant once, in an order that follows from `seed`."""
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
    """Return the seconds of each variant by the clock of the slowest rank, and the bytes that all ranks sent in a mean
    call.

    Bytes are by variant and class of link. All ranks call this; only rank 0's results are complete. See
    `measure_in_turns`.

    Args:
        traces: by variant.
    """
    seconds = measure_in_turns(title, variants, values, transport, barrier=barrier, traces=traces.values())
    slowest = of_slowest_rank(seconds, transport)
    own = {name: trace.bytes() for name, trace in traces.items()}
    of_ranks, calls = transport.gather_object(own) or [own], values["repeats"]
    sent = {name: {link: sum(one[name][link] for one in of_ranks) // calls for link in LINK_CLASSES} for name in own}
    return slowest, sent


def of_slowest_rank(seconds: Mapping[str, list[float]], transport: Any) -> dict[str, list[float]]:
    """Return each measurement as the longest of any rank. All ranks call this; only rank 0's result is complete."""
    of_ranks = transport.gather_object(seconds) or [seconds]
    return {name: [max(turn) for turn in zip(*(one[name] for one in of_ranks), strict=True)] for name in seconds}


# Results --------------------------------------------------------------------------------------------------------------


def rows(
    case: str,
    seconds: Mapping[str, list[float]],
    sent: Mapping[str, Mapping[str, int]],
    references: Mapping[str, Mapping[str, str]],
) -> list[Row]:
    """Return the rows of bench.json.

    Args:
        case: what was measured.
        seconds: measurements by variant.
        sent: bytes by variant and class of link.
        references: for each variant, the variants that it is compared with, by the X of ratio_vs_X.
    """

    def ratio(name: str, to: str) -> float | None:
        """Return the median over turns of `name`'s seconds divided by `to`'s; None if `to` was not measured."""
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
    """Return `references` for `rows` in which all variants are compared with the same ones."""
    return {name: {other.replace(" ", "_"): other for other in others} for name in names}


def say_rows(
    measured: Sequence[Row], unit: str = "", more: Callable[[Row], Sequence[str]] = lambda row: (), title: str = ""
) -> None:
    """Print one case: a line for each row.

    Args:
        unit: word behind the milliseconds.
        more: returns further words about a row, which follow its ratios.
        title: first line; by default the case.
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
    """Format seconds as milliseconds."""
    return f"{seconds * 1e3:.{2 if seconds >= 0.01 else 3}f}"


def publish(
    output: OutputFolder,
    values: Values,
    measured: Sequence[Row],
    files: Mapping[str, Callable[[Path], Any]] | None = None,
) -> None:
    """Write bench.json, the settings that repeat the run, and further `files`, and print where they are.

    Args:
        files: by name, a function that writes to the given path.
    """
    folder = output.open()
    write_document(folder, "bench.json", {"schema": 1, "rows": measured}, values)
    for name, write in (files or {}).items():
        write(folder / name)
    output.publish()
    say("results: " + ", ".join(str(output.final / name) for name in ("bench.json", *(files or {}))))


class SerialGroup:
    """A group that serves one peer at a time. At step s a rank sends to the rank s further on and receives from the one
    s before."""

    receives_ahead = False  # a call lists all its peers, so that they can take turns

    def __init__(self, group: Any) -> None:
        self._inner, self.ranks, self.index = group, group.ranks, group.index

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def send_recv(self, sends: list[tuple[Any, int]], recvs: list[tuple[Any, int]]) -> Any:
        size, pending = len(self.ranks), self._inner.send_recv([], [])
        for step in range(1, size):
            to, source = (self.index + step) % size, (self.index - step) % size
            sent, received = ([one for one in some if one[1] == peer] for some, peer in ((sends, to), (recvs, source)))
            pending = self._inner.send_recv(sent, received)
            pending.wait()
        return pending

    collective = send_recv


class SerialTransport:
    """A transport whose groups serve one peer at a time."""

    group_of: Any = SerialGroup

    def __init__(self, transport: Any) -> None:
        self._inner, self.world = transport, self.group_of(transport.world)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def group(self, ranks: Sequence[int], together: bool | None = None) -> Any:
        return self.group_of(self._inner.group(ranks))
