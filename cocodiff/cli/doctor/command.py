"""`cocodiff doctor`: check this machine and the way the ranks were started. The exit code is 1 if something is wrong.

Under mpiexec, torchrun or PALS it checks those ranks, else --ranks of its own. Its ranks import neither diffusers nor
transformers: twelve of them would take longer than all checks. One process for each host tries all packages instead.
"""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import yaml

from cocodiff import __version__
from cocodiff.comm.launch import Launch, detect, find_mpiexec, python_words, without_launcher
from cocodiff.config.config import Config, load_machine
from cocodiff.config.errors import OwnRankError, PeerLost, UserError
from cocodiff.config.setting import Option
from cocodiff.jobs.folder import OutputFolder
from cocodiff.jobs.options import LOG_LEVEL, RANKS, check_counts, engine_record, engine_settings, parse, with_settings
from cocodiff.jobs.ranks import run_holding, run_ranks, settle
from cocodiff.jobs.record import write_document
from cocodiff.jobs.terminal import say

if TYPE_CHECKING:  # torch is imported by the ranks, or once before they are forked
    from cocodiff.cli.doctor.checks import Finding
    from cocodiff.cli.doctor.facts import Facts, SeparateTrial
    from cocodiff.topology import Topology

FILE = "doctor.json"
SAFE = "or oneCCL's safe mode (SAFE=1, docs/aurora.md)"
REMEDY = f"try another --transport, {SAFE}; a slow machine needs a larger --patience_s"
COMPILE_REMEDY = "run without them (--kernels torch); a slow compiler needs a larger --compile_s"
PAIR_S = 10.0  # seconds for two messages between ranks that are connected
REPORT = "doctor's report: "  # start of the lines that a trial in a job of its own reports
OPTIONS = (
    RANKS,
    Option("model", "say whether this one fits: a name in configs/models, a .yaml file, or a folder"),
    Option("size", "side of its square image in pixels", 1024, type=int),
    Option("batch", "images in one call of it", 1, type=int),
    Option("patience_s", "seconds after which a step that does not end is taken for hanging", 120.0, type=float),
    Option("compile_s", "the same for compiling the SYCL kernels, once a node", 600.0, type=float),
    Option("out", "folder of doctor.json", "doctor"),
    Option("overwrite", "replace the results of an earlier run", False, type=bool),
    LOG_LEVEL,
)
SETTINGS = ("machine", "transport", "device", "kernels", "messages", "timeout_s")  # the engine's settings that it takes
SIGNS = {"fault": "FAULT", "warning": "warn", "note": "note", "ok": "ok"}


def start(words: Sequence[str], launch: Launch) -> int:
    """Run `cocodiff doctor` with its options, and return its exit code: 1 if something is wrong.

    Args:
        words: the options.
        launch: how this process was started.
    """
    about = "Checks this machine, the ranks' binding, messages and memory; exit 1 where something is wrong."
    values = parse("doctor", about, with_settings(OPTIONS, lambda one: one.name in SETTINGS), words)
    check_counts(values, "ranks", "batch", "size")
    for name in ("patience_s", "compile_s"):
        if not values[name] > 0:
            raise UserError(f"--{name} {values[name]}: give a number of seconds above 0")
    launch, _ = settle(values, launch)
    config = engine_record()(**engine_settings(values))
    load_machine(config.machine)
    output = OutputFolder(values["out"], values["overwrite"])

    def imports() -> None:
        if (values["ranks"] or 1) > 1:
            for name in ("engine", *(f"cli.doctor.{part}" for part in ("checks", "facts", "trials"))):
                import_module(f"cocodiff.{name}")

    verdict: list[bool] = []
    work = partial(look, values, launch, output, verdict)
    code = run_holding(output, values, launch, config, work, imports)
    if code:
        return code
    healthy = verdict[0] if verdict else json.loads((output.final / FILE).read_text())["healthy"]
    return 0 if healthy else 1


