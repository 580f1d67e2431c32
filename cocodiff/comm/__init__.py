"""Communication between the ranks of a run, whichever library carries it, and the watch over ranks that are lost.

Others use `transport` (the interface), `connect` and `launch` (from a launch to a transport) and `loopback` (ranks as
threads). A transport's file is imported by the runs that use it.
"""
