"""The deals of a job's ranks in `cocodiff plan`: their table, JSON, and the one of a single image."""

from __future__ import annotations

from typing import Any

from cocodiff.config import Config
from cocodiff.planning.deal_choice import Choice, PricedDeal
from cocodiff.planning.deal_prices import Workload
from cocodiff.planning.deals import Deal
from cocodiff.planning.memory import MIB
from cocodiff.text_table import aligned
from cocodiff.topology.machine import Topology
from cocodiff.trace import LINK_CLASSES


def pinned_guidance(config: Config) -> int | None:
    return None if config.guidance_parallel == "auto" else int(config.guidance_parallel)


def one_replica(topology: Topology, work: Workload) -> Deal:
    """As the engine deals the ranks of one replica: by the setting `guidance_parallel`; auto is 2 where the model has
    two branches and the ranks are even."""
    wanted = pinned_guidance(work.config) or (2 if topology.size % 2 == 0 else 1)
    return Deal(1, wanted if work.guides else 1)


def deals_table(choice: Choice) -> list[str]:
    """All deals; the one that is taken is marked, and said in a last line."""
    heading = ["replicas", "guidance", "ranks", "ulysses", "ring", "MiB a rank", "fits"]
    rows = [[*heading, "s an image", "images/h", "s in all", *(f"{link} GB" for link in LINK_CLASSES), ""]]
    for one in choice.listed:
        fits = {True: "yes", False: "no", None: "unknown"}[one.fits]
        row = [*one.deal, one.ulysses * one.ring, one.ulysses, one.ring, f"{one.need.total / MIB:.0f}", fits]
        row += (
            ["-"] * 3
            if one.batch_s is None
            else [f"{one.batch_s:.3f}", f"{one.images_per_hour:.0f}", f"{one.job_s:.1f}"]
        )
        row += ["-" if one.sent is None else f"{one.sent[link] / 1e9:.2f}" for link in LINK_CLASSES]
        rows.append([str(x) for x in (*row, "<- taken" if one is choice.taken else "")])
    lines = aligned(rows, ">" * 14 + "<")
    lines += [f"{deal.replicas} replica(s), guidance {deal.guidance}: {why}" for deal, why in choice.refused.items()]
    return [*lines, choice.line()]


def deals_as_json(choice: Choice) -> dict[str, Any]:
    """`deals`: all of them; bytes of one image, or of one batch of images."""
    rows = [deal_as_json(one) | {"taken": one is choice.taken} for one in choice.listed]
    refused = [{**deal._asdict(), "error": str(why), "taken": False} for deal, why in choice.refused.items()]
    return {"images": choice.taken.images, "deals": rows + refused}


def deal_as_json(one: PricedDeal) -> dict[str, Any]:
    timed = one.batch_s is not None
    return {
        **one.deal._asdict(),
        "ranks": one.ulysses * one.ring,
        "ulysses": one.ulysses,
        "ring": one.ring,
        "rank_mib": one.need.total / MIB,
        "fits": one.fits,
        "image_s": one.batch_s,
        "images_per_hour": one.images_per_hour if timed else None,
        "job_s": one.job_s if timed else None,
        "first_s": one.first_s if timed else None,
        "bytes_per_image": one.sent,
        "output_bytes_per_image": one.outputs,
    }
