"""Many faults at random moments: stops or kills one rank of four between its first and its last attention call; or
kills whole jobs, which then go on.

    python tests/fault_storm.py --faults 50 --signal STOP --launcher torchrun --seed 0
    python tests/fault_storm.py --jobs 60 --seed 0

Every survivor must end within LIMIT_S and name the victim. Prints a line for each fault and a sum, and exits with 1
when any survivor did not. Not a part of the test suite: 100 faults take half an hour. torchrun forks ranks that meet as
torchrun's do, over gloo; mpiexec starts them under `mpiexec -disable-auto-cleanup`, over MPI, or over gloo with
--transport gloo.

Of jobs, each is killed once or twice at a random moment, every third while its results are created or published, loses
some of its files in between, and goes on with --resume: it must not hang, and end with the same voxels as a run that
nothing happened to.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

RANKS = 4
TIMEOUT_S = 4.0
LIMIT_S = 9.0
VARIANTS = [
    {"name": "flat"},
    {"name": "tapa"},
    {"name": "v_first"},
    {"name": "split"},
    {"name": "cocodiff"},
    {"name": "cocodiff+"},
    {"name": "tapa", "chunks": 2},
    {"name": "tapa", "ring": 2},
]


def run_rank(rank: int, variant: int, transport: str, folder: Path) -> None:
    """One rank: attention calls without end. What it ends with goes to a file of its own."""
    import torch
    from tiny_models import sd3_inputs, sd3_transformer

    from cocodiff import Config, PeerLost, parallelize

    config = Config.preset(**VARIANTS[variant], steps=10**6, timeout_s=TIMEOUT_S, transport=transport)
    model = sd3_transformer(4)
    try:
        with torch.no_grad(), parallelize(model, config=config):
            inputs = sd3_inputs(1, 8, 8, 5)
            for step in range(10**6):
                inputs["timestep"] = torch.full_like(inputs["timestep"], 1e6 - step)
                model(**inputs)
                if step == 0:
                    (folder / f"pid.{rank}").write_text(str(os.getpid()))
    except PeerLost as error:
        (folder / f"end.{rank}").write_text(str(error))
    except BaseException:
        (folder / f"end.{rank}").write_text(traceback.format_exc())
    finally:
        os._exit(1)


def fork_ranks(variant: int, folder: Path) -> list[int]:
    """Ranks that find each other as torchrun's do, out of this process, which has imported all they need."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    pids = []
    for rank in range(RANKS):
        pid = os.fork()
        if pid == 0:
            log = os.open(folder / f"log.{rank}", os.O_WRONLY | os.O_CREAT)
            os.dup2(log, 1)
            os.dup2(log, 2)
            words = {"RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": RANKS}
            os.environ.update({name: str(value) for name, value in words.items()})
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
            run_rank(rank, variant, "auto", folder)
        pids.append(pid)
    return pids


