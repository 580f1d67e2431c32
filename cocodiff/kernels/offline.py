"""What is made of the kernels for a GPU that need not be here, with errors for users."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cocodiff_sycl.find import Unavailable
from cocodiff_sycl.library import GPU_LANES
from cocodiff_sycl.native import build_native
from cocodiff_sycl.ocloc import find_ocloc
from cocodiff_sycl.report import report, table_of

from cocodiff.errors import UserError


def compile_native_for(gpu: str, ocloc: str | Path | None) -> tuple[Path, bool]:
    """The file of binaries that Intel's offline compiler made for a GPU (pvc, or icpx's intel_gpu_pvc), and whether it
    was made now. Runs on the GPU take them from there. ocloc: see `find_ocloc`. Raises UserError where that is not
    possible here."""
    with _told(f"no binaries for {gpu}"):
        return build_native(gpu.removeprefix("intel_gpu_"), GPU_LANES, find_ocloc(ocloc))


def report_on(gpu: str, ocloc: str | Path | None) -> list[str]:
    """What the kernels cost on a tile of a GPU (pvc), as the lines of a table in Markdown. Raises UserError."""
    with _told(f"no report on {gpu}"):
        return table_of(report(gpu, find_ocloc(ocloc)))


@contextmanager
def _told(what: str) -> Iterator[None]:
    try:
        yield
    except Unavailable as error:
        raise UserError(f"{what}: {error}") from error
