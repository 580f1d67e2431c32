"""`cocodiff emulate`: run a command's ranks on an emulated machine, whose links are as unequal as the real one's.

The network is real, with the machine file's rates divided by `--scale`; ranks compute at this host's speed. Namespaces
have no names and belong to this process: they end with it, in whatever way it ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from cocodiff_eval.harness.session import EVERY_RANK_IMPORTS

from cocodiff.cli.main import COMMANDS, run_command
from cocodiff.comm.launch import EMULATED, Launch, detect, find_mpiexec, python_words, without_launcher
from cocodiff.config.config import check_choice, load_machine
from cocodiff.config.errors import UserError
from cocodiff.jobs.children import StopRequest, check_room, die_with_parent, fork, signal_all, stop_requests
from cocodiff.jobs.options import LOG_LEVEL, Option, parse
from cocodiff.jobs.terminal import limit_threads, quiet_libraries, say
from cocodiff.topology import Topology
from cocodiff_studies.namespaces import TILES
from cocodiff_studies.network import BRIDGE, Network, Rate, address, measure_rates

PORT = "29400"
GRACE_S = 2.0  # seconds that ranks have to notice a failure and to clean up
TOKEN = "COCODIFF_EMULATION"  # variable in the environment of every program that is started in an emulation
OFF = 0.1  # a link whose rate is off by more than this part is pointed out
MODELS = ("inpaint", "generate", "sweep")  # subcommands whose ranks load a pipeline
ON_RANKS = (*MODELS, "bench", "doctor")
LAUNCHERS = ("fork", "mpiexec")
OPTIONS = (
    Option("machine", "machine to emulate: aurora, local-6x2 or a .yaml file", "aurora"),
    Option("nodes", "nodes of the machine", 1, type=int),
    Option("ranks", "tiles, on a machine of no fixed size", type=int),
    Option("scale", "how many times slower the links are than in the machine file", 3000.0, type=float),
    Option("launcher", "who starts the ranks: we do, or mpiexec (then MPI can be used)", "fork", choices=LAUNCHERS),
    LOG_LEVEL,
)


def start(words: Sequence[str], launch: Launch) -> int:
    """Run `cocodiff emulate`, with the command whose ranks it starts. Return the exit code.

    Args:
        words: the command line after `cocodiff emulate`: options, `--`, and the command.
        launch: how this process was started.
    """
    cut = [*words, "--"].index("--")
    options, command = list(words[:cut]), list(words[cut + 1 :])
    values = parse("emulate", "Runs a command on an emulated machine: emulate [options] -- COMMAND.", OPTIONS, options)
    if launch.kind != "alone":
        raise UserError("emulate starts the ranks itself: use it without mpiexec and torchrun")
    if not command or not command[0]:
        raise UserError("emulate has no command to run: cocodiff emulate [options] -- cocodiff bench alltoall")
    topology = topology_of(values)
    own = is_this_cocodiff(command[0])
    if own:
        command = ["cocodiff", *settle_command(command[1:], values)]
    check_host(values)
    if not own and shutil.which(command[0]) is None:
        raise UserError(f"emulate cannot run {command[0]}: there is no such program, or it is not executable")
    quiet_libraries(values["log_level"])
    limit_threads(topology.size)
    check_room(topology.size)
    return run_emulated(values, topology, command, own, new_token())


def topology_of(values: dict[str, Any]) -> Topology:
    """Return the places of the emulated machine's ranks. Raise UserError if it cannot have so many nodes or ranks.

    Args:
        values: the options of `cocodiff emulate`.
    """
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


def is_this_cocodiff(word: str) -> bool:
    """Return True if a command's first word names the cocodiff that runs here. Its ranks can then be forked from this
    process."""
    own = Path(sys.executable).parent / "cocodiff"
    return word == "cocodiff" or (own.is_file() and Path(shutil.which(word) or word).resolve() == own.resolve())


def settle_command(words: Sequence[str], values: dict[str, Any]) -> list[str]:
    """Return the words of a cocodiff command after `cocodiff`, with `--machine` added for the emulated machine.

    Raise UserError if they name another machine, or a subcommand that runs on no ranks.

    Args:
        words: the command's words after `cocodiff`.
        values: the options of `cocodiff emulate`.
    """
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
    names_it = any(word.split("=")[0] == "--machine" for word in words)
    return list(words) if names_it else [*words, "--machine", values["machine"]]


def check_host(values: dict[str, Any]) -> None:
    """Raise UserError if this host lacks something that an emulation needs, such as Linux, root, `ip` and `tc`.

    Args:
        values: the options of `cocodiff emulate`.
    """
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
    """Build the network, check its rates, run the ranks, and remove everything. Return the exit code of the ranks.

    Args:
        values: the options of `cocodiff emulate`.
        topology: the places of the emulated machine's ranks.
        command: the program and its arguments.
        own: True if the program is the cocodiff that runs here.
        token: mark of this emulation, which is in the environment of all its processes.
    """
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
    """Print the emulated network and its measured rates. Point out rates that are far off.

    Args:
        values: the options of `cocodiff emulate`.
        topology: the places of the emulated machine's ranks.
        rates: the measured rates.
        up_s: seconds until the network was built.
        all_s: seconds until the rates were measured.
    """
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
    """Return the environment variables that are equal for all ranks, by which they find each other over the emulated
    network.

    Args:
        values: the options of `cocodiff emulate`.
        topology: the places of the emulated machine's ranks.
        token: mark of this emulation.
    """
    told = {"machine": topology.machine.name, "nodes": topology.nodes, "scale": values["scale"]}
    here = len(topology.on_node[0])
    return {
        TOKEN: token,
        EMULATED: json.dumps(told),
        "GLOO_SOCKET_IFNAME": BRIDGE,
        "MASTER_ADDR": address(0),
        "MASTER_PORT": PORT,
        "LOCAL_WORLD_SIZE": str(here),
    }


def run_forked(network: Network, command: list[str], own: bool, environment: dict[str, str]) -> int:
    """Fork the ranks from this process, with the variables that torchrun sets. Return their exit code.

    Args:
        network: the emulated network.
        command: the program and its arguments.
        own: True if the program is the cocodiff that runs here. Ranks then call it instead of executing the file.
        environment: variables for all ranks.
    """
    if own:
        for name in EVERY_RANK_IMPORTS if command[1] in MODELS else ("cocodiff.engine.engine",):
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
    """Run one rank in its tile, and return its exit code. A program that is not cocodiff replaces the process.

    Args:
        network: the emulated network.
        rank: the rank's number.
        command: the program and its arguments.
        own: True if the program is the cocodiff that runs here.
        environment: variables for this rank.
    """
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
    """Run the ranks by `mpiexec`, as one MPI job. Return its exit code.

    Each rank first runs `cocodiff_studies.namespaces`, which enters the rank's tile.

    Args:
        network: the emulated network.
        command: the program and its arguments.
        own: True if the program is the cocodiff that runs here.
        environment: variables for all ranks.
    """
    program = [*python_words("from cocodiff.cli.main import main; sys.exit(main())"), *command[1:]] if own else command
    variables = without_launcher(os.environ) | environment
    variables |= {
        "FI_PROVIDER": "tcp",
        "FI_TCP_IFACE": BRIDGE,
        "I_MPI_FABRICS": "ofi",
        "I_MPI_PIN": "0",
        "I_MPI_HYDRA_IFACE": "lo",
        TILES: ":".join(network.tile(rank).path for rank in range(network.topology.size)),
    }
    launcher = find_mpiexec()
    assert launcher is not None, "checked before"
    enter = python_words("from cocodiff_studies.namespaces import main; main(sys.argv[1:])")
    words = [launcher, "-n", str(network.topology.size), *enter, *program]

    def run() -> int:
        end_too = partial(die_with_parent, os.getpid())
        return subprocess.Popen(words, env=variables, preexec_fn=end_too).wait()

    return fork_all([run])


# Processes: started in their namespaces, watched, and ended together --------------------------------------------------


def fork_all(jobs: Sequence[Callable[[], int]]) -> int:
    """Run each job in a process of its own, forked from this one. Return 0, or the exit code of the first failure.

    A job returns its exit code or does not return at all. After a failure the others have GRACE_S to end, then they are
    killed. If the user stops this process, as with Ctrl-C, they receive SIGTERM first. Signals that this process
    ignores, as under nohup, stay ignored.

    Args:
        jobs: the functions to run, one for each rank.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    children: dict[int, int] = {}
    with stop_requests() as stop:
        try:
            for rank, job in enumerate(jobs):
                children[fork(partial(_told, job), signal.SIG_DFL)] = rank
            return _attend(children, stop)
        finally:
            signal_all(children, signal.SIGKILL)
            for pid in children:
                os.waitpid(pid, 0)


