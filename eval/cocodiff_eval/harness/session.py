"""The course of a job, for all commands that run a model on ranks: check, start, load, run, write the results.

A mode is a name with settings of the engine under which items are made: a preset of the job, a candidate of
`--quality`, or the exact run that the others are compared with.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
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

# Modules that every rank needs. They are imported once, before ranks are forked.
EVERY_RANK_IMPORTS = (
    "skimage.metrics",
    "skimage.restoration",
    "cocodiff_eval.harness.images",
    "cocodiff_eval.harness.slices",
    "cocodiff.demo_model.vae",
    "cocodiff.engine.engine",
    "cocodiff_eval.report.page",
)
DTYPES = ("auto", "fp32", "bf16", "fp16")  # choices of `--dtype`
FIRST = ("outcomes", "summary", "volumes", "images")  # the keys that metrics.json begins with
EXACT = "flat"  # the preset of the exact run
LOSSY = ("selection", "codec", "arrival", "step_cache")  # settings that can make a run inexact
# Settings that change no bit of an exact run.
ROUTES = ("exchange", "exchange_table", "nic_balance", "transport", "messages", "check_messages")


@dataclass(frozen=True)
class Prepared:
    """A job that is checked but not started: its options, model, settings, and folder of results."""

    values: dict[str, Any]  # the options' values, by name
    ranks: int  # number of ranks, of all replicas together
    request: Request  # the model and its prompts
    presets: dict[str, Config]  # settings of the engine, by the names of presets
    output: OutputFolder  # the folder of results
    started: float  # time.monotonic() when the command began
    partition: Partition = field(default=Partition())  # division of the ranks; one replica until `partitioned`
    quality: Quality | None = None  # the bound of `--quality` and its candidates; None without one
    inputs: Callable[[], dict[str, Any]] = dict  # returns the inputs that results depend on, as plain data

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
        """Check a request against machine, model and folder of results, and return it. Nothing is written.

        Raise UserError if the machine cannot have these ranks, the model cannot be used or the folder may not be
        written. The ranks are not divided yet.

        Args:
            values: the options' values, by name.
            ranks: number of all ranks.
            request: the model and its prompts.
            started: time.monotonic() when the command began.
            quality: the bound on quality; None without one.
            presets: the presets to run; None for those that options name, or for that of `quality`.
        """
        presets = presets or (preset_configs(values) if quality is None else quality.presets)
        topology_of(values["machine"], ranks)
        check_model(request, 1, weights=not values["dry_run"])
        # A dry run writes nothing, so earlier results are no reason to refuse it.
        replaces = values["overwrite"] or (values["dry_run"] and not values["resume"])
        output = OutputFolder(values["out"], replaces, values["resume"])
        files = [request.image, values.get("truth"), *values.get("input", ()), *values.get("mask", ())]
        output.keep_apart([request.model, *filter(None, files)])
        return cls(values, ranks, request, presets, output, started, quality=quality)

    def partitioned(self, **work: Any) -> Prepared:
        """Return a copy of the job with its ranks divided into replicas and parts for guidance.

        Settings that follow from the division are set in it. Raise UserError if the ranks cannot be divided as options
        ask, or the model does not fit in memory.

        Args:
            work: arguments of `partition_of` on the amount of work: `images`, `batches` and others.
        """
        request, ranks, quality = self.request, self.ranks, self.quality
        presets = self.presets if quality is None else quality.candidates
        partition = partition_of(self.values, request, [*presets.values()], ranks, compares=quality is None, **work)
        check_model(request, ranks // (partition.replicas * partition.guidance), weights=not self.values["dry_run"])
        if quality is not None:
            quality = quality.for_links(*sequence_of(self.values, request, partition, ranks))
            presets = quality.candidates
        presets = with_guidance(with_tokens(presets, self.values, request), partition, request)
        presets = with_weights(presets, self.values, request, partition, ranks, **work)
        if quality is not None:
            if ranks == partition.replicas and not quality.caches:
                # Each replica is one rank, which sends nothing: only the exact candidate is left.
                presets = {quality.exact: presets[quality.exact]}
            quality = replace(quality, candidates=presets)
            presets = quality.presets
        return replace(self, presets=presets, partition=partition, quality=quality)


class Engines(dict[str, "Engine"]):
    """The engines of a job by mode, a name with settings of the engine. Each is made when it is first asked for.

    Making one opens communicators. So all ranks of a replica must ask for modes in the same order.
    """

    def __init__(self, modes: Mapping[str, Config], make: Callable[[Config], Engine]) -> None:
        """Take the settings of each mode. No engine is made yet.

        Args:
            modes: settings of the engine by mode, such as a preset's name.
            make: makes an engine with such settings.
        """
        super().__init__()
        self.modes, self._make = modes, make

    def __missing__(self, mode: str) -> Engine:
        self[mode] = self._make(self.modes[mode])
        return self[mode]

    def chosen(self) -> list[str]:
        """Return a line of text for each engine that chose settings by itself (such as "auto"), with its choice."""
        return [f"{mode}: {engine.sequence.chosen}" for mode, engine in self.items() if engine.sequence.chosen]


@dataclass(frozen=True)
class Session:
    """A job as one of its ranks runs it: the loaded model, with an engine for each mode.

    A mode is a preset, a candidate of --quality, or the exact run.
    """

    prepared: Prepared  # the job's options, presets and partition
    replica: Replica  # this rank's replica
    model: Model  # the loaded model, with the embeddings of its prompts
    engines: Engines  # engines on the ranks of this replica
    exact: str | None  # mode of the exact run, to compare others with; may be a preset; None to compare with none
    folder: Path | None  # folder that results are written to; None on ranks other than 0

    @property
    def images(self) -> Path:
        """The folder that images are written to, the same on every rank."""
        return self.prepared.output.partial / "images"

    def run(self, job: Job) -> None:
        """Make the job's results, write them, and move them into the folder of results. All ranks call it."""
        from cocodiff_eval.harness.job import Presets, Trials, run_batches

        prepared, quality = self.prepared, self.prepared.quality
        way = job.way or Presets(prepared.presets, self.exact)
        if quality is not None:
            way = Trials(job, quality, prepared.output.store)

        def settings() -> dict[str, Any]:
            """Return all that the results depend on, as plain data."""
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
    """Start the ranks of a job, each of which loads the model and makes its part. Return the command's exit code.

    Nothing is started in a dry run. With `--resume` nothing is started either if the results in the folder are
    finished. Then raise UserError if they were made with other settings, or if files are missing.

    Args:
        prepared: the job.
        launch: how this process was started.
        unit: a plural noun for the job's items, such as "slices".
        job: class of the job as "module:name". Every rank calls it with its session and `given`.
        given: further arguments of that class.
        compared: values that must be equal on all ranks besides the options, by a name for errors.
    """
    values, config = prepared.values, next(iter(prepared.presets.values()))
    if launch.speaks and prepared.quality is not None:
        say(prepared.quality.line(unit))
    if values["dry_run"]:
        return 0
    ended = prepared.output.finished
    if ended is not None:
        if launch.speaks:
            there = ended.settings or {}
            chosen = {"sides": there["sides"]} if "sides" in there else {}  # which the model decides, not the options
            prepared.output.confirm(first_difference(there, describe(prepared) | chosen))
            say(f"nothing is left to do: the results in {prepared.output.final} are finished, with the same settings")
        return 0

    def imports() -> None:
        """Import what ranks need, before they are forked from this process."""
        if launch.speaks and not values["quiet"]:
            note("importing torch and diffusers")
        if launch.kind == "alone":
            import_before_fork(prepared.request, prepared.ranks)

    if launch.kind != "alone":
        imports()

    def work(transport: Any) -> None:
        """Run the job on one rank."""
        session = open_session(prepared, transport)
        session.run(imported(job)(session, *given))

    return run_holding(prepared.output, values, launch, config, work, imports, compared)


