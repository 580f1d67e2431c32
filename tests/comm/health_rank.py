"""One rank's end of a watch in a process of its own, to be stopped or killed. Imports no torch, so it starts at once.

    health_rank.py RANK SIZE PORT KEY TIMEOUT_S STALL_S      (rank 0: PORT 0; it prints the port that it got)

Prints "open" when the watch stands. Then reads a line: "close" says goodbye, "leave" exits without a word, "block" is a
call into a library that no error reaches, "block after a job" such a call in which another one has ended already,
"sleep" a main thread that does not go on.
"""

import socket
import sys
import time

from cocodiff.comm.health import Limits, Watch


def main(rank: int, size: int, port: int, key: str, timeout_s: float, stall_s: float) -> None:
    endpoint = ("127.0.0.1", port)
    if rank == 0:
        endpoint = socket.create_server(("127.0.0.1", 0), backlog=size)
        print(endpoint.getsockname()[1], flush=True)
    watch = Watch.open(rank, size, endpoint, key, {}, Limits(timeout_s, start_s=60.0, stall_s=stall_s))
    print("open", flush=True)
    word = sys.stdin.readline().strip()
    if word == "close":
        watch.close()
    if word in ("block", "block after a job"):
        with watch.blocking():
            if word == "block after a job":
                with watch.blocking():  # as a wait that runs another one's job, which waits in turn
                    pass
            print("blocked", flush=True)
            time.sleep(60)
    if word == "sleep":
        time.sleep(60)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], float(sys.argv[5]), float(sys.argv[6]))
