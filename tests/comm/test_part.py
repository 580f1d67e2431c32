"""Some of a transport's ranks as ranks of their own, in an order of their own."""

from __future__ import annotations

import torch

from cocodiff.comm.loopback import LoopbackTransport, run_ranks
from cocodiff.comm.transport import Part

ORDER = (4, 1, 3)  # part's rank -> rank; libraries keep a group's ranks ascending


def test_messages_go_by_the_parts_numbers():
    def work(transport: LoopbackTransport) -> None:
        if transport.rank not in ORDER:
            return
        part = Part(transport, ORDER)
        assert part.size == 3 and ORDER[part.rank] == transport.rank
        group = part.group(range(3))
        assert group.ranks == (0, 1, 2) and group.index == part.rank
        gathered = [torch.empty(1) for _ in range(3)]
        group.all_gather(torch.tensor([float(part.rank)]), gathered).wait()
        assert torch.cat(gathered).tolist() == [0, 1, 2]
        sends = [torch.tensor([10.0 * part.rank + peer]) for peer in range(3)]
        group.all_to_all(sends, gathered).wait()
        assert torch.cat(gathered).tolist() == [10.0 * peer + part.rank for peer in range(3)]
        following, before = (part.rank + 1) % 3, (part.rank - 1) % 3
        received = torch.empty(1)
        group.send_recv([(torch.tensor([float(part.rank)]), following)], [(received, before)]).wait()
        assert received.item() == before
        group.barrier()
        two = part.group([2, 0]) if part.rank != 1 else part.group([1])
        assert two.ranks[two.index] == part.rank

    run_ranks(5, work)
