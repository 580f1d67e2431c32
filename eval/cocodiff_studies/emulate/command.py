"""`cocodiff emulate`: runs a command's ranks on an emulated machine, whose links are as unequal as the real one's.

The network is real, its rates are the machine file's divided by `--scale`; what a rank computes runs at this host's
speed. Namespaces have no names and belong to this process: when it ends, in whatever way, they end with it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from itertools import takewhile
from pathlib import Path
from typing import Any

from cocodiff.cli.main import COMMANDS, run_command
from cocodiff.comm.launch import Launch, detect, find_mpiexec
from cocodiff.config import check_choice, load_machine
from cocodiff.console.options import Option, parse
from cocodiff.console.terminal import limit_threads, quiet_libraries, say
from cocodiff.errors import UserError
from cocodiff.jobs.session import EVERY_RANK_IMPORTS
from cocodiff.processes.children import die_with_parent, without_launcher
from cocodiff.processes.emulated import EMULATED
from cocodiff.processes.room import check_room
from cocodiff.topology.machine import Topology
from cocodiff_studies.emulate.enter import TILES
from cocodiff_studies.emulate.network import BRIDGE, Network, address
from cocodiff_studies.emulate.processes import TOKEN, fork_all, kill_all, registered
from cocodiff_studies.emulate.verify import Rate, measure_rates

PORT = "29400"
OFF = 0.1  # a link that misses its rate by more than this part is called out
MODELS = ("inpaint", "generate", "sweep")  # subcommands whose ranks load a pipeline
ON_RANKS = (*MODELS, "bench")
LAUNCHERS = ("fork", "mpiexec")
OPTIONS = (
    Option("machine", "machine to emulate: aurora, local-6x2 or a .yaml file", "aurora"),
    Option("nodes", "nodes of the machine", 1, type=int),
    Option("ranks", "tiles, on a machine of no fixed size", type=int),
    Option("scale", "how many times slower the links are than in the machine file", 3000.0, type=float),
    Option("launcher", "who starts the ranks: we do, or mpiexec (then MPI can be used)", "fork", choices=LAUNCHERS),
    Option("log_level", "library messages to show", "error", choices=("debug", "info", "warning", "error")),
)


def start(words: Sequence[str], launch: Launch) -> int:
    options, command = list(words), []
    if "--" in options:
        cut = options.index("--")
        options, command = options[:cut], options[cut + 1 :]
    values = parse("emulate", "Runs a command on an emulated machine: emulate [options] -- COMMAND.", OPTIONS, options)
    if launch.kind != "alone":
        raise UserError("emulate starts the ranks itself: use it without mpiexec and torchrun")
    if not command or not command[0]:
        raise UserError("emulate has no command to run: cocodiff emulate [options] -- cocodiff bench alltoall")
    topology = topology_of(values)
    program = cocodiff_of(command)
    if program:
        command = [*program, *settle_command(command[len(program) :], values)]
    own = is_this_one(program)
    if own:
        command = ["cocodiff", *command[len(program) :]]
    check_host(values)
    if not own and shutil.which(command[0]) is None:
        raise UserError(f"emulate cannot run {command[0]}: there is no such program, or it is not executable")
    quiet_libraries(values["log_level"])
    limit_threads(topology.size)
    check_room(topology.size)
    with registered() as token:
        return run_emulated(values, topology, command, own, token)


def topology_of(values: dict[str, Any]) -> Topology:
    """Raises UserError where the machine cannot have so many nodes or ranks."""
    machine = load_machine(values["machine"])
    if values["nodes"] < 1:
        raise UserError(f"--nodes {values['nodes']}: at least 1 is needed")
    if not 0 < values["scale"] < float("inf"):
        raise UserError(f"--scale {values['scale']:g}: give a number above 0, as 3000")
    a_node = machine.tiles_per_node
    if a_node is None:
        if values["ranks"] is None or values["ranks"] < 1 or values["ranks"] % values["nodes"]:
            raise UserError(
                f"machine {machine.name} has no fixed size: add --ranks N, a multiple of the {values['nodes']} node(s)"
            )
        return Topology.build(machine, values["ranks"], values["ranks"] // values["nodes"])
    if values["ranks"] not in (None, a_node * values["nodes"]):
        raise UserError(
            f"--ranks {values['ranks']}: {values['nodes']} node(s) of {machine.name} have {a_node * values['nodes']}"
        )
    return Topology.build(machine, a_node * values["nodes"])


def cocodiff_of(command: Sequence[str]) -> list[str]:
    """The words of a command that start cocodiff: `cocodiff`, a path or link to it, or Python's `-m cocodiff`.
    None where it is another program."""
    file = found_at(command[0])
    if command[0] == "cocodiff" or (os.path.realpath(file).endswith("/cocodiff") and not file.is_dir()):
        return [command[0]]
    flags = list(takewhile(lambda word: word.startswith("-") and word != "-m", command[1:]))
    module = command[1 + len(flags) : 3 + len(flags)]
    if Path(command[0]).name.startswith("python") and list(module) == ["-m", "cocodiff"]:
        return [command[0], *flags, *module]
    return []


def is_this_one(program: Sequence[str]) -> bool:
    """Whether the words of `cocodiff_of` start the cocodiff that runs here: its ranks can be forked from this process.
    One of another environment, or with flags for Python, is executed as it stands."""
    if list(program) == ["cocodiff"]:
        return True
    if len(program) not in (1, 3):
        return False
    # The links of an environment's Python lead out of it, those to its cocodiff lead into it.
    file = found_at(program[0])
    folder = file.resolve().parent if len(program) == 1 else file.parent.resolve()
    return folder == Path(sys.executable).parent.resolve()


def found_at(word: str) -> Path:
    """The file that a command's first word runs."""
    return Path(shutil.which(word) or word)


