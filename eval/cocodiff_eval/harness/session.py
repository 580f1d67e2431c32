"""A job's request, checked; starting, loading, measuring and writing results, for all commands that run a model on
ranks; the modes of a job: its presets, or the settings of a bound, and the exact run that they are compared with; and
what results depend on."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cocodiff import __version__
from cocodiff.comm.launch import Launch, detect
from cocodiff.comm.trace import save_traces
from cocodiff.config.config import Config
from cocodiff.config.registry import imported
from cocodiff.config.setting import settings_of
from cocodiff.jobs.folder import OutputFolder
from cocodiff.jobs.options import engine_record, engine_settings, preset_configs
from cocodiff.jobs.ranks import run_holding
from cocodiff.jobs.record import FOUND, REMEMBERED, first_difference, lasting, write_settings
from cocodiff.jobs.terminal import note, say, threads
from cocodiff.topology.axes import Partition
from cocodiff_eval.harness.partition import partition_of, sequence_of, with_guidance, with_tokens, with_weights
from cocodiff_eval.harness.pipelines import Model, Request, check_model, import_pipeline, load_model
from cocodiff_eval.harness.quality import Quality
from cocodiff_eval.harness.replicas import Replica, topology_of, topology_of_replica

if TYPE_CHECKING:
    from cocodiff.engine.engine import Engine
    from cocodiff_eval.harness.job import Job, JobResult

EVERY_RANK_IMPORTS = (
    "skimage.metrics",
    "skimage.restoration",
    "cocodiff_eval.harness.images",
    "cocodiff_eval.harness.slices",
    "cocodiff.demo_model.vae",
    "cocodiff.engine.engine",
    "cocodiff_eval.report.page",
)
DTYPES = ("auto", "fp32", "bf16", "fp16")
FIRST = ("outcomes", "summary", "volumes", "images")  # what metrics.json begins with
EXACT = "flat"  # the preset that others are judged against
LOSSY = ("selection", "codec", "arrival", "step_cache")  # settings that give up exactness
# What changes no bit of an exact run.
ROUTES = ("exchange", "exchange_table", "nic_balance", "transport", "messages", "check_messages")


@dataclass(frozen=True)
class Prepared:
    """A checked request: everything that can be known before ranks start. ranks: of all replicas; inputs: what results
    depend on beside settings, as plain data."""

    values: dict[str, Any]
    ranks: int
    request: Request
    presets: dict[str, Config]
    output: OutputFolder
    started: float  # time.monotonic() when the command began
    partition: Partition = field(default=Partition())
    quality: Quality | None = None
    inputs: Callable[[], dict[str, Any]] = dict

    @classmethod
    def checked(
        cls,
        values: dict[str, Any],
        ranks: int,
        request: Request,
        started: float,
        quality: Quality | None = None,
        presets: dict[str, Config] | None = None,
    ) -> Prepared:
        """presets: unless the options name them. Raises UserError for what does not fit; writes nothing."""
        presets = presets or (preset_configs(values) if quality is None else quality.presets)
        topology_of(values["machine"], ranks)
        check_model(request, 1, weights=not values["dry_run"])
        output = OutputFolder(values["out"], values["overwrite"], values["resume"])
        output.keep_apart([request.model, *filter(None, [request.image])])
        return cls(values, ranks, request, presets, output, started, quality=quality)

    def partitioned(self, **work: Any) -> Prepared:
        """With its ranks divided, and what follows in the presets. work: as of `partition_of`. Raises UserError."""
        request, ranks, quality = self.request, self.ranks, self.quality
        settings = [*(self.presets if quality is None else quality.candidates).values()]
        partition = partition_of(self.values, request, settings, ranks, compares=quality is None, **work)
        check_model(request, ranks // (partition.replicas * partition.guidance), weights=not self.values["dry_run"])
        if quality is not None:
            quality = quality.for_links(*sequence_of(self.values, request, partition, ranks))
            candidates = with_guidance(with_tokens(quality.candidates, self.values, request), partition, request)
            quality = replace(
                quality, candidates=with_weights(candidates, self.values, request, partition, ranks, **work)
            )
            if ranks == partition.replicas and not quality.caches:
                # Nothing travels, and so nothing is to be chosen.
                quality = replace(quality, candidates={quality.exact: quality.candidates[quality.exact]})
        presets = with_guidance(with_tokens(self.presets, self.values, request), partition, request)
        if quality is None:
            presets = with_weights(presets, self.values, request, partition, ranks, **work)
        return replace(self, presets=presets, partition=partition, quality=quality)


class Engines(dict[str, "Engine"]):
    """An engine for each of some modes, made when it is first asked for: it costs groups of ranks. All ranks of a
    replica ask in the same order."""

    def __init__(self, modes: Mapping[str, Config], make: Callable[[Config], Engine]) -> None:
        super().__init__()
        self.modes, self._make = modes, make

    def __missing__(self, mode: str) -> Engine:
        self[mode] = self._make(self.modes[mode])
        return self[mode]

    def chosen(self) -> list[str]:
        """What they have chosen by themselves, a line each."""
        return [f"{mode}: {engine.sequence.chosen}" for mode, engine in self.items() if engine.sequence.chosen]


@dataclass(frozen=True)
class Session:
    """A job's model on its ranks, with an engine for each mode on the ranks of this replica. `exact` is the mode that
    others are compared with; it may be one of the presets. `folder` takes results; None on ranks other than 0."""

    prepared: Prepared
    replica: Replica
    model: Model
    engines: Engines
    exact: str | None
    folder: Path | None

    @property
    def images(self) -> Path:
        """The folder of images, on every rank that writes some."""
        return self.prepared.output.partial / "images"

    def run(self, job: Job) -> None:
        """Makes the job's results, completes and publishes them. All ranks call it."""
        from cocodiff_eval.harness.job import Presets, Trials, run_batches

        prepared, quality = self.prepared, self.prepared.quality
        way = job.way or Presets(prepared.presets, self.exact)
        if quality is not None:
            way = Trials(job, quality, prepared.output.store)

        def settings() -> dict[str, Any]:
            return describe(prepared) | job.settings()

        shows_bar = self.folder is not None and not prepared.values["quiet"]
        done = run_batches(job, way, self.replica, prepared.output, settings, shows_bar)
        finish(self, done, **(job.complete(done) if self.folder is not None else {"pictures": ()}))


