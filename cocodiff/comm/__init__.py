"""The communication between the ranks of a run by any library, and the watch that finds lost ranks.

Others use `transport` (the interface), `connect` and `launch` (from a launch to a transport) and `loopback` (ranks as
threads). A transport's file is imported only by the runs that use it.
"""
