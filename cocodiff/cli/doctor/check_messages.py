"""Do messages arrive as they were sent, and while something else is computed?"""

from __future__ import annotations

from cocodiff.cli.doctor.facts import AllToAll, Facts, Findings, Issue
from cocodiff.cli.doctor.trials import TRANSPORT
from cocodiff.comm.host import THROUGH_HOST
from cocodiff.comm.settings import overlap_killers

HIDDEN_LEAST = 0.5  # of the shorter of the two; an overlap that works hides nearly all


def check_alltoall(facts: Facts) -> Findings:
    """Ours must be right. The library's own all-to-all is not used by the engine: there it is a warning."""
    found = Findings("all-to-all")
    for how in dict.fromkeys(trial.how for trial in facts.alltoalls):
        trials = [trial for trial in facts.alltoalls if trial.how == how]
        bad = [trial for trial in trials if trial.wrong]
        if not bad:
            found.good(f"{how}: {_sizes(trials)} right")
            continue
        cases = ", ".join(f"{trial.dtype} of {trial.bytes} bytes" for trial in bad[:4]) + (", ..." if bad[4:] else "")
        text = f"{how} is wrong for {cases}: {bad[0].wrong[0]}"
        if how == TRANSPORT:
            remedy = "trust no result of this job: try another --transport, another node, and report the versions"
            found.fault(text, remedy)
        else:
            found.warning(text, "cocodiff does not use it; keep other programs here from relying on it")
    if not found:
        found.note("one rank: no messages")
    return found


def _sizes(trials: list[AllToAll]) -> str:
    dtypes = list(dict.fromkeys(trial.dtype for trial in trials))
    largest = max(trials, key=lambda trial: trial.bytes)
    return (
        f"{len(trials)} trials ({', '.join(dtypes)}, up to {largest.bytes} bytes to each peer in "
        f"{largest.seconds * 1e3:.1f} ms)"
    )


def check_overlap(facts: Facts) -> Findings:
    """Messages hidden behind work. On a CPU ranks share the cores that copy, so a low figure is no fault."""
    found = Findings("overlap")
    if facts.overlap is None:
        found.note("one rank: no messages to hide")
        return found
    times, hidden, on_cpu = facts.overlap, facts.overlap.hidden, facts.ranks[0].on_cpu
    work = "sleep" if on_cpu else "matrix products"
    text = (
        f"{hidden:.0%} of the messages hidden: messages {times.communication_s * 1e3:.1f} ms, {work} "
        f"{times.work_s * 1e3:.1f} ms, both {times.both_s * 1e3:.1f} ms"
    )
    if hidden >= HIDDEN_LEAST:
        found.good(text)
    elif on_cpu:
        found.warning(text, "give every rank a core of its own for its messages")
    else:
        remedy = "see the settings below; else give the backend's asynchronous collectives their own stream"
        found.fault(text, remedy)
    return found


def check_order(facts: Facts) -> Findings:
    """Messages of streams that are kept busy."""
    found = Findings("order")
    if facts.stopped:
        found.fault(facts.stopped, "trust no result of this job: try another --transport, and report the versions")
    elif facts.order is None:
        found.note("one rank, or the CPU: no streams")
    else:
        found.good(f"messages keep their place between streams that are kept busy: {facts.order} rounds right")
    return found


def check_host(facts: Facts) -> Findings:
    """Whether calls that send and receive return before their messages are through. On a CPU the host copies them, and
    with transport host a lane waits for its copies, so that is no warning there."""
    found, first = Findings("host"), facts.ranks[0]
    for call in dict.fromkeys(issue.call for issue in facts.issues):
        issues = [issue for issue in facts.issues if issue.call == call]
        text = f"{call}: " + "; ".join(map(_told, issues))
        if any(issue.blocks for issue in issues) and not first.on_cpu and not first.library.startswith(THROUGH_HOST):
            remedy = f"write links: blocked_us: {facts.blocked_us:.3g} into the machine file, for plans to count it"
            found.warning(text, remedy)
        else:
            found.note(text)
    if not found:
        found.note("one rank: no messages")
    return found


def _told(issue: Issue) -> str:
    size = f"{issue.bytes >> 20} MiB" if issue.bytes >> 20 else f"{issue.bytes >> 10} KiB"
    times = f"returns after {issue.returns_s * 1e6:.0f} us, complete after {issue.complete_s * 1e6:.0f} us"
    return f"{size} {times}: the host is {'blocked' if issue.blocks else 'free'}"


def check_settings(facts: Facts) -> Findings:
    """Settings that take overlap away, and one that the library in use does not read."""
    found, seen, first = Findings("settings"), set(), facts.ranks[0]
    for rank in facts.ranks:
        for killer in overlap_killers(rank.environment, rank.library, rank.device.split(":")[0]):
            if killer.setting not in seen:
                seen.add(killer.setting)
                found.fault(f"{killer.setting} {killer.harm}: nothing is hidden", killer.remedy)
    for killer in overlap_killers(first.environment, "xccl", "xpu"):
        if killer.setting not in seen:
            text = f"{killer.setting} would make a run on GPUs block; {first.library} does not read it"
            found.warning(text, killer.remedy)
    under_pals = "PALS_RANKID" in first.environment or "PALS_LOCAL_RANKID" in first.environment
    if under_pals and first.library in ("xccl", "ccl") and first.environment.get("CCL_PROCESS_LAUNCHER") != "pmix":
        remedy = "export CCL_PROCESS_LAUNCHER=pmix, as launch/aurora.pbs does"
        found.warning("oneCCL is not told that PALS started the ranks", remedy)
    if not found:
        found.good("none that takes overlap away")
    return found