def start_job(
    prepared: Prepared,
    launch: Launch,
    unit: str,
    job: str,
    given: Sequence[Any] = (),
    compared: dict[str, str] | None = None,
) -> int:
    """Runs a job on its ranks, and returns the exit code of the command; nothing is started for a dry run, and where
    the results are there.

    job: a `Job`, as module:name, which every rank makes of its session and what is `given`; compared: what ranks must
    agree on, beside the options. Raises UserError where a run that
    has ended had other settings, or where files of its results are gone."""
    values, config = prepared.values, next(iter(prepared.presets.values()))
    if launch.speaks and prepared.quality is not None:
        say(prepared.quality.line(unit))
    if values["dry_run"]:
        return 0
    ended = prepared.output.finished
    if ended is not None:
        if launch.speaks:
            there = ended.settings or {}
            chosen = {"sides": there["sides"]} if "sides" in there else {}  # by a model, of what was asked for
            prepared.output.confirm(first_difference(there, describe(prepared) | chosen))
            say(f"nothing is left to do: the results in {prepared.output.final} are finished, with the same settings")
        return 0

    def imports() -> None:
        if launch.speaks and not values["quiet"]:
            note("importing torch and diffusers")
        if launch.kind == "alone":
            import_before_fork(prepared.request, prepared.ranks)

    if launch.kind != "alone":
        imports()

    def work(transport: Any) -> None:
        session = open_session(prepared, transport)
        session.run(imported(job)(session, *given))

    return run_holding(prepared.output, values, launch, config, work, imports, compared)


def import_before_fork(request: Request, ranks: int | None = None) -> None:
    """In the process that ranks are forked from. ranks: one alone shares nothing, and imports the rest when needed."""
    import_pipeline(request)
    for name in EVERY_RANK_IMPORTS if ranks != 1 else ():
        import_module(name)


