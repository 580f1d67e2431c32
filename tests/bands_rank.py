"""One rank of a decoding under mpiexec: by rank 0 alone, then in bands. Rank 0 checks that bands give every rank the
same bits, as near to one process as rounding is, and says what both take beside what `cocodiff plan` predicts.

bands_rank.py VAE FRAMES HEIGHT WIDTH [JSON]     (a name in real_vaes.py; settings instead of the published ones)
"""

import hashlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from real_vaes import picture_sizes, real_vae

from cocodiff.comm.launch import detect
from cocodiff.comm.transport import Transport
from cocodiff.config.config import Config, load_machine
from cocodiff.engine.decoding import ShardedVAE
from cocodiff.jobs.model_shapes import load_shape
from cocodiff.jobs.ranks import run_ranks
from cocodiff.models.family import Video
from cocodiff.planner.memory import MIB, size_peaks
from cocodiff.topology import Topology


def kib(name: str) -> int:
    """Of this process's memory, as the kernel counts it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))


def measured(call: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, float, float]:
    """What a call gives, the most MiB that it takes at once, and its seconds."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    before, started = kib("VmRSS"), time.perf_counter()
    found = call()
    return found, (kib("VmHWM") - before) / 1024, time.perf_counter() - started


def main(name: str, *words: str) -> int:
    torch.manual_seed(0)
    settings = json.loads(words[3]) if words[3:] else {}
    frames, height, width = map(int, words[:3])
    shape = load_shape(name)
    assert shape.vae is not None
    vae = real_vae(name, **settings)
    z = torch.randn(picture_sizes(name, shape.vae.factor, frames, height, width)[1])

    def decode(vae: Any) -> Callable[[], torch.Tensor]:
        return lambda: vae.decode(z, return_dict=False)[0]

    def work(transport: Transport) -> None:
        alone = measured(decode(vae)) if transport.rank == 0 else None
        transport.broadcast_value(None)  # the others wait
        image, mib, seconds = measured(decode(ShardedVAE(vae, transport)))
        digest = hashlib.sha256(image.numpy().tobytes()).hexdigest()
        of_ranks = transport.gather_values((digest, mib, seconds))
        if alone is None:
            return
        digests, of_bands, times = zip(*of_ranks, strict=True)
        assert len({*digests}) == 1, "the ranks have other bits"
        torch.testing.assert_close(image, alone[0], rtol=0, atol=1e-4)
        topology = Topology.build(load_machine("local"), transport.size, None)
        peaks = size_peaks(shape, topology, Video(frames, height, width), 1, z.element_size())
        sharded = ("sharded", transport.size, max(of_bands), max(times))
        for how, ranks, most, s in (("one", 1, *alone[1:]), sharded):
            told = peaks.of_vae[how].decoding / MIB
            print(f"{how} on {ranks}: {most:.0f} MiB, {told:.0f} predicted ({told / most - 1:+.1%}), {s:.2f} s")

    return run_ranks(None, detect(), Config(device="cpu", timeout_s=300.0), {}, torch.no_grad()(work))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
