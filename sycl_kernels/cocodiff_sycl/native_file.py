"""The file of the kernels' binaries for a GPU: whole, or not taken.

It lies in the cache's folder, which the sources and libsycl's version name. Its first line tells the device, the lanes,
the compiler, and a digest of all that; then come binaries as `saved.hpp` has programs: a size in 8 bytes each, then the
bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from cocodiff_sycl.find import Unavailable


@dataclass(frozen=True)
class Native:
    """What a file of binaries says of itself."""

    device: str
    lanes: int
    compiler: str
    digest: str = ""

    def of(self, body: bytes) -> Native:
        words = f"{self.device}\0{self.lanes}\0{self.compiler}\0".encode()
        return replace(self, digest=hashlib.sha256(words + body).hexdigest())


def native_file(folder: Path, lanes: int) -> Path:
    """Where the binaries of so many work-items a row are."""
    return folder / f"native-{lanes}.bin"


def write_native(path: Path, about: Native, body: bytes) -> None:
    """Puts a file in place at once. Raises Unavailable."""
    fresh = path.with_suffix(f".{os.getpid()}")
    try:
        fresh.write_bytes(json.dumps(asdict(about.of(body))).encode() + b"\n" + body)
        fresh.replace(path)
    except OSError as error:
        with suppress(OSError):
            fresh.unlink(missing_ok=True)
        raise Unavailable(f"cannot write the kernels' cache {path.parent}: {error.strerror}") from error


def read_native(path: Path) -> tuple[Native, bytes]:
    """Raises Unavailable where the file is not whole."""
    try:
        first, _, body = path.read_bytes().partition(b"\n")
        about = Native(**json.loads(first))
    except (OSError, ValueError, TypeError) as error:
        raise Unavailable(f"the file cannot be read ({type(error).__name__}); remove it") from error
    if not body or about != about.of(body):
        raise Unavailable("the file is damaged; remove it")
    return about, body