# Modes ----------------------------------------------------------------------------------------------------------------


def describe(prepared: Prepared) -> dict[str, Any]:
    """What the results of any job depend on. How many replicas there are is not in it."""
    ranks, replicas = prepared.ranks, prepared.partition.replicas
    return {
        "cocodiff": __version__,
        "ranks of a replica": ranks // replicas,
        "their nodes, cards and planes": topology_of_replica(prepared.values, ranks, replicas).relative_places,
        **threads(),
        **{name: prepared.values[name] for name in REMEMBERED if name in prepared.values},
        "steps": prepared.values["steps"],
        "presets": [{"name": name, **lasting(config)} for name, config in prepared.presets.items()],
        "exact": with_exact(prepared)[1],
        **({} if prepared.quality is None else {"quality": prepared.quality.lasting()}),
        **prepared.inputs(),
    }


def with_exact(prepared: Prepared) -> tuple[dict[str, Config], str | None]:
    """The modes to run (of a bound its settings), and the exact one: one that gives its bits, or one mode more."""
    if prepared.quality is not None:
        return dict(prepared.quality.candidates), prepared.quality.exact
    if not prepared.values["exact"]:
        return dict(prepared.presets), None
    whole = {"selection": "full", "codec": "none", "arrival": "now", "step_cache": "none"}
    settings = engine_settings(prepared.values) | {"exchange": "flat", "chunks": 1, **whole}
    settings["guidance_parallel"] = prepared.partition.guidance
    shared = next(iter(prepared.presets.values()))
    settings |= {"weights": shared.weights, "split_layers": shared.split_layers}
    exact = engine_record().preset(EXACT, **settings)
    for mode, config in prepared.presets.items():
        if same_bits(config, exact):
            return dict(prepared.presets), mode
    return prepared.presets | {"exact": exact}, "exact"


def same_bits(config: Config, exact: Config) -> bool:
    """Whether an exact config differs from another in routes alone, and in settings that do nothing with all tokens."""
    if not config.exact:
        return False
    of_lossy = {name for name, one in settings_of(type(config)).items() if one.only_with and one.only_with[0] in LOSSY}
    binding = vars(config).keys() - {*ROUTES, *LOSSY, *of_lossy}
    return all(getattr(config, name) == getattr(exact, name) for name in binding)


# On every rank --------------------------------------------------------------------------------------------------------


def load_requested(request: Request, dtype: str, transport: Any, split: Any = None) -> Model:
    """A model in one of DTYPES. All ranks call it. split: see `load_model`."""
    if dtype == "auto":
        dtype = "fp32" if transport.device.type == "cpu" else "bf16"
    return load_model(request, dtype, transport, split)


def open_session(prepared: Prepared, transport: Any) -> Session:
    """The model, its engines and the folder of results; returns when all ranks are ready."""
    from cocodiff.engine.engine import Engine
    from cocodiff.engine.guidance import PARTS
    from cocodiff.kernels.device import set_repeatable

    # Alone, the process that ranks are forked from does so, when none of them writes any more.
    if detect().kind != "alone":
        transport.health.when_lost(lambda error: prepared.output.discard())
    replica = Replica(transport, prepared.values["machine"], prepared.partition.replicas)
    if transport.rank == 0 and not prepared.values["quiet"]:
        note(f"loading the model: {prepared.request.model}")
    modes, exact = with_exact(prepared)
    wanted = {config.split for config in modes.values()}
    alike = wanted.pop() if len(wanted) == 1 else None  # else each engine splits and joins them for itself
    parts = PARTS if any(config.guidance_parallel == PARTS for config in modes.values()) else 1
    set_repeatable(transport.device, all(config.deterministic for config in modes.values()))  # for encoders as well
    split = None if alike is None else replica.splits_weights(alike, parts)
    model = load_requested(prepared.request, prepared.values["dtype"], transport, split)
    engines = Engines(modes, lambda config: Engine(model.pipe, config, replica.transport))
    if prepared.quality is None:  # else those of the settings that are tried
        _ = [engines[mode] for mode in modes]
    folder = prepared.output.open() if transport.rank == 0 else None
    transport.broadcast_object(None)  # all ranks have their model
    if folder is not None:
        replica.say_ready(prepared.started)
        for line in engines.chosen():
            say(line)
    return Session(prepared, replica, model, engines, exact, folder)


