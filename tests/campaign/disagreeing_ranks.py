"""A campaign of ranks that disagree: one rank of a script makes other calls than the rest, and every rank must end.

    python tests/campaign/disagreeing_ranks.py --cases 60 --seed 0

Every rank runs a list of calls inside `parallelize`, as a user's script does; the list of one rank is changed. A case
is right if all ranks end within `timeout_s` of the first rank's last call: all of them without an error, where the
calls were alike after all, or each with a PeerLost or UserError of one line that names a rank and two calls. The seed
and a case's number choose the case. Prints each case, and for a wrong one the command that repeats it.

As a program with a case in JSON as its argument: runs the ranks of that case.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import socket
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

TIMEOUT_S = 20.0
START_S = 60.0  # until the ranks of a case have met, on a busy machine
SETTINGS: tuple[dict[str, Any], ...] = (
    {"preset": "tapa"},
    {"preset": "flat"},
    {"preset": "split"},
    {"preset": "cocodiff"},
    {"preset": "coded"},
    {"preset": "tapa", "chunks": 2},
    {"preset": "tapa", "ring": 2},
)
CALLS = ("image 3", "image 2", "call", "bytes", "drift", "forget", "new_run")
LOCAL = ("forget", "new_run")  # say nothing to the others
KINDS = ("more", "fewer", "order", "steps", "size", "raises", "interrupted", "settings", "parts", "leaves", "again")
# Errors from inside of the product, where a message was taken for another one.
INSIDES = re.compile(r"unpack|'dict'|'list'|NoneType|AttributeError|KeyError|TypeError|awaited|gloo")


@dataclass(frozen=True)
class Case:
    """One run of ranks that disagree."""

    kind: str  # one of KINDS
    family: str  # "flux" calls its transformer once a step, "qwen" twice
    ranks: int
    victim: int  # the rank whose calls are changed
    settings: dict[str, Any]  # of `parallelize`
    others: dict[str, Any]  # the victim's settings
    calls: tuple[str, ...]
    changed: tuple[str, ...]  # the victim's calls
    catches: bool  # every rank catches each call's errors and goes on with the next call

    @classmethod
    def drawn(cls, number: int, seed: int) -> Case:
        """Draw the case of a number."""
        chance = random.Random(f"{seed} {number}")
        kind = KINDS[number % len(KINDS)]
        family = "qwen" if kind == "parts" else chance.choice(("flux", "flux", "qwen"))
        settings = dict(chance.choice(SETTINGS))
        ranks = chance.choice((2, 4) if kind == "parts" or "ring" in settings else (2, 3, 4))
        calls = [chance.choice(CALLS) for _ in range(chance.randint(2, 5))]
        calls[chance.randrange(len(calls))] = "image 3"
        changed, others = list(calls), dict(settings)
        at = chance.randrange(len(calls))
        image = calls.index("image 3")
        if kind == "more":
            changed.insert(at, chance.choice([one for one in CALLS if one not in LOCAL]))
        elif kind == "fewer":
            del changed[at]
        elif kind == "order":
            chance.shuffle(changed)
        elif kind == "steps":
            changed[image] = chance.choice(("image 1", "image 2", "image 4", "image 6"))
        elif kind == "size":
            changed[image] = "large 3"
        elif kind in ("raises", "interrupted"):
            changed[image] = f"{kind} {chance.choice((0, 1, 2))}"
        elif kind == "settings":
            others = dict(
                chance.choice([one for one in SETTINGS if one != settings and (ranks != 3 or "ring" not in one)])
            )
        elif kind == "parts":
            settings.pop("ring", None), settings.pop("chunks", None)
            others = settings | {"guidance_parallel": chance.choice((1, 2))}
            settings = settings | {"guidance_parallel": 3 - others["guidance_parallel"]}
        elif kind == "leaves":
            changed = changed[:at]
        elif kind == "again":
            changed.insert(at, "again")
        catches = kind in ("raises", "interrupted") or chance.random() < 0.3
        victim = chance.randrange(ranks)
        return cls(kind, family, ranks, victim, settings, others, tuple(calls), tuple(changed), catches)


# On every rank --------------------------------------------------------------------------------------------------------


def run_rank(case: Case, rank: int, folder: Path) -> None:
    """Make the calls of one rank, and write how they ended and when."""
    import torch
    from tiny_pipelines import PIPELINES

    import cocodiff

    torch.set_num_threads(1)
    pipe: Any = PIPELINES[case.family]()
    pipe.set_progress_bar_config(disable=True)
    settings = case.others if rank == case.victim else case.settings
    limits = {"timeout_s": TIMEOUT_S, "start_timeout_s": START_S, "device": "cpu"}
    calls = ["again", *(case.changed if rank == case.victim else case.calls)]
    found = ""
    try:
        while calls:
            calls.pop(0)
            with cocodiff.parallelize(pipe, **settings, **limits) as engine:
                while calls and calls[0] != "again":
                    try:
                        make_call(case, pipe, engine, calls.pop(0))
                    except Exception:
                        if not case.catches:
                            raise
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
    (folder / f"{rank}.json").write_text(json.dumps({"error": found, "time": time.time()}))


def make_call(case: Case, pipe: Any, engine: Any, call: str) -> None:
    """Make one of CALLS."""
    import torch

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(1))

    word, _, number = call.partition(" ")
    if word == "bytes":
        engine.bytes()
    elif word == "drift":
        engine.drift_profile()
    elif word == "forget":
        engine.forget_drift()
    elif word == "new_run":
        engine.new_run()
    elif word == "call":
        from tiny_models import FAMILIES

        inputs = FAMILIES[case.family][1](1, 4, 4, 5)
        inputs |= {"encoder_hidden_states": noise(1, 5, 24), "hidden_states": noise(1, 16, 16)}
        if case.family == "flux":
            inputs |= {"pooled_projections": noise(1, 16), "guidance": torch.ones(1)}
        with torch.no_grad():
            pipe.transformer(**inputs, return_dict=False)
    else:

        def callback(pipe: Any, step: int, _: Any, kept: Any) -> Any:
            if word == "raises" and step == int(number):
                raise ValueError("one rank's own")
            if word == "interrupted" and step == int(number):
                pipe._interrupt = True
            return kept

        steps = 3 if word in ("raises", "interrupted") else int(number)
        text = {"prompt_embeds": noise(1, 5, 24)}
        if case.family == "flux":
            text["pooled_prompt_embeds"] = noise(1, 16)
        else:
            text |= {
                "prompt_embeds_mask": torch.ones(1, 5, dtype=torch.long),
                "negative_prompt_embeds": noise(1, 5, 24) / 2,
            }
            text |= {"negative_prompt_embeds_mask": torch.ones(1, 5, dtype=torch.long), "true_cfg_scale": 2.0}
        side = 48 if word == "large" else 32
        seed = torch.Generator().manual_seed(0)
        sizes = {"height": side, "width": side, "num_inference_steps": steps, "output_type": "latent"}
        pipe(**text, **sizes, generator=seed, callback_on_step_end=callback)


def main_of_ranks() -> int:
    """Fork the ranks of a case, and end when all of them have."""
    case = Case(**json.loads(sys.argv[1]))
    folder = Path(sys.argv[2])
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    pids = []
    for rank in range(case.ranks):
        pid = os.fork()
        if pid == 0:
            named = {"RANK": rank, "WORLD_SIZE": case.ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": case.ranks}
            os.environ.update({name: str(value) for name, value in named.items()})
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
            try:
                run_rank(case, rank, folder)
            finally:
                os._exit(0)
        pids.append(pid)
    for pid in pids:
        os.waitpid(pid, 0)
    return 0


main = main_of_ranks  # by this name `warm` starts a program


# What a case must come to ---------------------------------------------------------------------------------------------


def judge(case: Case, ends: dict[int, dict[str, Any]]) -> list[str]:
    """Return what is wrong with the ends of the ranks, nothing where all is right."""
    missing = sorted({*range(case.ranks)} - {*ends})
    wrong = [f"rank {rank} has not ended, or without an error of Python" for rank in missing]
    times = [one["time"] for one in ends.values()]
    if times and max(times) - min(times) > TIMEOUT_S:
        wrong.append(
            f"rank {max(ends, key=lambda rank: ends[rank]['time'])} ended {max(times) - min(times):.0f} s later"
        )
    errors = [one["error"] for one in ends.values()]
    # The others may have ended when one rank begins anew: it alone finds nobody.
    if any(errors) and not all(errors) and case.kind != "again":
        wrong.append("some ranks have no error")
    for error in filter(None, errors):
        own = "ValueError: one rank's own" in error and not case.catches
        if not error.startswith(("PeerLost: ", "UserError: ")) and not own:
            wrong.append(f"another kind of error: {error}")
        elif "\n" in error or INSIDES.search(error) or not re.search(r"\brank \d", error):
            wrong.append(f"no line that names a rank and calls: {error}")
    return wrong


def run(case: Case) -> tuple[dict[int, dict[str, Any]], str]:
    """Run a case. Return the ends of the ranks that ended, and what they have said."""
    from launching import end_group
    from warm import Started

    with tempfile.TemporaryDirectory(prefix="cocodiff-disagreement-") as name:
        folder = Path(name)
        words = [json.dumps(asdict(case)), name]
        process = Started(words, folder / "stdout", folder / "stderr", module="disagreeing_ranks")
        try:
            process.wait(START_S + 2 * TIMEOUT_S)
        except Exception:
            pass
        finally:
            end_group(process.pid)
        ends = {int(path.stem): json.loads(path.read_text()) for path in folder.glob("*.json")}
        return ends, (folder / "stderr").read_text()[-600:]


def run_case(number: int, seed: int) -> list[str]:
    """Run the case of a number, and print it. Return what is wrong."""
    case = Case.drawn(number, seed)
    began = time.monotonic()
    ends, said = run(case)
    wrong = judge(case, ends)
    print(f"{number} {'WRONG' if wrong else 'ok'} {time.monotonic() - began:.1f} s {asdict(case)}", flush=True)
    for rank, one in sorted(ends.items()):
        print(f"    rank {rank}: {one['error'] or 'no error'}")
    for line in wrong:
        print(f"    wrong: {line}")
    if wrong:
        print(f"    said: {said!r}")
        print(
            f"    again: python tests/campaign/disagreeing_ranks.py --cases 1 --first {number} --seed {seed}",
            flush=True,
        )
    return wrong


def main_of_campaign() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--cases", type=int, default=60)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    numbers = range(chosen.first, chosen.first + chosen.cases)
    wrong = [number for number in numbers if run_case(number, chosen.seed)]
    print(f"{len(numbers)} tried, {len(numbers) - len(wrong)} right, wrong: {wrong}")
    return 1 if wrong else 0


if __name__ == "__main__":
    tests = Path(__file__).resolve().parent.parent
    sys.path[:0] = [str(tests), str(tests / "campaign")]
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:2])
    sys.exit(main_of_campaign())
