"""cocodiff's hot data movement as SYCL: sources, the C library that compiles and launches them, and its cache."""

from cocodiff_sycl.build import Unavailable
from cocodiff_sycl.ops import SyclOps, build_ahead_of_time, build_for_gpu, open_cpu, open_xpu, report_lines

__all__ = ["SyclOps", "Unavailable", "build_ahead_of_time", "build_for_gpu", "open_cpu", "open_xpu", "report_lines"]