def look(values: dict[str, Any], launch: Launch, output: OutputFolder, verdict: list[bool], transport: Any) -> None:
    """Gather facts and run trials on one rank; on rank 0 also print and write the findings. All ranks call it.

    Raise OwnRankError if the trials were ended early.

    Args:
        values: the command's options by name.
        launch: how this process was started.
        output: the folder of the results.
        verdict: list to which every rank appends True if no fault was found, else False.
        transport: the rank's transport.
    """
    from cocodiff.cli.doctor.checks import examine, is_healthy

    started = time.monotonic()
    if launch.kind == "alone" and transport.size > 1:
        launch = Launch("forked", transport.rank, transport.size, transport.rank, transport.size)
    facts = gather(values, launch, transport)
    healthy = True
    if transport.rank == 0:
        findings = examine(facts)
        healthy = is_healthy(findings)
        write(output, values, facts, findings, healthy)
        say("\n".join(table(findings)))
        looked = f"{len(facts.ranks)} rank(s) looked at in {time.monotonic() - started:.1f} s"
        where = f"all that was seen, for you or for a report: {output.final / FILE}"
        if facts.machine():
            say(f"the machine with what was measured, for cocodiff plan --machine: {output.final / 'machine.yaml'}")
        else:
            say(f"no machine.yaml: these CPUs are taken to stand in for the devices of {facts.topology.machine.name}")
        say(f"{'healthy' if healthy else 'not healthy'}: {looked}; {where}")
    if facts.stopped:
        raise OwnRankError(facts.stopped)
    verdict.append(transport.broadcast_value(healthy))


# Facts ----------------------------------------------------------------------------------------------------------------


def gather(values: dict[str, Any], launch: Launch, transport: Any) -> Facts:
    """Return the facts of all ranks on rank 0, and this rank's own on other ranks. All ranks call it.

    Args:
        values: the command's options by name.
        launch: how this process was started.
        transport: the rank's transport.
    """
    from cocodiff.cli.doctor import trials
    from cocodiff.cli.doctor.facts import Facts, gather_rank, path_of, sycl_path
    from cocodiff.comm.transport import TOGETHER
    from cocodiff.topology import Topology

    topology = Topology.build(load_machine(values["machine"]), transport.size, launch.local_size)
    usual_s, compile_s, path = values["patience_s"], values["compile_s"], values["kernels"]

    step = partial(patience, usual_s, transport.rank, transport.health)
    if launch.local_rank == 0:
        if launch.speaks and path_of(path) != "torch":
            say(f"SYCL kernels: compiled once a node where none are kept yet, in {compile_s:g} s at most")
        with patience(compile_s, transport.rank, transport.health, "compiling SYCL kernels", COMPILE_REMEDY):
            sycl_path(transport.device, path)
    with step("reading this rank's facts"):
        own = gather_rank(transport, launch, values["kernels"], look_at_host=launch.local_rank == 0)
    with step("attention, copies and products of the device"):
        trial, cost = trials.compute(transport.device, transport.size, *shape_of(values))
        rates = trials.rates(transport.device)
        own = replace(own, device_trial=trial, deterministic_cost=cost, rates=rates)
    if transport.size == 1:
        return Facts([own], topology, needed=needed(values, topology, transport))
    try:
        waiting = "waiting for the nodes' SYCL kernels"
        with patience(compile_s + usual_s, transport.rank, transport.health, waiting, COMPILE_REMEDY):
            transport.all_gather_values(None, "SYCL kernels")
        pair = ask("pair", transport, launch, values)
        with step("making a group of all ranks"):
            group = transport.group(range(transport.size), TOGETHER[values["messages"]])
            group.barrier()
        with step("messages between streams that are kept busy"):
            order = trials.order(transport, group)
        with step("gathering the facts of all ranks"):
            ranks = transport.gather_values(own) or [own]
        alltoalls = trials.all_to_alls(transport, group, step)
        with step("messages beside other work"):
            overlap = trials.overlap(transport, group)
        issues = trials.issues(transport, group, step)
        links = trials.links(transport, group, topology, step)
        op_sync = ask("op_sync", transport, launch, values)
    except (PeerLost, OwnRankError) as error:
        return Facts([own], topology, stopped=str(error))
    model_needs = needed(values, topology, transport)
    asked = {"messages": values["messages"], "one_by_one": transport.one_by_one, "pair": pair, "op_sync": op_sync}
    return Facts(ranks, topology, alltoalls, overlap, order, issues, links, model_needs, **asked)


