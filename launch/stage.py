"""Copies what a folder holds to a folder of each process, over MPI: the first process alone reads it, and sends it on.

usage: mpiexec --ppn 1 python -m mpi4py launch/stage.py FOLDER TARGET NAME...

NAME: a file or folder in FOLDER, or `.` for all. Links are followed. A process that fails ends them all.
"""

import sys
from subprocess import PIPE, Popen

from mpi4py import MPI

world, (folder, target, *names) = MPI.COMM_WORLD, sys.argv[1:]
read = ["true"] if world.rank else ["tar", "-C", folder, "-ch", "--", *names]
with Popen(read, stdout=PIPE) as source, Popen(["tar", "-C", target, "-x"], stdin=PIPE) as copy:
    while part := world.bcast(source.stdout.read(2**26)):
        copy.stdin.write(part)
if source.returncode or copy.returncode:
    raise SystemExit(f"{folder} could not be copied to {target}")
