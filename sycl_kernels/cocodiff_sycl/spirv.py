"""The kernels' SPIR-V, which compilers for devices that are not here take.

libsycl compiles SYCL source to it on its way to the CPU device, and writes it into the working directory where
SYCL_DUMP_IMAGES is set. It reads that when it is loaded, so a process of its own does it. There the CPU device is told
to make no vectors: it then refuses kernels for sub-groups, whose code for a CPU nobody needs and takes it minutes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from cocodiff_sycl.find import Unavailable
from cocodiff_sycl.library import VECTORIZER, compile_for_cpu


def spirv_of(source: str, folder: Path) -> list[Path]:
    """Files that libsycl leaves in an empty folder when it compiles SYCL source; several, because kernels that need
    different features of a device come apart. Raises Unavailable where that takes what is not here."""
    environment = {**os.environ, "SYCL_DUMP_IMAGES": "1", "SYCL_CACHE_PERSISTENT": "0", VECTORIZER: "1"}
    command = [sys.executable, "-m", "cocodiff_sycl.spirv"]
    try:
        done = subprocess.run(
            command, input=source, cwd=folder, env=environment, text=True, capture_output=True, check=False
        )
    except OSError as error:
        raise Unavailable(f"the kernels' SPIR-V was not made: {error}") from error
    found = sorted(folder.glob("*.spv"))
    if not found:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}, no files"]
        raise Unavailable(f"the kernels' SPIR-V was not made: {last[0]}")
    return found


if __name__ == "__main__":
    try:
        compile_for_cpu(sys.stdin.read())
    except Unavailable as error:
        sys.exit(str(error))
