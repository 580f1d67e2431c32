"""The routes of tokens between ranks, as pure data: which rank sends which blocks to which, in which phase.

Others use `plans` (exchanges), `chunks` (an exchange in stages, and the tables of chunks and exchanges by size) and
`rounds` (a ring).
"""
