"""The engine's settings: one frozen dataclass, made from keyword arguments, a preset or YAML. Unknown keys are
errors."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

import yaml

from cocodiff.config.errors import UserError, check_choice, check_keys
from cocodiff.config.files import read_mapping
from cocodiff.config.machine import LINK_RATES, Belief, Device, Links, Machine
from cocodiff.config.registry import ARRIVALS, CODECS, EXACT_CODECS, EXCHANGES, ORDERS, RINGS, SELECTIONS, STEP_CACHES
from cocodiff.config.setting import described, setting, settings_of

T = TypeVar("T")
A_WEEK_S = 7 * 24 * 3600
# Arguments of `setting` that several settings share.
V_MAJOR: dict[str, Any] = {"only_with": ("selection", "v_major")}
FRACTION: dict[str, Any] = {"least": 0, "most": 1, "wanted": "a fraction from 0 to 1"}
POSITIVE: dict[str, Any] = {"least": math.nextafter(0, 1), "wanted": "a number above 0"}
TIMEOUT: dict[str, Any] = {
    "given": "machine",
    "least": math.nextafter(0, 1),
    "most": A_WEEK_S,
    "wanted": f"a number of seconds above 0 and up to {A_WEEK_S} (a week)",
}


@dataclass(frozen=True)
class Config:
    """The engine's settings. Each field is made by `setting` from its default, its help and its limits, of which
    checks, flags, help and sweeps are made."""

    exchange: str = setting(
        "tapa",
        "route of tokens between ranks: flat (Ulysses' all-to-all, each message straight to its rank), tapa (siblings, "
        "then planes), split (straight within planes, siblings relay the rest) or auto (by size, by a measured table)",
        choices=lambda: (*EXCHANGES, "auto"),
    )
    exchange_table: str | None = setting(
        None,
        "a table that bench alltoall --tune wrote, instead of the shipped one",
        given="run",
        only_with=("exchange", "auto"),
    )
    nic_balance: bool = setting(
        True, "with split, blocks for other nodes take a detour where tiles share NICs unequally", given="code"
    )
    ring: int | str = setting(
        "auto",
        "ranks of a ring, in which keys and values go round; 1: Ulysses alone, at most a rank for each attention head; "
        "auto: 1 if heads suffice, else the fastest by prediction; token or streaming: the fastest of 2 or more, of "
        "that ring_kind",
        choices=("auto", "token", "streaming"),
        least=1,
        wanted="the ranks of a ring, 1 for none, or auto",
    )
    ring_kind: str = setting(
        "keys",
        "what travels in a ring: keys (with their values, round), token (queries round, partial outputs the other way "
        "back), streaming (queries to all at once, and partial outputs back, merged on each node) or auto (keys unless "
        "another is predicted to be clearly faster)",
        choices=lambda: (*RINGS, "auto"),
    )
    placement: str = setting(
        "auto",
        "with a ring: topology (rings inside the fast links, Ulysses across the slow ones), usp (the reverse) or auto "
        "(whichever sends less between nodes, unless the other is predicted to be faster)",
        choices=("auto", "topology", "usp"),
    )
    image_tokens: int = setting(
        4096, "image tokens of a call that meshes of Ulysses and Ring are chosen for", given="code", least=1
    )
    guidance_parallel: int | str = setting(
        "auto",
        "parts of the ranks for guidance; each computes a branch of classifier-free guidance; 2; 1: all ranks compute "
        "every branch; auto: 2 where the pipeline guides and an even number of ranks shares an image",
        choices=("auto",),
        least=1,
        most=2,
        wanted="1, 2 or auto",
    )
    order: str = setting(
        "joint",
        "of an attention call: joint (q, k and v are made, then sent) or v_first (v is sent while q and k are made)",
        choices=ORDERS,
    )
    chunks: int | str = setting(
        1,
        "chunks that tensors are sent in while attention computes on those that are here (Torus), at most one for each "
        "node or card; 1: off; auto: by a measured table of the machine",
        choices=("auto",),
        least=1,
        wanted="a whole number of at least 1 (1: off) or auto",
    )
    selection: str = setting(
        "full", "full (all tokens are sent: exact) or v_major (only tokens whose v changed)", choices=SELECTIONS
    )
    codec: str = setting(
        "none",
        "what q, k, v and the output travel as: none (as they are), lossless (16-bit ones as what they differ by from "
        "their prediction, in as many bits as that takes: exact), int8, int4, int2 (in so many bits a channel; lossy) "
        "or auto (whichever the machine's links call for)",
        choices=lambda: ("none", *CODECS),
    )
    only_exact: bool = setting(
        True, "codec auto takes none or lossless, and no codec that loses anything", only_with=("codec", "auto")
    )
    predictor: str = setting(
        "taylor",
        "the prediction: last (what they were at the call before) or taylor (that, continued linearly in the noise "
        "level; lossless at first half as far)",
        choices=("last", "taylor"),
        only_with=("codec", *CODECS),
    )
    fine_steps: int = setting(
        2,
        "steps at the end of a run that take twice the bits, at most 8, and wait for all that is sent: no later step "
        "corrects their errors",
        least=0,
    )
    arrival: str = setting(
        "now",
        "when what is sent is needed: now (attention waits for it), displaced (attention takes q, k, v and the output "
        "as they are predicted, and the next call what is sent now) or adaptive (each layer's tensors displaced "
        "where they change by less than tau from call to call); lossy but for now",
        choices=lambda: ("now", *ARRIVALS),
    )
    tau: float = setting(
        0.03,
        "relative change from call to call, as it is expected by the last one, below which a tensor is displaced",
        only_with=("arrival", "adaptive"),
        **POSITIVE,
    )
    step_cache: str = setting(
        "none",
        "none, or first_block: where the first block's change of the image is much what it was, the other blocks are "
        "not computed, and what they last added is added again; lossy",
        choices=lambda: ("none", *STEP_CACHES),
    )
    step_cache_threshold: float = setting(
        0.05,
        "change of what the first block adds, relative to what it added, up to which the others are not computed",
        least=0,
        only_with=("step_cache", "first_block"),
    )
    scoring: str = setting(
        "source",
        "who scores tokens: source (each rank its own, before they are sent) or card (its first tile, after v's first "
        "phase; tapa only)",
        choices=("source", "card"),
        **V_MAJOR,
    )
    reference: str = setting(
        "sent",
        "what tokens are compared with: sent (v as receivers hold it) or prev (v at the step before)",
        choices=("sent", "prev"),
        **V_MAJOR,
    )
    schedule: str = setting(
        "linear",
        "how the fraction of tokens that stay goes over the steps",
        choices=("linear", "fixed", "reverse", "cosine", "list", "threshold"),
        **V_MAJOR,
    )
    ratio: float = setting(0.5, "fraction of tokens that stay", only_with=("schedule", "fixed"), **FRACTION)
    ratios: tuple[float, ...] = setting((), "that fraction at each step", only_with=("schedule", "list"), **FRACTION)
    threshold: float = setting(
        0.1, "relative change below which a token stays", least=0, only_with=("schedule", "threshold")
    )
    warmup: int | None = setting(None, "full steps at the start; by default a tenth of all", least=0, **V_MAJOR)
    sync_interval: int = setting(10, "a full step every so many, 0 for never", least=0, **V_MAJOR)
    steps: int | None = setting(
        None, "denoising steps, for a bare transformer; a pipeline tells by itself", given="code", least=1
    )
    state_layers: int | None = setting(
        None,
        "attention layers, the first ones, of which a codec, V-Major or displacement keeps tensors between calls; the "
        "others' travel whole; by default all",
        least=1,
    )
    weights: str = setting(
        "auto",
        "who keeps a block's weights: whole (each rank), card or node (its tiles share them), or auto (in jobs on "
        "devices: shared as far as a tile's memory needs it; then predictor last, and fewer state_layers)",
        choices=("auto", "whole", "card", "node"),
    )
    split_layers: int | None = setting(
        None, "blocks whose weights are shared; by default all", least=1, only_with=("weights", "card", "node")
    )
    vae: str = setting(
        "one",
        "ranks that decode latents: one (which sends the image), all (each the whole of it); for images whose decoding "
        "does not fit one rank, sharded (each a band of rows, for the same image) or tiled (each some tiles)",
        given="run",
        choices=("one", "all", "tiled", "sharded"),
    )
    transport: str = setting(
        "auto",
        "how ranks talk; auto: MPI under an MPI launcher on CPU, else the device's own; host: through the host's "
        "memory, by what auto is on CPU, where ranks share a device or its library misbehaves; mpi-rma: MPI, one-sided",
        given="machine",
        choices=("auto", "host", "gloo", "mpi", "mpi-rma", "xccl", "ccl", "nccl"),
    )
    messages: str = setting(
        "auto",
        "how those of a phase are posted: batch, alltoall (the library's own), or auto: alltoall where PyTorch's xccl "
        "posts the messages of a batch one by one",
        given="machine",
        choices=("auto", "batch", "alltoall"),
    )
    check_messages: bool = setting(
        False, "send a checksum with every message; a wrong message ends the run and names both ranks", given="machine"
    )
    machine: str = setting(
        "local", "machine the ranks sit on: local, local-6x2, aurora or a .yaml file", given="machine"
    )
    device: str = setting(
        "auto",
        "what ranks compute on; auto: the accelerator that is there, else the CPU",
        given="machine",
        choices=("auto", "cpu", "xpu", "cuda"),
    )
    kernels: str = setting(
        "auto",
        "what packs, gathers and scores; auto: by a table of measurements, see docs/design.md",
        given="machine",
        choices=("auto", "sycl", "torch"),
    )
    compile: bool = setting(
        False, "torch.compile the transformer's blocks (between the messages); see docs/models.md", given="machine"
    )
    deterministic: bool = setting(
        True, "accelerators' products add up in one order, to give the same bits again (see doctor)", given="machine"
    )
    timeout_s: float = setting(300.0, "seconds without a sign of life after which a rank is lost", **TIMEOUT)
    start_timeout_s: float = setting(
        600.0, "seconds after which a rank that has not started is lost, once another one has", **TIMEOUT
    )
    stall_timeout_s: float = setting(
        1800.0,
        "seconds that a rank waits for one that lives but does not come to the same call: more than rank 0 needs to "
        "load or write",
        **TIMEOUT,
    )

    def __post_init__(self) -> None:
        for name, record in settings_of(type(self)).items():
            object.__setattr__(self, name, record.checked(getattr(self, name)))
        if self.ring in RINGS:
            object.__setattr__(self, "ring_kind", self.ring)
            object.__setattr__(self, "ring", "auto")
        if self.ring_kind == "auto" and self.chunks != 1:
            object.__setattr__(self, "ring_kind", "keys")
        if self.ring_kind != "keys" and self.chunks != 1:
            some = f"chunks {self.chunks} attends to some of them at a time: choose chunks 1 or ring_kind keys"
            raise UserError(f"ring_kind {self.ring_kind} sends whole queries, {some}")
        if self.selection == "v_major" and self.schedule == "list" and not self.ratios:
            raise UserError("schedule list needs ratios: one stable fraction for each step")
        if self.selection == "v_major" and self.scoring == "card" and self.exchange != "tapa":
            raise UserError(f"scoring card needs exchange tapa, not {self.exchange}: choose scoring source")
        if self.codec != "none" and self.selection != "full":
            other = f"selection {self.selection} some tokens whole: choose codec none or selection full"
            raise UserError(f"codec {self.codec} sends what every token changed by, {other}")
        if self.arrival != "now" and self.selection != "full":
            other = f"selection {self.selection} sends only some of their tokens: choose arrival now or selection full"
            raise UserError(f"arrival {self.arrival} takes the prediction of whole tensors, {other}")

    @property
    def split(self) -> tuple[str, int | None] | None:
        """The sharing of weights, as (ranks that share a block's weights: "card" or "node", number of blocks shared:
        None for all). None if no weights are shared."""
        return (self.weights, self.split_layers) if self.weights in ("card", "node") else None

    @property
    def exact(self) -> bool:
        """True if every call of the model is computed in full, with exact attention: neither lossy exchange nor a step
        cache is set."""
        return self.exact_attention and self.step_cache == "none"

    @property
    def exact_attention(self) -> bool:
        """True if no setting makes attention lossy: tensors are sent whole or coded without loss, and every call waits
        for its own.

        The settings alone decide. On a single rank attention is exact whatever they are.
        """
        exact_codec = self.only_exact if self.codec == "auto" else self.codec in EXACT_CODECS
        return self.selection == "full" and exact_codec and self.arrival == "now"

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> Config:
        """Return the settings of a preset, with some of them replaced. Raise UserError for unknown names, keys and
        values.

        Args:
            name: the preset's name, that of a file in configs/runs.
            overrides: settings that replace the preset's, by name.
        """
        check_choice("preset", name, preset_names())
        settings = {**read_yaml(shipped_folder("runs") / f"{name}.yaml"), **overrides}
        return from_mapping(cls, settings, f"preset {name}")

    def with_(self, **overrides: Any) -> Config:
        """Return a copy of the settings with some of them replaced. Raise UserError for unknown names and for invalid
        values."""
        check_keys(overrides, [f.name for f in fields(self)], "Config")
        return replace(self, **overrides)


Config.__doc__ = f"{Config.__doc__}\n\n{described(Config)}\n"


def preset_names() -> list[str]:
    """Return the names of all presets, sorted: those of the files in configs/runs."""
    return shipped_names("runs")


def load_machine(name: str) -> Machine:
    """Return the machine that a file describes.

    Raise UserError for an unknown name, with the names that exist, and for a file with unknown or missing keys.

    Args:
        name: a name in configs/machines, or the path of a YAML file.
    """
    path = find_shipped("machine", "machines", name)
    data = dict(read_yaml(path))
    try:
        data["planes"] = tuple(data.get("planes", ()))
        links = data.get("links", {})
        data["links"] = from_mapping(Links, links, f"{path.name}: links")
        lacking = [name for name in LINK_RATES if name not in links]
        if lacking and set(links) - {"nics", "nic_of"}:
            raise UserError(f"{path.name}: links: {', '.join(lacking)} missing: give the rates of all links, or none")
        data["device"] = from_mapping(Device, data.get("device", {}), f"{path.name}: device")
        data["beliefs"] = tuple(
            from_mapping(Belief, {"name": name, **range_}, f"{path.name}: beliefs: {name}")
            for name, range_ in data.get("beliefs", {}).items()
        )
        machine = from_mapping(Machine, data, path.name)
        machine.check_beliefs()
        return machine
    except (AttributeError, TypeError) as error:
        raise UserError(f"machine file {path.name}: {error}; see configs/machines/aurora.yaml for the keys") from error


def shipped_names(folder: str) -> list[str]:
    """Return the names of the YAML files in a folder of configs/, without suffix and sorted."""
    return sorted(path.stem for path in shipped_folder(folder).glob("*.yaml"))


def find_shipped(what: str, folder: str, name: str) -> Path:
    """Return the path of a settings file that the user gives by name or by path. Raise UserError if there is no such
    file.

    Args:
        what: the word for such a file in errors, such as "machine".
        folder: folder of configs/ in which names are looked up.
        name: name of a shipped file without suffix, or the path of any YAML file.
    """
    shipped = shipped_names(folder)
    if not name.endswith((".yaml", ".yml")):
        check_choice(what, name, shipped, hint="or the path of a .yaml file")
        return shipped_folder(folder) / f"{name}.yaml"
    if not Path(name).is_file():
        raise UserError(f"{what} file {name} does not exist; shipped {what}s: {', '.join(shipped)}")
    return Path(name)


def load_exchange_table(machine: str, nodes: int, path: str | None = None) -> list[tuple[float, str]]:
    """Return the table by which the setting `exchange: auto` chooses an exchange by the size of the tensors.

    Its rows are (largest MB per rank, name of the exchange), ascending; the last row's limit is infinite. Raise
    UserError if the file has no rows for this machine or they are malformed.

    Args:
        machine: name of the machine.
        nodes: number of nodes.
        path: YAML file that maps machine -> nodes -> rows; None for the shipped one.
    """
    file = Path(path) if path is not None else shipped_folder("exchange") / "auto.yaml"
    known = read_yaml(file)
    remedy = "measure one with cocodiff bench alltoall --tune and name it as exchange_table, or choose another exchange"
    try:
        rows, there = _measured(known, machine, nodes)
        table = rows and [(math.inf if limit is None else float(limit), str(name)) for limit, name in rows]
    except (TypeError, ValueError, AttributeError) as error:
        wrong = f"not a table of machine -> nodes -> [[MB, exchange], ...] ({error})"
        raise UserError(f"{file}: {wrong}; {remedy}") from error
    if table is None:
        wrong = f"{file.name} has no table for machine {machine} on {nodes} node(s) but for {there}"
        raise UserError(f"exchange auto: {wrong}; {remedy}")
    for _, name in table:
        check_choice(f"exchange in {file.name}", name, EXCHANGES)
    if not table or table != sorted(table, key=lambda row: row[0]) or table[-1][0] != math.inf:
        raise UserError(f"{file}: rows of {machine} on {nodes} node(s) must ascend and end with no limit (null)")
    return table


def load_chunk_table(machine: str, nodes: int) -> tuple[int, float]:
    """Return how the setting `chunks: auto` cuts tensors into chunks: (number of chunks, smallest MB of q, k and v per
    rank to cut).

    The shipped file maps machine -> nodes -> [chunks, MB]. Raise UserError if it has no entry for this machine.

    Args:
        machine: name of the machine.
        nodes: number of nodes.
    """
    found, there = _measured(read_yaml(shipped_folder("exchange") / "chunks.yaml"), machine, nodes)
    if found is None:
        wrong = f"machine {machine} on {nodes} node(s) was not measured, but {there} were"
        raise UserError(f"chunks auto: {wrong}; give a number of chunks, 1 for none")
    chunks, from_mb = found
    return int(chunks), float(from_mb)


def _measured(known: dict[str, Any], machine: str, nodes: int) -> tuple[Any, str]:
    """Look up a table of measurements. Return its entry (None if absent), and a text for errors that lists the machines
    and numbers of nodes that it has.

    Args:
        known: the table, machine -> number of nodes -> entry.
    """
    there = ", ".join(f"{name} on {count}" for name, of in known.items() for count in of)
    return known.get(machine, {}).get(nodes), there


def from_mapping(kind: type[T], values: Mapping[str, Any], where: str) -> T:
    """Return a dataclass whose fields have the given values. Raise UserError for an unknown key; the message names the
    nearest field.

    Args:
        kind: the dataclass.
        values: values by field name, as read from a settings file.
        where: the origin of the values, which begins the message.
    """
    check_keys(values, [f.name for f in fields(kind)], where)  # type: ignore[arg-type]
    return kind(**values)


class _Loader(yaml.SafeLoader):
    """A YAML loader that reads 1:2 as text, as YAML 1.2 does, and refuses a key that is given twice.

    In YAML 1.1 1:2 is a number to the base 60, and PyYAML silently takes a key's last value.
    """

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        """Return a mapping's content. Raise ConstructorError if two of its keys are the same text."""
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<"]
        if again := next((key for key in keys if keys.count(key) > 1), None):
            raise yaml.constructor.ConstructorError(None, None, f"{again} stands twice: give it once", node.start_mark)
        return super().construct_mapping(node, deep)


# It stands before the resolvers of numbers, since the first resolver that fits is used.
_TEXT = ("tag:yaml.org,2002:str", re.compile(r"[-+]?[0-9][0-9_]*:[0-9_:.]*$"))
_Loader.yaml_implicit_resolvers = {
    first: [_TEXT, *resolvers] for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the mapping that a YAML file holds. Raise UserError if it cannot be read, is malformed or holds no
    mapping."""
    return read_mapping(path, "YAML", partial(yaml.load, Loader=_Loader), "key: value pairs")


def shipped_folder(folder: str) -> Path:
    """Return the path of a folder of configs/, where the package is installed."""
    return Path(str(resources.files("cocodiff_configs"))) / folder