def settle_command(words: Sequence[str], values: dict[str, Any]) -> list[str]:
    """A cocodiff command with the emulated machine named. Raises UserError where it names another one."""
    if not words:
        raise UserError("emulate -- cocodiff: add a subcommand, e.g. bench alltoall")
    check_choice("subcommand", words[0], COMMANDS)
    if words[0] not in ON_RANKS:
        raise UserError(f"cocodiff {words[0]} runs on no ranks: emulate runs {', '.join(ON_RANKS)} or other programs")
    if "--help" in words or "-h" in words:
        return list(words)
    for position, word in enumerate(words):
        name, _, given = word.partition("=")
        given = given or (words[position + 1] if position + 1 < len(words) else "")
        if name == "--machine" and given != values["machine"]:
            raise UserError(f"--machine {given} on an emulated {values['machine']}: leave it away")
    return (
        list(words) if any(w.split("=")[0] == "--machine" for w in words) else [*words, "--machine", values["machine"]]
    )


def check_host(values: dict[str, Any]) -> None:
    """Raises UserError for what an emulation needs and this host lacks."""
    if sys.platform != "linux":
        raise UserError(f"emulate needs Linux (network namespaces); this is {sys.platform}")
    lacking = [f"{tool} (Debian: apt install iproute2)" for tool in ("ip", "tc") if shutil.which(tool) is None]
    if os.geteuid() != 0:
        lacking.insert(0, "root (for network namespaces and rate limits)")
    if values["launcher"] == "mpiexec":
        if find_mpiexec() is None:
            lacking.append("mpiexec: pip install cocodiff[local-mpi]")
        if "shm" in os.environ.get("I_MPI_FABRICS", ""):
            raise UserError("I_MPI_FABRICS names shm, which would go past the emulated links: unset it")
    if lacking:
        raise UserError(f"emulate needs what is not here: {'; '.join(lacking)}")


def run_emulated(values: dict[str, Any], topology: Topology, command: list[str], own: bool, token: str) -> int:
    """Network up, rates checked, ranks run, everything down."""
    started = time.monotonic()
    try:
        with Network.open(topology, values["scale"]) as network:
            up_s = time.monotonic() - started
            rates = measure_rates(network)
            say_network(values, topology, rates, up_s, time.monotonic() - started)
            environment = rank_environment(values, topology, token)
            inodes = [space.inode for space in network.spaces.values()]
            try:
                run = run_under_mpi if values["launcher"] == "mpiexec" else run_forked
                code = run(network, command, own, environment)
            finally:
                ended = time.monotonic()
                kill_all(token, inodes)
    except PermissionError as error:
        raise UserError(
            f"emulate may not make network namespaces here ({error}): it needs root with CAP_SYS_ADMIN and "
            f"CAP_NET_ADMIN, which containers often lack"
        ) from error
    say(f"emulation ended: network down in {time.monotonic() - ended:.2f} s")
    return code


