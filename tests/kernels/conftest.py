"""The SYCL operations under test, as CPUs run them and as GPUs do.

With COCODIFF_REQUIRE_SYCL=1, as launch/test sets it where the runtime is to be had, a machine without SYCL kernels is a
failure; elsewhere these tests are skipped with the reason.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from cocodiff_sycl.find import Unavailable
from cocodiff_sycl.library import VECTORIZER
from cocodiff_sycl.ops import SyclOps, open_cpu

FORMS = {"cpu": {}, "gpu": {"lanes": 4, "copy_tables": True}}  # gpu: several work-items a row, tables on the device


@pytest.fixture(scope="session", params=FORMS)
def sycl(request: pytest.FixtureRequest) -> SyclOps:
    """The operations on the CPU device, in both forms."""
    return opened(request.param)


@pytest.fixture(scope="session")
def sycl_on_cpu() -> SyclOps:
    """The operations as CPUs run them, which `Kernels` takes."""
    return opened("cpu")


def opened(form: str) -> SyclOps:
    try:
        if form == "gpu":  # compiled and kept by a process of its own: see VECTORIZER
            environment = {name: value for name, value in os.environ.items() if name != VECTORIZER}
            words = [sys.executable, "-c", f"from cocodiff_sycl.ops import open_cpu; open_cpu(**{FORMS[form]})"]
            subprocess.run(words, env=environment, check=False)
        return open_cpu(**FORMS[form])
    except Unavailable as error:
        if os.environ.get("COCODIFF_REQUIRE_SYCL") == "1":
            pytest.fail(f"the SYCL kernels were to be tested here and are not there: {error}")
        pytest.skip(f"no SYCL kernels: {error}")