def import_before_fork(request: Request, ranks: int | None = None) -> None:
    """Import the model's pipeline and what every rank needs, in the process that ranks are forked from.

    Args:
        request: the model.
        ranks: number of ranks, None if unknown. For a single rank only the pipeline is imported, and the rest when
            needed.
    """
    import_pipeline(request)
    for name in EVERY_RANK_IMPORTS if ranks != 1 else ():
        import_module(name)


# Modes ----------------------------------------------------------------------------------------------------------------


def describe(prepared: Prepared) -> dict[str, Any]:
    """Return all settings and inputs that a job's results depend on, by name, as plain data.

    A job that is resumed compares them with those that it was begun with. The number of replicas is not among them, so
    a job can be resumed with another number.
    """
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
    """Return the settings of each mode of a job by its name, and the name of the exact mode.

    The modes are the presets, or the candidates of `--quality`. The exact mode is the first preset that gives the exact
    run's bits. If there is none, a mode "exact" is added. With `--no_exact` the name is None.
    """
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
    """Return True if a preset is exact and gives the same bits as the exact run.

    The preset may differ from `exact` in the routes of messages, and in settings that only lossy modes use.

    Args:
        config: the preset.
        exact: settings of the exact run.
    """
    if not config.exact:
        return False
    depend = {name: one.only_with[0] for name, one in settings_of(type(config)).items() if one.only_with}
    of_lossy = {name for name, other in depend.items() if other in LOSSY or depend.get(other) in LOSSY}
    binding = vars(config).keys() - {*ROUTES, *LOSSY, *of_lossy}
    return all(getattr(config, name) == getattr(exact, name) for name in binding)


# On every rank --------------------------------------------------------------------------------------------------------


