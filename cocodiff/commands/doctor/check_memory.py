"""Is there room on every rank, and what runs the kernels?"""

from __future__ import annotations

from cocodiff.commands.doctor.facts import FAULT, GOOD, NOTE, WARNING, Facts, Finding, name_ranks

GIB = 2**30
LEAST = {"cpu": GIB // 4, "accelerator": 4 * GIB}  # the embedded model's run; a small one of a large model
TAKEN = 0.1  # of a tile's memory that somebody else holds


def check_memory(facts: Facts) -> list[Finding]:
    """Free memory of every rank against the model asked about, or against the least that any run takes."""
    check, found = "memory", []
    told = [rank for rank in facts.ranks if rank.free is not None]
    if not told:
        return [Finding(check, WARNING, "the system does not tell how much memory is free")]
    tightest = min(told, key=lambda rank: rank.free or 0)
    least = facts.needed or LEAST["cpu" if tightest.on_cpu else "accelerator"]
    short = [rank.rank for rank in told if (rank.free or 0) < least]
    what = "the model needs" if facts.needed else "any run needs"
    text = f"{(tightest.free or 0) / GIB:.2f} GiB free on rank {tightest.rank}, the tightest"
    if short:
        found.append(
            Finding(
                check,
                FAULT,
                f"{text}; {what} {least / GIB:.2f} GiB on {name_ranks(short)}",
                "end what else runs there, start fewer ranks a node, or use more nodes (cocodiff plan says which)",
            )
        )
    taken = [
        rank.rank for rank in told if not rank.on_cpu and rank.total and (rank.free or 0) < (1 - TAKEN) * rank.total
    ]
    if taken:
        found.append(
            Finding(
                check,
                WARNING,
                f"{text}; somebody else holds memory on the tiles of {name_ranks(taken)}",
                "look for left-over processes on the node (xpu-smi ps)",
            )
        )
    return found or [Finding(check, GOOD, f"{text}; {what} {least / GIB:.2f}")]


def check_sycl(facts: Facts) -> list[Finding]:
    """Which of SYCL and torch moves data, on each host that looked, and why."""
    check, found = "sycl", []
    for host, ranks in facts.hosts().items():
        rank = next((rank for rank in ranks if rank.sycl or rank.no_sycl), None)
        if rank is None:
            continue
        if rank.sycl:
            found.append(Finding(check, GOOD, f"{host}: SYCL kernels on {rank.sycl}"))
        elif rank.kernels == "sycl":
            found.append(
                Finding(
                    check,
                    FAULT,
                    f"{host}: kernels sycl were asked for, but {rank.no_sycl}",
                    "run cocodiff kernels build on a node, or choose kernels auto or torch",
                )
            )
        else:
            slower = rank.device.startswith("xpu") and rank.kernels != "torch"
            remedy = "load a oneAPI compiler and run cocodiff kernels build" if slower else ""
            text = f"{host}: torch's operations run: {rank.no_sycl}"
            found.append(Finding(check, WARNING if slower else NOTE, text, remedy))
    return found or [Finding(check, NOTE, "nobody looked")]
