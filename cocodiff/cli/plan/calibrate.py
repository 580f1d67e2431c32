"""`cocodiff plan --calibrate bench.json`: fits the machine's links to a run of bench alltoall."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cocodiff.console.terminal import say
from cocodiff.errors import UserError
from cocodiff.files import irregular
from cocodiff.outputs.folder import OutputFolder
from cocodiff.outputs.settings import write_document
from cocodiff.planning.calibrate import NAMES, AllToAll, Calibration, Constants, Fit, Measured
from cocodiff.registry import EXCHANGES
from cocodiff.text_table import aligned
from cocodiff.topology.links import alltoall_bound
from cocodiff.topology.machine import Machine, Topology


def run_calibration(values: dict[str, Any], topology: Topology) -> None:
    import yaml

    path = Path(values["calibrate"])
    rows = read_rows(path)
    measured = measured_of(rows, path)
    output = OutputFolder(values["out"], values["overwrite"])
    scale = scale_of(rows, topology)
    machine = slowed(topology.machine, scale)
    calibration = Calibration(Topology(machine, topology.places), measured)
    start = Constants(machine.links.latency_us, machine.links.message_us)
    names = [name for name in NAMES if name != "nic" or topology.nodes > 1]
    fit = calibration.fit(start, names)
    say("\n".join(told(fit, measured, names, scale)))
    plan = {
        "schema": 1,
        "calibration": {
            "from": str(path),
            "scale": scale,
            "constants": asdict(fit.constants),
            "fitted": list(fit.fitted),
            "left": [name for name in names if name not in fit.fitted],
            "rms": fit.rms(measured),
            "measurements": [
                {"variant": m.variant, "size_mb": m.size_mb, "part": m.part, "measured_s": m.value, "plan_s": p}
                for m, p in zip(measured, fit.predicted, strict=True)
            ],
        },
    }
    machines = {"machine.yaml": fit.constants.machine(machine)}
    if scale != 1:
        machines["machine-unscaled.yaml"] = fit.constants.faster(scale).machine(topology.machine)
    described = {name: yaml.safe_dump(machine_file(one), sort_keys=False) for name, one in machines.items()}
    with output.held(), output.writing():
        folder = output.open()
        for name, text in described.items():
            (folder / name).write_text(text)
        write_document(folder, "plan.json", plan, values)
        output.publish()
    say(f"results: {output.final / 'plan.json'}, {output.final / 'machine.yaml'} (use it with --machine)")
    if scale != 1:
        say(f"at the machine file's rates, beside what bench step says: {output.final / 'machine-unscaled.yaml'}")


def read_rows(path: Path) -> list[dict[str, Any]]:
    try:
        if kind := irregular(path):
            raise UserError(f"--calibrate {path} is {kind}: give the bench.json that bench alltoall wrote")
        data = json.loads(path.read_text())
        rows = data["rows"]
        assert isinstance(rows, list) and all({"case", "variant", "median_s"} <= row.keys() for row in rows)
    except OSError as error:
        raise UserError(f"--calibrate {path}: {error.strerror}") from error
    except UserError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, AssertionError, RecursionError) as error:
        raise UserError(f"--calibrate {path} is no bench.json: give the one that bench alltoall wrote") from error
    return rows


def measured_of(rows: Sequence[Mapping[str, Any]], path: Path) -> list[Measured]:
    """The measurements of the file that the plan can predict: our exchanges, one peer at a time, and TAPA's phases."""
    found = []
    for row in rows:
        size = str(row["case"]).removesuffix("MB")
        known = row["variant"] in (*EXCHANGES, "flat_serial") and size.replace(".", "", 1).isdigit()
        if known:
            found.append(Measured(row["variant"], float(size), row["median_s"]))
            for part in ("phase1", "phase2"):
                if row.get(f"{part}_s"):
                    found.append(Measured(row["variant"], float(size), row[f"{part}_s"], part))
    if not found:
        raise UserError(
            f"--calibrate {path} has no all-to-all of flat, flat_serial, tapa or split: run cocodiff bench alltoall"
        )
    return found


def scale_of(rows: Sequence[Mapping[str, Any]], topology: Topology) -> float:
    """How many times slower the measured links were than the machine file's: 1, or the scale of an emulated machine."""
    for row in rows:
        if row["variant"] == "bound":
            size = float(row["case"].removesuffix("MB"))
            nominal = alltoall_bound(topology, AllToAll(topology, "flat", size).block_bytes)
            return round(row["median_s"] / nominal, 6) if nominal else 1.0
    return 1.0


def slowed(machine: Machine, scale: float) -> Machine:
    links, part = machine.links, 1 / scale
    return Constants(links.latency_us, links.message_us, part, part, part).machine(machine)


def told(fit: Fit, measured: Sequence[Measured], names: Sequence[str], scale: float) -> list[str]:
    lines = [f"links {scale:g} times slower than the machine file's, as on an emulated machine"] if scale != 1 else []
    constants = []
    for name in names:
        value = getattr(fit.constants, name)
        shown = f"{value:.4g} us" if name.endswith("_us") else f"{value:.3f} of the nominal rate"
        constants.append([name, shown, "fitted" if name in fit.fitted else "left: nothing measured depends on it"])
    table = [["exchange", "MB", "part", "measured ms", "plan ms", "off by"]]
    for one, seconds in zip(measured, fit.predicted, strict=True):
        times = [f"{one.value * 1e3:.3f}", f"{seconds * 1e3:.3f}", f"{seconds / one.value - 1:.1%}"]
        table.append([one.variant, f"{one.size_mb:g}", one.part, *times])
    return [
        *lines,
        *aligned(constants, "<<<"),
        *aligned(table, "<>>>>>"),
        f"root mean square error {fit.rms(measured):.1%}",
    ]


def machine_file(machine: Machine) -> dict[str, Any]:
    """A machine as its file has it."""
    data = {key: value for key, value in asdict(machine).items() if value is not None}
    data["planes"], data["links"]["nic_of"] = list(machine.planes), list(machine.links.nic_of)
    return data