def _told(job: Callable[[], int]) -> int:
    """Return the exit code of a job, in its child process. If it raises an exception, print that and return 1."""
    try:
        return job()
    except BaseException as error:
        print(f"cocodiff: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return 1


def _attend(children: dict[int, int], stop: StopRequest) -> int:
    """Wait for all child processes, and remove each from `children` when it ends. Return the exit code of all together.

    Args:
        children: ranks by the process ids of their processes.
        stop: tells if the user has asked to stop. Children then receive SIGTERM, and the exit code is 130.
    """
    code, deadline, told = 0, float("inf"), False
    while children and time.monotonic() < deadline:
        if stop.asked and not told:
            told, deadline = True, time.monotonic() + GRACE_S
            signal_all(children, signal.SIGTERM)
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid not in children:
            time.sleep(0.02)
            continue
        rank = children.pop(pid)
        if status and not told and not code:
            deadline = time.monotonic() + GRACE_S
            code = os.waitstatus_to_exitcode(status)
            if code < 0:
                print(f"cocodiff: rank {rank} was killed by {signal.Signals(-code).name}", file=sys.stderr)
                code = 1
            elif code != 2:  # a user's mistake has been printed
                print(f"cocodiff: rank {rank} left with code {code}", file=sys.stderr)
    if told:
        print("cocodiff: interrupted; every rank was ended", file=sys.stderr)
        return 130
    return code


def new_token() -> str:
    """End what emulations that were killed have left running, and return a token for a new one.

    The token is "ID-TICKS": this process's id, and its start in clock ticks, which a later process of the same id does
    not share.
    """
    for token in {token for _, token in _others() if token}:
        if _began(token.partition("-")[0]) != token:
            kill_all(token, ())
    return _began(str(os.getpid()))


def kill_all(token: str, namespaces: Collection[int]) -> int:
    """Kill all processes of an emulation, except this one. Return their number.

    Args:
        token: the emulation's token, which is in the environment of its processes.
        namespaces: inode numbers of its network namespaces. Processes in one of them are killed too.
    """
    inside = {f"net:[{inode}]" for inode in namespaces}
    killed = 0
    for entry, own_token in _others():
        with contextlib.suppress(OSError):  # the process may end meanwhile
            if str((entry / "ns" / "net").readlink()) in inside or own_token == token:
                os.kill(int(entry.name), signal.SIGKILL)
                killed += 1
    return killed


def _others() -> Iterator[tuple[Path, str]]:
    """Yield, for each other process of this host that may be read, its folder in /proc and the token of its emulation.

    The token is "" for processes that were not started in an emulation.
    """
    mark = f"{TOKEN}=".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                variables = (entry / "environ").read_bytes().split(b"\0")
                tokens = (one.removeprefix(mark) for one in variables if one.startswith(mark))
                yield entry, next(tokens, b"").decode(errors="replace")


def _began(process: str) -> str:
    """Return a process's id with its start in clock ticks, as "ID-TICKS"; "" if there is no such process."""
    try:
        return f"{process}-{Path(f'/proc/{process}/stat').read_text().rpartition(')')[2].split()[19]}"
    except (OSError, IndexError):
        return ""
