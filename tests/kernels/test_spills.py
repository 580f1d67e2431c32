"""That no kernel spills registers on GPU Max, which need not be here, and how the report counts what kernels cost.

The compiler is Intel's ocloc, where COCODIFF_OCLOC names a folder that the script `ocloc` beside this file filled."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from cocodiff_sycl.build import kernel_source
from cocodiff_sycl.library import GPU_LANES
from cost_report import cost_of, hot_loop
from intel_compiler import OCLOC, compile_native


@pytest.mark.skipif(OCLOC not in os.environ, reason=f"no {OCLOC}: tests/kernels/ocloc FOLDER fetches Intel's compiler")
def test_no_kernel_spills_on_the_device(tmp_path):
    """All kernels of all dtypes, at the width that is launched. The CPU device never shows this."""
    usage = compile_native(kernel_source(GPU_LANES, gpu=True), "pvc", tmp_path)
    assert {one.name for one in usage} == set(re.findall(r"^KERNEL\((\w+)\)", kernel_source(GPU_LANES), re.MULTILINE))
    assert {one.simd for one in usage} == {GPU_LANES} and {one.registers for one in usage} == {128}
    assert not {one.name: (one.spill, one.private) for one in usage if one.spill or one.private}


def test_the_report_counts_the_instructions_of_the_innermost_loop():
    """A square root takes four cycles, waiting none. A MB of 16-bit numbers are 3906 passes of 128."""
    assert hot_loop(Path(__file__).with_name("loop.asm").read_text()) == 1 + 2 + 4 + 1
    assert cost_of("merge_bf16_bf16", 800) == "100.0 instructions a number; us/MB: traffic 3.00, these 4.36"
