"""The kinds of `cocodiff bench`, a module each with its `BENCHMARK`; `common` is what they share."""
