"""cocodiff's hot data movement as SYCL: sources, the C library that compiles and launches them, and its cache."""