def say_network(values: dict[str, Any], topology: Topology, rates: Sequence[Rate], up_s: float, all_s: float) -> None:
    say(
        f"emulated {topology.machine.name}: {topology.size} tiles on {topology.nodes} node(s), links "
        f"{values['scale']:g} times slower; network up in {up_s:.2f} s, rates checked after {all_s:.2f} s"
    )
    for rate in rates:
        off = rate.measured / rate.nominal - 1
        note = "" if abs(off) <= OFF else "  <- off: a busy host, or too fast for it (raise --scale)"
        say(
            f"  {rate.kind:<12} {rate.source:>3} -> {rate.target:<3} {rate.measured:8.2f} Mbit/s of "
            f"{rate.nominal:.2f} ({off:+.1%}){note}"
        )


def rank_environment(values: dict[str, Any], topology: Topology, token: str) -> dict[str, str]:
    """The variables that all ranks are given: they talk over the bridge, and over TCP."""
    told = {"machine": topology.machine.name, "nodes": topology.nodes, "scale": values["scale"]}
    here = sum(place.node == 0 for place in topology.places)
    return {
        TOKEN: token,
        EMULATED: json.dumps(told),
        "GLOO_SOCKET_IFNAME": BRIDGE,
        "MASTER_ADDR": address(0),
        "MASTER_PORT": PORT,
        "LOCAL_WORLD_SIZE": str(here),
    }


def run_forked(network: Network, command: list[str], own: bool, environment: dict[str, str]) -> int:
    """Ranks forked from here, as torchrun starts them."""
    if own:
        for name in EVERY_RANK_IMPORTS if command[1] in MODELS else ("cocodiff.engine",):
            import_module(name)
    topology = network.topology
    first = {place.node: place.rank for place in reversed(topology.places)}
    jobs: list[Callable[[], int]] = []
    for place in topology.places:
        of_rank = {
            "RANK": str(place.rank),
            "WORLD_SIZE": str(topology.size),
            "LOCAL_RANK": str(place.rank - first[place.node]),
            "GROUP_RANK": str(place.node),
        }
        jobs.append(partial(_rank, network, place.rank, command, own, environment | of_rank))
    return fork_all(jobs)


def _rank(network: Network, rank: int, command: list[str], own: bool, environment: dict[str, str]) -> int:
    network.tile(rank).enter()
    os.environ.update(environment)
    if own:
        return run_command(command[1:], detect())
    try:
        os.execvp(command[0], command)
    except OSError as error:
        if rank == 0:
            print(f"cocodiff: cannot run {command[0]}: {error.strerror}", file=sys.stderr)
        return 2


def run_under_mpi(network: Network, command: list[str], own: bool, environment: dict[str, str]) -> int:
    """Ranks of one MPI job: `cocodiff_studies.emulate.enter` takes each to its tile."""
    program = [sys.executable, "-m", "cocodiff", *command[1:]] if own else command
    tiles = ":".join(network.tile(rank).path for rank in range(network.topology.size))
    over_tcp = {
        "FI_PROVIDER": "tcp",
        "FI_TCP_IFACE": BRIDGE,
        "I_MPI_FABRICS": "ofi",
        "I_MPI_PIN": "0",
        "I_MPI_HYDRA_IFACE": "lo",
    }
    launcher = find_mpiexec()
    assert launcher is not None, "checked before"
    words = [
        launcher,
        "-n",
        str(network.topology.size),
        sys.executable,
        "-m",
        "cocodiff_studies.emulate.enter",
        *program,
    ]

    def run() -> int:
        process = subprocess.Popen(
            words,
            env=without_launcher(os.environ) | environment | over_tcp | {TILES: tiles},
            preexec_fn=partial(die_with_parent, os.getpid()),
        )
        return process.wait()

    return fork_all([run])
