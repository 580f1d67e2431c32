"""Is enough memory free on every rank, and what runs the kernels?"""

from __future__ import annotations

from cocodiff.cli.doctor.facts import NOTE, WARNING, Facts, Findings, name_ranks
from cocodiff.kernels.trial import KernelTrial

GIB = 2**30
LEAST = {"cpu": GIB // 4, "accelerator": 4 * GIB}  # the embedded model's run; a small one of a large model
TAKEN = 0.1  # of a tile's memory that somebody else holds


def check_memory(facts: Facts) -> Findings:
    """Free memory of every rank against the model asked about, or against the least that any run takes."""
    found = Findings("memory")
    told = [rank for rank in facts.ranks if rank.free is not None]
    if not told:
        found.warning("the system does not tell how much memory is free")
        return found
    tightest = min(told, key=lambda rank: rank.free or 0)
    least = facts.needed or LEAST["cpu" if tightest.on_cpu else "accelerator"]
    what = "the model needs" if facts.needed else "any run needs"
    text = f"{(tightest.free or 0) / GIB:.2f} GiB free on rank {tightest.rank}, the tightest"
    if short := [rank.rank for rank in told if (rank.free or 0) < least]:
        found.fault(
            f"{text}; {what} {least / GIB:.2f} GiB on {name_ranks(short)}",
            "end what else runs there, start fewer ranks a node, or use more nodes (cocodiff plan says which)",
        )
    held = [rank for rank in told if not rank.on_cpu and rank.total and (rank.free or 0) < (1 - TAKEN) * rank.total]
    if held:
        ranks = name_ranks([rank.rank for rank in held])
        remedy = "look for left-over processes on the node (xpu-smi ps)"
        found.warning(f"{text}; somebody else holds memory on the tiles of {ranks}", remedy)
    if not found:
        found.good(f"{text}; {what} {least / GIB:.2f}")
    return found


def check_sycl(facts: Facts) -> Findings:
    """Which of SYCL and torch moves data, on each host that looked, and why."""
    found = Findings("sycl")
    for host, ranks in facts.hosts().items():
        rank = next((rank for rank in ranks if rank.sycl or rank.no_sycl), None)
        if rank is None:
            continue
        if rank.sycl:
            found.good(f"{host}: SYCL kernels on {rank.sycl}")
        elif rank.kernels == "sycl":
            remedy = "run cocodiff kernels build on a node, or choose kernels auto or torch"
            found.fault(f"{host}: kernels sycl were asked for, but {rank.no_sycl}", remedy)
        else:
            slower = rank.device.startswith("xpu") and rank.kernels != "torch"
            remedy = "load a oneAPI compiler and run cocodiff kernels build" if slower else ""
            found.add(WARNING if slower else NOTE, f"{host}: torch's operations run: {rank.no_sycl}", remedy)
    if not found:
        found.note("nobody looked")
    return found


def check_kernels(facts: Facts) -> Findings:
    """Every operation against torch's, with its greatest difference. A vendor's own torch is not judged."""
    found = Findings("kernels")
    for host, ranks in facts.hosts().items():
        rank = next((rank for rank in ranks if rank.kernel_trials), None)
        if rank is None:
            continue
        where = f"{rank.sycl} against torch's" if rank.sycl else f"{rank.device} against torch's on the CPU"
        for op in dict.fromkeys(trial.op for trial in rank.kernel_trials):
            trials = [trial for trial in rank.kernel_trials if trial.op == op]
            told: dict[str, list[str]] = {}
            for trial in trials:
                told.setdefault(_difference(trial), []).append(trial.dtype)
            verdicts = "; ".join(f"{verdict} in {', '.join(dtypes)}" for verdict, dtypes in told.items())
            text = f"{host}: {op} {trials[0].shapes} on {where}: {verdicts}"
            if rank.sycl and any(trial.wrong for trial in trials):
                remedy = "choose kernels torch; remove native-*.bin from the kernels' cache and run doctor again"
                found.fault(text, remedy)
            else:
                found.good(text)
    if not found:
        found.note("torch's operations on the CPU: nothing to compare them with")
    return found


def _difference(trial: KernelTrial) -> str:
    told = "equal" if trial.difference == 0 else f"differs by up to {trial.difference:.2g}"
    return f"{told} ({trial.wrong})" if trial.wrong else told