def start_mpi(variant: int, transport: str, folder: Path) -> subprocess.Popen[bytes]:
    from launching import find_mpiexec

    words = [find_mpiexec(), "-disable-auto-cleanup", "-n", str(RANKS), sys.executable, __file__]
    words += ["--rank", str(variant), transport, str(folder)]
    environment = os.environ | {"I_MPI_FABRICS": "shm", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        words, stdout=(folder / "log").open("wb"), stderr=subprocess.STDOUT, env=environment, start_new_session=True
    )


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def fault(number: int, signal_name: str, launcher: str, transport: str, chance: random.Random) -> str:
    """One fault; "" where every survivor ended in time and named the victim, else what went wrong."""
    variant, victim = chance.randrange(len(VARIANTS)), chance.randrange(RANKS)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        forked = fork_ranks(variant, folder) if launcher == "torchrun" else []
        job = None if forked else start_mpi(variant, transport, folder)
        try:
            deadline = time.monotonic() + 120
            while len(pids := {int(p.name[4:]): p.read_text() for p in folder.glob("pid.*")}) < RANKS:
                if time.monotonic() > deadline:
                    logs = "".join(path.read_text(errors="replace") for path in sorted(folder.glob("[le]*")))
                    print(f"{number} {VARIANTS[variant]}: only ranks {sorted(pids)} began: {logs}", flush=True)
                    return "the ranks never began"
                time.sleep(0.05)
            ranks = {rank: int(pid) for rank, pid in pids.items()}
            time.sleep(chance.uniform(0, 1.5))
            os.kill(ranks[victim], getattr(signal, f"SIG{signal_name}"))
            struck = time.monotonic()
            survivors = {rank: pid for rank, pid in ranks.items() if rank != victim}
            while any(alive(pid) for pid in survivors.values()) and time.monotonic() < struck + LIMIT_S:
                for pid in forked:
                    os.waitpid(pid, os.WNOHANG) if alive(pid) else None
                time.sleep(0.05)
            took = time.monotonic() - struck
            wrong = [f"rank {rank} lives" for rank, pid in survivors.items() if alive(pid)]
            for rank in survivors:
                said = "".join(p.read_text(errors="replace") for p in (folder / f"end.{rank}",) if p.exists())
                logs = "".join(p.read_text(errors="replace") for p in folder.glob("log*"))
                spoken = [line for line in logs.splitlines() if f"[rank {rank}] " in line]
                if not said.startswith(f"rank {victim} ") and not any(f"] rank {victim} " in line for line in spoken):
                    wrong.append(f"rank {rank} said {said!r} {spoken}")
            what = f"{signal_name} rank {victim} {VARIANTS[variant]} {launcher} {transport}"
            print(f"{number} {what} {took:.1f} s {wrong or 'ok'}", flush=True)
            return "; ".join(wrong)
        finally:
            for pid in [*forked, *(int(p.read_text()) for p in folder.glob("pid.*"))]:
                if alive(pid):
                    os.kill(pid, signal.SIGKILL)
            for pid in forked:
                try:
                    os.waitpid(pid, 0)
                except ChildProcessError:
                    continue
            if job is not None:
                try:
                    job.wait(10)
                except subprocess.TimeoutExpired:
                    os.killpg(job.pid, signal.SIGKILL)
                    job.wait()


def kill_jobs(numbers: range, seed: int) -> int:
    """A line for each job, and a sum. Returns the exit code."""
    sys.path.insert(0, str(Path(__file__).parent / "commands"))
    from killed_jobs import Storm

    failed = []
    with tempfile.TemporaryDirectory() as folder:
        storm = Storm(Path(folder), seed)
        for number in numbers:
            started = time.monotonic()
            told, wrong = storm.case(number)
            print(f"{number} {told} {time.monotonic() - started:.1f} s {wrong or 'ok'}", flush=True)
            failed += [number] if wrong else []
    print(f"{len(numbers) - len(failed)} of {len(numbers)} jobs as they should be; not: {failed}")
    return 1 if failed else 0


def main() -> int:
    if sys.argv[1] == "--rank":
        from cocodiff.comm.launch import detect

        run_rank(detect().rank, int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
    parser = argparse.ArgumentParser()
    parser.add_argument("--faults", type=int, default=50)
    parser.add_argument("--signal", choices=("STOP", "KILL"), default="KILL")
    parser.add_argument("--launcher", choices=("torchrun", "mpiexec"), default="torchrun")
    parser.add_argument("--jobs", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    if chosen.jobs:
        return kill_jobs(range(chosen.first, chosen.first + chosen.jobs), chosen.seed)
    if chosen.launcher == "torchrun":  # the ranks are forked: what they import is imported once
        import torch
        from tiny_models import sd3_transformer

        import cocodiff.engine  # noqa: F401

        torch.set_num_threads(1)  # a pool of threads does not live on in a fork, which would wait for it
        sd3_transformer(4)
    chance = random.Random(chosen.seed)
    failed = [
        number
        for number in range(chosen.faults)
        if fault(number, chosen.signal, chosen.launcher, chosen.transport, chance)
    ]
    print(f"{chosen.faults - len(failed)} of {chosen.faults} as they should be; not: {failed}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    sys.exit(main())
