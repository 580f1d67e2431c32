"""Do messages arrive as they were sent, and while something else is computed?"""

from __future__ import annotations

from cocodiff.comm.settings import overlap_killers
from cocodiff.commands.doctor.facts import FAULT, GOOD, NOTE, WARNING, AllToAll, Facts, Finding
from cocodiff.commands.doctor.trials import TRANSPORT

HIDDEN_LEAST = 0.5  # of the shorter of the two; an overlap that works hides nearly all


def check_alltoall(facts: Facts) -> list[Finding]:
    """Ours must be right. The library's own all-to-all is not used by the engine: there it is a warning."""
    check, found = "all-to-all", []
    for how in dict.fromkeys(trial.how for trial in facts.alltoalls):
        trials = [trial for trial in facts.alltoalls if trial.how == how]
        bad = [trial for trial in trials if trial.wrong]
        if bad:
            cases = ", ".join(f"{trial.dtype} of {trial.bytes} bytes" for trial in bad[:4]) + (
                ", ..." if bad[4:] else ""
            )
            ours = how == TRANSPORT
            found.append(
                Finding(
                    check,
                    FAULT if ours else WARNING,
                    f"{how} is wrong for {cases}: {bad[0].wrong[0]}",
                    "trust no result of this job: try another --transport, another node, and report the versions"
                    if ours
                    else "cocodiff does not use it; keep other programs here from relying on it",
                )
            )
        else:
            found.append(Finding(check, GOOD, f"{how}: {_sizes(trials)} right"))
    return found or [Finding(check, NOTE, "one rank: no messages")]


def _sizes(trials: list[AllToAll]) -> str:
    dtypes = list(dict.fromkeys(trial.dtype for trial in trials))
    largest = max(trials, key=lambda trial: trial.bytes)
    return (
        f"{len(trials)} trials ({', '.join(dtypes)}, up to {largest.bytes} bytes to each peer in "
        f"{largest.seconds * 1e3:.1f} ms)"
    )


def check_overlap(facts: Facts) -> list[Finding]:
    """Messages hidden behind work. On a CPU ranks share the cores that copy, so a low figure is no fault."""
    if facts.overlap is None:
        return [Finding("overlap", NOTE, "one rank: no messages to hide")]
    times, hidden, on_cpu = facts.overlap, facts.overlap.hidden, facts.ranks[0].on_cpu
    work = "sleep" if on_cpu else "matrix products"
    text = (
        f"{hidden:.0%} of the messages hidden: messages {times.communication_s * 1e3:.1f} ms, {work} "
        f"{times.work_s * 1e3:.1f} ms, both {times.both_s * 1e3:.1f} ms"
    )
    if hidden >= HIDDEN_LEAST:
        return [Finding("overlap", GOOD, text)]
    return [
        Finding(
            "overlap",
            WARNING if on_cpu else FAULT,
            text,
            "give every rank a core of its own for its messages"
            if on_cpu
            else "see the settings below; else give the backend's asynchronous collectives their own stream",
        )
    ]


def check_settings(facts: Facts) -> list[Finding]:
    """Settings that take overlap away, and one that the library in use does not read."""
    check, seen, found = "settings", set(), []
    for rank in facts.ranks:
        kind = rank.device.split(":")[0]
        for killer in overlap_killers(rank.environment, rank.library, kind):
            if killer.setting not in seen:
                seen.add(killer.setting)
                found.append(Finding(check, FAULT, f"{killer.setting} {killer.harm}: nothing is hidden", killer.remedy))
    first = facts.ranks[0]
    unused = [k for k in overlap_killers(first.environment, "xccl", "xpu") if k.setting not in seen]
    found += [
        Finding(
            check,
            WARNING,
            f"{killer.setting} would make a run on GPUs block; {first.library} does not read it",
            killer.remedy,
        )
        for killer in unused
    ]
    under_pals = "PALS_RANKID" in first.environment or "PALS_LOCAL_RANKID" in first.environment
    if under_pals and first.library in ("xccl", "ccl") and first.environment.get("CCL_PROCESS_LAUNCHER") != "pmix":
        found.append(
            Finding(
                check,
                WARNING,
                "oneCCL is not told that PALS started the ranks",
                "export CCL_PROCESS_LAUNCHER=pmix, as launch/aurora.pbs does",
            )
        )
    return found or [Finding(check, GOOD, "none that takes overlap away")]
