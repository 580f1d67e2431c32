"""How the engine runs: one frozen dataclass, from keyword arguments, a preset or YAML. Unknown keys are errors."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

import yaml

from cocodiff.errors import UserError
from cocodiff.files import read_text
from cocodiff.topology.machine import Device, Links, Machine

T = TypeVar("T")
EXCHANGES = ("flat", "tapa", "split", "auto")
ORDERS = ("joint", "v_first")
PLACEMENTS = ("auto", "topology", "usp")
SELECTIONS = ("full", "v_major")
SCORINGS = ("source", "card")
REFERENCES = ("sent", "prev")
SCHEDULES = ("linear", "fixed", "reverse", "cosine", "list", "threshold")
VAE_RANKS = ("one", "all")
TRANSPORTS = ("auto", "gloo", "mpi", "xccl", "ccl", "nccl")
DEVICES = ("auto", "cpu", "xpu", "cuda")
KERNELS = ("auto", "sycl", "torch")
LONGEST_TIMEOUT_S = 7 * 24 * 3600


@dataclass(frozen=True)
class Config:
    """The engine's settings.

    exchange: flat (Ulysses' all-to-all, every message straight to its rank), tapa (siblings, then planes), split
    (straight within planes; siblings relay the rest meanwhile) or auto (by size, from a measured table).
    exchange_table: for auto, a table that `cocodiff bench alltoall --tune` wrote, instead of the shipped one.
    nic_balance: split lets blocks for other nodes take a detour where tiles share NICs unequally.
    ring: ranks of a ring, in which keys and values go round; 1 is Ulysses alone, which takes at most a rank for each
    attention head; auto (1 where it can be, else the fastest by prediction, see docs/mesh.md).
    placement: with a ring, topology (rings inside the fast links, Ulysses across the slow ones), usp (the reverse) or
    auto (whichever sends less between nodes).
    order: joint (q, k and v are projected, then travel together) or v_first (v travels while q and k are made).
    chunks: in how many chunks tensors travel while attention computes on those that are here (Torus; at most one for
    each node or card); 1 is off, auto goes by a measured table of the machine.
    selection: full (all tokens travel at every step: exact) or v_major (only tokens whose v changed, see below).
    vae: one (rank 0 decodes latents and sends the image to the others) or all (every rank decodes).
    transport: auto (MPI under an MPI launcher on CPU, else the device's own), gloo, mpi, xccl, ccl or nccl.
    machine: a name in configs/machines or the path of a machine file.
    device: auto (the accelerator that is there, else the CPU), cpu, xpu or cuda.
    kernels: auto (by a table of measurements, see docs/kernels.md), sycl or torch: what packs, gathers and scores.
    timeout_s: a rank that gives no sign of life for so many seconds is lost and ends the run on every rank.
    start_timeout_s: the same for a rank that has not joined so many seconds after another one has.
    stall_timeout_s: the same for a rank that is alive but does not come to a call that another rank waits in for so
    many seconds: its main thread hangs. It must exceed what rank 0 does alone, such as loading or writing.

    Of v_major:
    scoring: source (each rank scores its own tokens before they travel) or card (after v's first phase; tapa only).
    reference: sent (v as receivers hold it) or prev (v at the step before).
    schedule: how the fraction of tokens that stay goes over the steps: linear, fixed, reverse, cosine, list, threshold.
    ratio: that fraction for `fixed`; ratios: one for each step, for `list`; threshold: a relative change.
    warmup: full steps at the start, None for a tenth of them; sync_interval: a full step every so many, 0 for never.
    steps: denoising steps that run, for a bare transformer; a pipeline tells by itself.
    """

    exchange: str = "tapa"
    exchange_table: str | None = None
    nic_balance: bool = True
    ring: int | str = "auto"
    placement: str = "auto"
    order: str = "joint"
    chunks: int | str = 1
    selection: str = "full"
    scoring: str = "source"
    reference: str = "sent"
    schedule: str = "linear"
    ratio: float = 0.5
    ratios: tuple[float, ...] = ()
    threshold: float = 0.1
    warmup: int | None = None
    sync_interval: int = 10
    steps: int | None = None
    vae: str = "one"
    transport: str = "auto"
    machine: str = "local"
    device: str = "auto"
    kernels: str = "auto"
    timeout_s: float = 300.0
    start_timeout_s: float = 600.0
    stall_timeout_s: float = 1800.0

    def __post_init__(self) -> None:
        check_choice("exchange", self.exchange, EXCHANGES)
        self._check_number_or_auto("ring", "the ranks of a ring, 1 for none, or auto")
        check_choice("placement", self.placement, PLACEMENTS)
        check_choice("order", self.order, ORDERS)
        check_choice("vae", self.vae, VAE_RANKS)
        self._check_number_or_auto("chunks", "a whole number of at least 1 (1: off) or auto")
        self._check_selection()
        check_choice("transport", self.transport, TRANSPORTS)
        check_choice("device", self.device, DEVICES)
        check_choice("kernels", self.kernels, KERNELS)
        for name in ("timeout_s", "start_timeout_s", "stall_timeout_s"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= LONGEST_TIMEOUT_S:
                raise UserError(
                    f"{name} is {value!r}: give a number of seconds above 0 and up to {LONGEST_TIMEOUT_S} (a week)"
                )

    def _check_number_or_auto(self, name: str, wanted: str) -> None:
        value = getattr(self, name)
        if isinstance(value, str) and value.isdecimal():
            value = int(value)
            object.__setattr__(self, name, value)
        if value != "auto" and (type(value) is not int or value < 1):
            raise UserError(f"{name} is {value!r}: give {wanted}")

    def _check_selection(self) -> None:
        check_choice("selection", self.selection, SELECTIONS)
        check_choice("scoring", self.scoring, SCORINGS)
        check_choice("reference", self.reference, REFERENCES)
        check_choice("schedule", self.schedule, SCHEDULES)
        if not isinstance(self.ratios, tuple):
            object.__setattr__(self, "ratios", tuple(self.ratios))
        for name, values in (("ratio", (self.ratio,)), ("ratios", self.ratios)):
            for value in values:
                if not isinstance(value, (int, float)) or not 0 <= value <= 1:
                    raise UserError(f"{name} {value!r}: give a fraction from 0 to 1")
        for name, least in (("warmup", 0), ("sync_interval", 0), ("steps", 1)):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < least):
                raise UserError(f"{name} is {value!r}: give a whole number of at least {least}")
        if not isinstance(self.threshold, (int, float)) or not self.threshold >= 0:
            raise UserError(f"threshold is {self.threshold!r}: give a relative change of at least 0")
        if self.selection == "v_major" and self.schedule == "list" and not self.ratios:
            raise UserError("schedule list needs ratios: one stable fraction for each step")
        if self.selection == "v_major" and self.scoring == "card" and self.exchange != "tapa":
            raise UserError(f"scoring card needs exchange tapa, not {self.exchange}: choose scoring source")

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> Config:
        """A preset's settings with `overrides` on top. Raises UserError for unknown names, keys and values."""
        check_choice("preset", name, preset_names())
        settings = {**read_yaml(_shipped("runs") / f"{name}.yaml"), **overrides}
        return from_mapping(cls, settings, f"preset {name}")

    def with_(self, **overrides: Any) -> Config:
        check_keys(overrides, [f.name for f in fields(self)], "Config")
        return replace(self, **overrides)


def preset_names() -> list[str]:
    return sorted(path.stem for path in _shipped("runs").glob("*.yaml"))


def load_machine(name: str) -> Machine:
    """A machine by its name in configs/machines or by the path of a YAML file.

    Raises UserError with the names that exist, or for a file with unknown or missing keys.
    """
    path = find_shipped("machine", "machines", name)
    data = dict(read_yaml(path))
    try:
        data["planes"] = tuple(data.get("planes", ()))
        data["links"] = from_mapping(Links, data.get("links", {}), f"{path.name}: links")
        data["device"] = from_mapping(Device, data.get("device", {}), f"{path.name}: device")
        return from_mapping(Machine, data, path.name)
    except TypeError as error:
        raise UserError(f"machine file {path.name}: {error}; see configs/machines/aurora.yaml for the keys") from error


def load_exchange_table(machine: str, nodes: int, path: str | None = None) -> list[tuple[float, str]]:
    """Rows (up to so many MB per rank, exchange) of a machine's table for so many nodes, the last without limit.

    The file maps machine -> nodes -> rows. Raises UserError where it has no such entry, or something else in it.
    """
    file = Path(path) if path is not None else _shipped("exchange") / "auto.yaml"
    known = read_yaml(file)
    remedy = "measure one with cocodiff bench alltoall --tune and name it as exchange_table, or choose another exchange"
    try:
        rows = known.get(machine, {}).get(nodes)
        if rows is None:
            there = ", ".join(f"{name} on {count}" for name, of in known.items() for count in of)
            raise UserError(
                f"exchange auto: {file.name} has no table for machine {machine} on {nodes} node(s) but for {there}; "
                f"{remedy}"
            )
        table = [(float("inf") if limit is None else float(limit), str(name)) for limit, name in rows]
    except (TypeError, ValueError, AttributeError) as error:
        raise UserError(
            f"{file}: not a table of machine -> nodes -> [[MB, exchange], ...] ({error}); {remedy}"
        ) from error
    for _, name in table:
        check_choice(f"exchange in {file.name}", name, [known for known in EXCHANGES if known != "auto"])
    if not table or table != sorted(table, key=lambda row: row[0]) or table[-1][0] != float("inf"):
        raise UserError(f"{file}: rows of {machine} on {nodes} node(s) must ascend and end with no limit (null)")
    return table


def load_chunk_table(machine: str, nodes: int) -> tuple[int, float]:
    """For `chunks: auto`: in how many chunks, and from how many MB of q, k and v per rank on, by a machine's table for
    so many nodes. The file maps machine -> nodes -> [chunks, MB]. Raises UserError where it has no such entry."""
    known = read_yaml(_shipped("exchange") / "chunks.yaml")
    found = known.get(machine, {}).get(nodes)
    if found is None:
        there = ", ".join(f"{name} on {count}" for name, of in known.items() for count in of)
        raise UserError(
            f"chunks auto: machine {machine} on {nodes} node(s) was not measured, but {there} were; give a number of "
            f"chunks, 1 for none"
        )
    chunks, from_mb = found
    return int(chunks), float(from_mb)


def shipped_names(folder: str) -> list[str]:
    """The names of the files in configs/`folder`."""
    return sorted(path.stem for path in _shipped(folder).glob("*.yaml"))


def find_shipped(what: str, folder: str, name: str) -> Path:
    """The file of a name in configs/`folder`, or of a path that ends in .yaml. Raises UserError with the names that
    exist."""
    shipped = {path.stem: path for path in _shipped(folder).glob("*.yaml")}
    if not name.endswith((".yaml", ".yml")):
        check_choice(what, name, sorted(shipped), hint="or the path of a .yaml file")
        return shipped[name]
    if not Path(name).is_file():
        raise UserError(f"{what} file {name} does not exist; shipped {what}s: {', '.join(sorted(shipped))}")
    return Path(name)


def from_mapping(kind: type[T], values: Mapping[str, Any], where: str) -> T:
    """A dataclass from a mapping; unknown keys are a UserError with the nearest known key."""
    check_keys(values, [f.name for f in fields(kind)], where)  # type: ignore[arg-type]
    return kind(**values)


def read_yaml(path: Path) -> dict[str, Any]:
    """A YAML file's mapping. Raises UserError when it is missing, malformed or something else than a mapping."""
    text = read_text(path, "YAML")
    try:
        data = yaml.safe_load(text)
    except RecursionError as error:
        raise UserError(f"{path} is not valid YAML: nested too deeply") from error
    except Exception as error:  # PyYAML lets pass what int(), float() and dates raise for a malformed value
        raise UserError(f"{path} is not valid YAML: {' '.join(str(error).split())[:300]}") from error
    if not isinstance(data, dict):
        raise UserError(f"{path} holds no key: value pairs but {type(data).__name__}")
    return data


def check_keys(values: Iterable[str], known: Iterable[str], where: str) -> None:
    known = list(known)
    for key in values:
        if key not in known:
            raise UserError(f"{where}: unknown key {key}{suggestion(key, known)}; known: {', '.join(known)}")


def check_choice(what: str, value: str, choices: Iterable[str], hint: str = "") -> None:
    choices = list(choices)
    if value not in choices:
        listed = ", ".join(choices) + (f", {hint}" if hint else "")
        raise UserError(f"unknown {what} {value!r}{suggestion(str(value), choices)}; choose from {listed}")


def suggestion(word: str, known: Iterable[str]) -> str:
    """ ", did you mean X?" for the nearest known word, else ""."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f", did you mean {near[0]}?" if near else ""


def _shipped(folder: str) -> Path:
    return Path(str(resources.files("cocodiff_configs"))) / folder
