"""All checks, in the order of the report; and facts to findings."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cocodiff.cli.doctor.check_binding import check_cores, check_nics, check_tiles
from cocodiff.cli.doctor.check_memory import check_kernels, check_memory, check_sycl
from cocodiff.cli.doctor.check_messages import check_alltoall, check_host, check_order, check_overlap, check_settings
from cocodiff.cli.doctor.check_versions import check_launch, check_mpi, check_versions
from cocodiff.cli.doctor.facts import FAULT, Facts, Finding
from cocodiff.cli.doctor.planes import check_planes

CHECKS: tuple[Callable[[Facts], Sequence[Finding]], ...] = (
    check_versions,
    check_launch,
    check_mpi,
    check_tiles,
    check_cores,
    check_nics,
    check_planes,
    check_alltoall,
    check_overlap,
    check_order,
    check_host,
    check_settings,
    check_memory,
    check_sycl,
    check_kernels,
)


def examine(facts: Facts) -> list[Finding]:
    checks = (check_versions, check_order) if facts.stopped else CHECKS
    return [finding for check in checks for finding in check(facts)]


def is_healthy(findings: Sequence[Finding]) -> bool:
    return all(finding.severity != FAULT for finding in findings)