@contextmanager
def patience(seconds: float, rank: int, health: Any, what: str, remedy: str = REMEDY) -> Iterator[None]:
    """End the process, with a line that names the step, if the block takes too long: no exception can reach a library
    that hangs.

    Raise OwnRankError if the step fails, as it does if wrong messages arrive.

    Args:
        seconds: limit of time.
        rank: the rank in the line.
        health: the rank's watch over lost ranks, which words the error.
        what: name of the step.
        remedy: what the user can do.
    """

    def give_up() -> None:
        os.write(2, f"cocodiff: FAULT: rank {rank} hangs since {seconds:g} s at {what}: {remedy}\n".encode())
        os._exit(1)

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    except (PeerLost, UserError, OwnRankError):
        raise
    except Exception as error:
        raise OwnRankError(f"{what}: {health.blame(error)}") from error
    finally:
        timer.cancel()


def shape_of(values: dict[str, Any]) -> tuple[int, int, int]:
    """Return (heads, channels of a head, tokens) of the model given by --model; without it, those of an image of 1024 x
    1024 in FLUX.1.

    Args:
        values: the command's options by name.
    """
    from cocodiff.jobs.model_shapes import load_shape

    shape = load_shape(values["model"] or "flux.1")
    return shape.heads, shape.head_dim, sum(one.tokens for one in shape.segments(values["size"]))


def needed(values: dict[str, Any], topology: Topology, transport: Any) -> int | None:
    """Return the bytes that the fullest rank needs for the model given by --model, with an exact preset. Return None
    without --model, and on other ranks than 0.

    Args:
        values: the command's options by name.
        topology: all ranks.
        transport: the rank's transport.
    """
    if not values["model"] or transport.rank:
        return None
    from cocodiff.jobs.model_shapes import load_shape
    from cocodiff.planner.case import Case
    from cocodiff.planner.memory import fullest

    shape = load_shape(values["model"])
    call = shape.segments(values["size"]), values["batch"] * shape.rows_per_image
    return fullest(Case(shape, topology, Config(), *call)).total


# Trials in jobs of their own, whose ranks may hang or have another value of a variable --------------------------------


