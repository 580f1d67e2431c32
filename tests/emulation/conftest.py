"""Emulated machines, which need root, ip and tc.

With COCODIFF_REQUIRE_EMULATION=1, as launch/test sets it where the machine has them, a machine without is a failure;
elsewhere these tests are skipped with the reason.
"""

from __future__ import annotations

import os
import shutil

import pytest
from cocodiff_studies.namespaces import Namespace


@pytest.fixture(scope="session")
def emulation() -> None:
    """A machine that can emulate others."""
    try:
        lack = [] if os.geteuid() == 0 else ["root"]
        lack += [name for name in ("ip", "tc") if shutil.which(name) is None]
        if not lack:
            Namespace().close()
    except PermissionError:
        lack = ["the right to make network namespaces"]
    if lack and os.environ.get("COCODIFF_REQUIRE_EMULATION") == "1":
        pytest.fail(f"emulations were to be tested here, and there is no {', '.join(lack)}")
    if lack:
        pytest.skip(f"no emulation without {', '.join(lack)}")