def finish(
    session: Session, done: JobResult, records: Mapping[str, Any] | None = None, told: str = "", **report: Any
) -> None:
    """Writes results, publishes the folder and prints the table; all ranks call it, and nobody leaves before.

    records: more of metrics.json: `outcomes` of `Outcome`, `inputs` by `Task.record`, `volumes` by
    `HiddenRegionReport.record`, `jumps` by `judging.jumps`; told: in the table's place; report: arguments of
    `cocodiff_eval.report.page.write_report`.
    """
    transport = session.replica.whole
    own = {mode: {**engine.trace.record(), "rank": transport.rank} for mode, engine in session.engines.items()}
    tried = [f"{mode}: {engine.device_trial}" for mode, engine in session.engines.items() if engine.device_trial]
    told_by = transport.gather_object((own, tried)) or []
    if session.folder is not None:
        records = {
            **(records or {}),
            "devices": sorted({*chain(*(tried for _, tried in told_by))}),
        }  # replicas may have different ones
        # settings that were tried by some replicas alone have no engine on others
        of_ranks = {mode: [of[mode] for of, _ in told_by if mode in of] for mode in session.engines.modes}
        save_traces(session.folder / "trace.json", {mode: records for mode, records in of_ranks.items() if records})
        _write_results(session, session.folder, done, records, told, report)
    transport.broadcast_object(None)


def _write_results(
    session: Session, folder: Path, done: JobResult, records: Mapping[str, Any], told: str, report: dict[str, Any]
) -> None:
    from cocodiff_eval.quality.metrics import metrics_document
    from cocodiff_eval.report.page import write_report
    from cocodiff_eval.report.tables import terminal_table

    values, ranks = session.prepared.values, session.prepared.ranks
    document = metrics_document(values, ranks, [row for *_, row in done.rows])
    # What torch.compile did on this rank, a line each.
    compiled = [f"{mode}: {engine.compiled}" for mode, engine in session.engines.items() if engine.compiled]
    more = ("quality", done.bounds), *records.items(), ("compiled", compiled)
    document |= {name: said for name, said in more if said}
    document = {name: document[name] for name in (*FIRST, *document) if name in document}
    outcomes = [f"{one['name']}, mask {one['mask']}: {one['told']}" for one in records.get("outcomes", ())]
    verdicts = [one["verdict"] for one in records.get("volumes", ()) if one["verdict"] is not None]
    (folder / "metrics.json").write_text(json.dumps(document, indent=1, allow_nan=False))
    facts = {
        "model": session.model.name,
        "ranks": str(ranks),
        "machine": values["machine"],
        "presets": ", ".join(session.prepared.presets),
        "steps": str(values["steps"]).strip("[]"),
        "seed": str(values["seed"]),
        **({"samples": str(values["samples"])} if values.get("samples", 1) > 1 else {}),
        **({"outcome": "; ".join(outcomes)} if outcomes else {}),
        **({"hidden regions": "; ".join(verdicts)} if verdicts else {}),
        **({"devices": "; ".join(records["devices"])} if records["devices"] else {}),
        "cocodiff": __version__,
    }
    write_report(folder / "report.html", document, facts=facts, **report)
    write_settings(folder, values | ({FOUND: done.bounds} if done.bounds else {}), session.engines.chosen())
    session.prepared.output.publish()
    say("\n".join([*compiled, "", *verdicts, told or terminal_table(document), ""]))
    final = session.prepared.output.final
    stores = f"napari --plugin napari-ome-zarr {shlex.quote(str(final / 'images'))}/*.ome.zarr"
    shown = [stores] if any((final / "images").glob("*.ome.zarr")) else []
    say("\n".join([*shown, f"report: {final / 'report.html'}", *outcomes]))
