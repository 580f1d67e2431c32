"""Stands for a rank under mpiexec that `warm_ranks` forks from a Python that has imported everything: hands over what
the rank has from its launcher, and ends as it does. Imports next to nothing. Arguments: where it is forked, and the
words of the program, of which the first is a file or `-m`."""

import json
import os
import signal
import socket
import sys


def main() -> int:
    place, *words = sys.argv[1:]
    if "PMI_FD" not in os.environ:  # a launcher that speaks to its ranks by other means than Hydra's open file
        os.execv(sys.executable, [sys.executable, *words])
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
        line.connect(place)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda number, _: line.send(bytes([number])))
        socket.send_fds(line, [b"+"], [0, 1, 2, int(os.environ["PMI_FD"])])
        given = {"words": words, "environment": dict(os.environ), "folder": os.path.realpath(".")}
        line.sendall(json.dumps(given).encode() + b"\n")
        code = int(line.makefile().readline() or 1)
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), -code)
    return code


if __name__ == "__main__":
    sys.exit(main())