def load_requested(request: Request, dtype: str, transport: Any, split: Any = None) -> Model:
    """Load a job's model on every rank. All ranks call it.

    Args:
        request: the model.
        dtype: one of DTYPES; "auto" is fp32 on a CPU and bf16 on other devices.
        transport: this rank's connection to the other ranks.
        split: function that splits the weights among ranks, as for `load_model`; None to keep all on each.
    """
    if dtype == "auto":
        dtype = "fp32" if transport.device.type == "cpu" else "bf16"
    return load_model(request, dtype, transport, split)


def open_session(prepared: Prepared, transport: Any) -> Session:
    """Load the model, make the engines and open the folder of results. All ranks call it.

    Return this rank's session when all ranks are ready. Candidates of `--quality` get their engines later, when they
    are tried.

    Args:
        prepared: the job, with its ranks divided.
        transport: this rank's connection to all other ranks.
    """
    from cocodiff.engine.engine import Engine
    from cocodiff.engine.guidance import PARTS
    from cocodiff.kernels.device import set_repeatable

    # Forked ranks leave this to the process that they are forked from, which waits until none of them writes.
    if detect().kind != "alone":
        transport.health.when_lost(lambda error: prepared.output.discard())
    replica = Replica(transport, prepared.values["machine"], prepared.partition.replicas)
    if transport.rank == 0 and not prepared.values["quiet"]:
        note(f"loading the model: {prepared.request.model}")
    modes, exact = with_exact(prepared)
    wanted = {config.split for config in modes.values()}
    alike = wanted.pop() if len(wanted) == 1 else None  # else each engine splits weights and joins them again
    parts = PARTS if any(config.guidance_parallel == PARTS for config in modes.values()) else 1
    set_repeatable(transport.device, all(config.deterministic for config in modes.values()))  # also for text encoders
    split = None if alike is None else replica.splits_weights(alike, parts)
    model = load_requested(prepared.request, prepared.values["dtype"], transport, split)
    engines = Engines(modes, lambda config: Engine(model.pipe, config, replica.transport, weights=model.weights))
    if prepared.quality is None:  # candidates of a bound get engines when they are tried
        _ = [engines[mode] for mode in modes]
    folder = prepared.output.open() if transport.rank == 0 else None
    transport.broadcast_value(None)  # all ranks have their model
    if folder is not None:
        replica.say_ready(prepared.started)
        for line in engines.chosen():
            say(line)
    return Session(prepared, replica, model, engines, exact, folder)


def finish(
    session: Session, done: JobResult, records: Mapping[str, Any] | None = None, told: str = "", **report: Any
) -> None:
    """Write a job's results and traces, move them into the folder of --out, and print the table. All ranks call it, and
    return when that is done.

    Args:
        session: the job on this rank.
        done: the items that were made.
        records: further parts of metrics.json: `outcomes` (of `Outcome`), `inputs` (`Task.record`), `volumes`
            (`HiddenRegionReport.record`), `jumps` (`judging.jumps`).
        told: text that is printed in place of the table, if any.
        report: further arguments of `cocodiff_eval.report.page.write_report`.
    """
    transport = session.replica.whole
    own = {mode: {**engine.trace.record(), "rank": transport.rank} for mode, engine in session.engines.items()}
    tried = [f"{mode}: {engine.device_trial}" for mode, engine in session.engines.items() if engine.device_trial]
    told_by = transport.gather_values((own, tried)) or []
    if session.folder is not None:
        devices = {line for _, of_rank in told_by for line in of_rank}  # replicas may have different ones
        records = {**(records or {}), "devices": sorted(devices)}
        # A candidate that only some replicas tried has no engine on the ranks of others.
        of_ranks = {mode: [of[mode] for of, _ in told_by if mode in of] for mode in session.engines.modes}
        save_traces(session.folder / "trace.json", {mode: records for mode, records in of_ranks.items() if records})
        _write_results(session, session.folder, done, records, told, report)
    transport.broadcast_value(None)


def _write_results(
    session: Session, folder: Path, done: JobResult, records: Mapping[str, Any], told: str, report: dict[str, Any]
) -> None:
    """Write metrics.json, run.yaml and the report, publish the folder, and print the table, on rank 0.

    Args:
        session: the job on this rank.
        folder: the folder to write to.
        done: the items that were made.
        records: further parts of metrics.json, by name.
        told: text that is printed in place of the table, if any.
        report: further arguments of `write_report`.
    """
    from cocodiff_eval.quality.metrics import metrics_document
    from cocodiff_eval.report.page import write_report
    from cocodiff_eval.report.tables import terminal_table

    values, ranks = session.prepared.values, session.prepared.ranks
    document = metrics_document(values, ranks, [row for *_, row in done.rows])
    # A line for each mode on what torch.compile did on this rank.
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
