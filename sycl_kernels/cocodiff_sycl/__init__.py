"""The operations of cocodiff as SYCL kernels: their sources, the C library that compiles and launches them, and its
cache."""
