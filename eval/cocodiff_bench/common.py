"""What all benchmarks share: fair turns for the variants, rows of `bench.json`, and their lines on the terminal.

`bench.json` is {"schema": 1, "rows": [...]}, a row for each variant:

    case, variant            what was measured, and in which mode
    median_s, p10_s, p90_s   seconds of one unit of the benchmark (a step, an attention call), rank 0's clock
    n                        measurements
    bytes                    per link class, of one unit, all ranks together; null where nothing is exchanged
    ratio_vs_X               median of the paired ratios to X, one for each round; null where X was not measured
    layers                   `bench attention`: kind of layer -> its times, see `trace_summary.AttentionTimes`
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cocodiff.commands.options import RUN_OPTIONS, Option, engine_record
from cocodiff.commands.outputs import OutputFolder, write_settings
from cocodiff.commands.terminal import say
from cocodiff.setting import settings_of

Values = dict[str, Any]
OUTPUT_OPTIONS = (
    Option("repeats", "measurements of each variant", 9, type=int),
    Option("out", "folder of bench.json", "bench"),
    Option("overwrite", "replace the results of an earlier run", False, type=bool),
)
OF_PRESETS = ("exchange", "exchange_table", "order", "chunks", "vae")


@dataclass(frozen=True)
class Benchmark:
    """A kind of benchmark: `BENCHMARK` of the module `bench_KIND`.

    check: raises UserError for values that cannot be measured on so many ranks (None: only the launcher knows).
    measure: one rank's part, called with the values, the results' folder and the rank's transport.
    """

    about: str
    options: tuple[Option, ...]
    check: Callable[[Values, int | None], None]
    import_before_fork: Callable[[Values], None]
    measure: Callable[[Values, OutputFolder, Any], None]


def with_common_options(*own: Option) -> tuple[Option, ...]:
    """A benchmark's options and those of all runs, save where the benchmark has its own of that name."""
    names = {option.name for option in own}
    return (*own, *(option for option in (*OUTPUT_OPTIONS, *RUN_OPTIONS) if option.name not in names))


def of_benchmarks(setting: Option) -> bool:
    """Whether benchmarks have a flag for a setting of the engine where they have no option of that name."""
    return setting.given == "machine" or setting.name in OF_PRESETS


def machine_settings(values: Values) -> Values:
    """The engine settings that all variants of a benchmark share. What differs is the variants' business."""
    records = settings_of(engine_record())
    return {name: value for name, value in values.items() if name in records and records[name].given == "machine"}


def meet(transport: Any) -> None:
    """Returns when all ranks are here."""
    transport.gather_object(None)
    transport.broadcast_object(None)


def interleave(
    variants: Mapping[str, Callable[[], None]],
    rounds: int,
    units: int,
    meet: Callable[[], Any],
    tick: Callable[[], Any],
    warm: bool = False,
) -> dict[str, list[float]]:
    """Seconds per unit of each variant; a variant's call is so many units. Every round runs all variants, each
    in another order (the same on all ranks), so that drift of the machine and what a variant leaves behind fall on all
    alike. Warm up with a round of its own.

    warm: each measured call follows one of its own, so that it finds in the cache what it left, not what its neighbour
    in the round did.
    """
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(rounds):
        for name in random.Random(number).sample(list(variants), len(variants)):
            if warm:
                variants[name]()
            meet()
            started = time.perf_counter()
            variants[name]()
            seconds[name].append((time.perf_counter() - started) / units)
            tick()
    return seconds


def rows(
    case: str,
    seconds: Mapping[str, list[float]],
    sent: Mapping[str, Mapping[str, int]],
    references: Mapping[str, Mapping[str, str]],
) -> list[dict[str, Any]]:
    """Rows of bench.json. references: for each variant, what it is compared with: X of ratio_vs_X -> a variant."""

    def ratio(name: str, to: str) -> float | None:
        if to not in seconds:
            return None
        return statistics.median(a / b for a, b in zip(seconds[name], seconds[to], strict=True))

    result = []
    for name, values in seconds.items():
        cuts = statistics.quantiles(values, n=10, method="inclusive") if len(values) > 1 else values * 9
        result.append(
            {
                "case": case,
                "variant": name,
                "median_s": statistics.median(values),
                "p10_s": cuts[0],
                "p90_s": cuts[-1],
                "n": len(values),
                "bytes": sent.get(name),
                **{f"ratio_vs_{what}": ratio(name, to) for what, to in references[name].items()},
            }
        )
    return result


def save(folder: Path, measured: Sequence[Mapping[str, Any]], values: Values) -> None:
    """Writes bench.json and the settings that repeat the run."""
    (folder / "bench.json").write_text(json.dumps({"schema": 1, "rows": measured}, indent=1))
    write_settings(folder, values)


def say_rows(measured: Sequence[Mapping[str, Any]], unit: str) -> None:
    say(measured[0]["case"])
    width = max(10, *(len(row["variant"]) for row in measured))
    for row in measured:
        ratios = [key for key in row if key.startswith("ratio_vs_")]
        shown = "  ".join(f"{key.removeprefix('ratio_')} {row[key]:.3f}" for key in ratios if row[key] is not None)
        say(
            f"  {row['variant']:<{width}} {row['median_s'] * 1e3:8.2f} ms {unit} (p10 {row['p10_s'] * 1e3:.2f}, "
            f"p90 {row['p90_s'] * 1e3:.2f}, n {row['n']})  {shown}"
        )
