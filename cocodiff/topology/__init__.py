"""Machines, where ranks sit on them, and who has which tokens and heads, as pure data.

Others use `machine`, `axes` (ranks divided into replicas, guidance, ring and Ulysses), `segments`, `layout` and
`links`.
"""