def ask(trial: str, transport: Any, launch: Launch, values: dict[str, Any]) -> SeparateTrial:
    """Run a trial in a job of its own, which rank 0 starts on the same tiles in the same way as this job, while all
    ranks wait.

    Return on rank 0 (what the trial reported, its last other line of output in a list). Both are empty on other ranks,
    and if the library that the trial is about is not in use.

    Args:
        trial: "pair", a trial of two ranks; or "op_sync", of all ranks, or of this node's if there is no mpiexec.
        transport: the rank's transport.
        launch: how this process was started.
        values: the command's options by name.
    """
    if not transport.one_thread or (trial == "op_sync" and transport.library not in ("xccl", "ccl")):
        return [], []
    by_mpi, local, output = launch.kind == "mpi", launch.local_size or transport.size, b""
    ranks = 2 if trial == "pair" else transport.size if by_mpi else local
    given = (trial, None if by_mpi else ranks, values | {"transport": transport.library})
    words = python_words(f"from cocodiff.cli.doctor import command; sys.exit(command.answer(*{given!r}))")
    by_pals = ["--pmi=pmix", "--envall", *os.environ.get("MPIEXEC_FLAGS", "").split()]
    pals = by_pals if "PALS_RANKID" in os.environ else []
    start = [find_mpiexec() or "", *pals, "-n", str(ranks), "--ppn", str(min(ranks, local))] if by_mpi else []
    environment = without_launcher(os.environ) | {"COCODIFF_RANKS": str(ranks)}
    if trial == "op_sync":  # oneCCL reads the variable only once
        environment["CCL_OP_SYNC"] = "0" if os.environ.get("CCL_OP_SYNC", "0") != "0" else "1"
    limit_s = values["patience_s"]
    with patience(2 * limit_s, transport.rank, transport.health, f"a job of its own, {trial}"):
        if transport.rank == 0:
            run: Any = partial(subprocess.run, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            try:
                output = run([*start, *words], timeout=limit_s).stdout
            except (OSError, subprocess.TimeoutExpired) as error:
                output = getattr(error, "strerror", f"no end within {limit_s:g} s").encode()
        transport.all_gather_values(None, trial)
    lines = [line.partition(REPORT) for line in output.decode(errors="replace").strip().splitlines()]
    return [json.loads(told) for _, found, told in lines if found], [line for line, found, _ in lines if not found][-1:]


def answer(trial: str, ranks: int | None, values: dict[str, Any]) -> int:
    """Run a trial on the ranks of the job that `ask` has started, and print what it reports. Return the exit code.

    Args:
        trial: "pair" or "op_sync".
        ranks: number of ranks to fork; None if mpiexec has started them.
        values: the options of the command that asks, by name.
    """
    from cocodiff.cli.doctor import trials

    def work(transport: Any) -> None:
        limit_s = PAIR_S if trial == "pair" else values["patience_s"] / 2  # ends before the job that waits kills it
        limit = partial(patience, limit_s, transport.rank, transport.health)
        for found in getattr(trials, f"report_{trial}")(transport, limit, values["messages"]):
            if transport.rank == 0:
                print(f"{REPORT}{json.dumps(found)}", flush=True)

    config = engine_record()(**{name: values[name] for name in ("device", "transport", "timeout_s")})
    return run_ranks(ranks, Launch() if ranks else detect(), config, {}, work)


# Results --------------------------------------------------------------------------------------------------------------


def table(findings: Sequence[Finding]) -> list[str]:
    """Return the lines to print: one for each finding, and under faults and warnings the remedy."""
    lines = []
    for finding in findings:
        lines.append(f"{SIGNS[finding.severity]:<6} {finding.check:<11} {finding.text}")
        if finding.remedy and finding.severity in ("fault", "warning"):
            lines.append(f"{'':<18} -> {finding.remedy}")
    return lines


def write(
    output: OutputFolder, values: dict[str, Any], facts: Facts, findings: Sequence[Finding], healthy: bool
) -> None:
    """Write doctor.json, and machine.yaml with the values that were measured. Then give the folder its final name.

    doctor.json is {"schema": 1, "healthy", "findings": [{"check", "severity", "text", "remedy"}], "facts": {...}}.

    Args:
        output: the folder of the results.
        values: the command's options by name.
        facts: the facts about the job.
        findings: the findings of all checks.
        healthy: True if no finding is a fault.
    """
    from cocodiff.planner.traffic import machine_file

    folder = output.open()
    if machine := facts.machine():
        (folder / "machine.yaml").write_text(yaml.safe_dump(machine_file(machine), sort_keys=False))
    known = {
        "machine": facts.topology.machine.name,
        "ranks": [asdict(rank) | {"kernel_trials": [t._asdict() for t in rank.kernel_trials]} for rank in facts.ranks],
        "alltoalls": [*map(asdict, facts.alltoalls)],
        "overlap": None if facts.overlap is None else asdict(facts.overlap) | {"hidden": facts.overlap.hidden},
        "stopped": facts.stopped,
        "order_rounds": facts.order,
        "issues": [asdict(issue) | {"blocks": issue.blocks} for issue in facts.issues],
        "links": [asdict(one) for one in facts.links],
        "blocked_us": facts.blocked_us,
        "needed_bytes": facts.needed,
        "pair": facts.pair,
        "op_sync": facts.op_sync,
    }
    document = {"schema": 1, "cocodiff": __version__, "healthy": healthy, "findings": [*map(asdict, findings)]}
    write_document(folder, FILE, document | {"facts": known}, values)
    output.publish()
