"""One rank of an MPI job: parallel transformers over MPI, MPI's windows and gloo. Rank 0 checks against its own
one-process result, and that all ranks have the same bits.

exactness_rank.py MACHINE MESH...      (a mesh: "RING PLACEMENT"; with a ring, and on aurora, two of the cases)
"""

import hashlib
import sys

import torch
from exactness import Case, Expected, check_ranks, guided_outputs, parallel_outputs

from cocodiff.comm.launch import detect
from cocodiff.comm.transport import Transport
from cocodiff.config.config import Config
from cocodiff.jobs.ranks import run_ranks

CASES = (
    Case(38, 3, 5, 5, batch=2, dual=(0,)),
    Case(24, 5, 5, 7, dtype=torch.bfloat16),
    Case(12, 3, 7, 13),
    Case(24, 6, 7, 5, family="flux"),
    Case(48, 6, 7, 1, family="flux2"),
    Case(24, 7, 6, 17, batch=2, family="qwen", dtype=torch.bfloat16),
)


def main(machine: str, *meshes: str) -> int:
    for mesh in meshes:
        ring, placement = mesh.split()
        cases = CASES if ring == "auto" and machine == "local" else CASES[2:6:3]
        code = check(cases, machine, {"ring": ring, "placement": placement})
        if code:
            return code
    if detect().rank == 0:
        print("all ranks agree")
    return 0


def check(cases: tuple[Case, ...], machine: str, mesh: dict[str, str]) -> int:
    alone = [Expected.of(case) if detect().rank == 0 else None for case in cases]
    models = [case.model().to(case.dtype) if own is None else own.model for case, own in zip(cases, alone, strict=True)]
    digests: list[str] = []

    def work(transport: Transport) -> None:
        digest = hashlib.sha256()
        for case, model, expected in zip(cases, models, alone, strict=True):
            outputs = parallel_outputs(transport, model, case, machine, **mesh)
            if expected is not None:
                check_ranks([outputs], expected, case.family)
            if transport.size % 2 == 0 and case.family == "qwen":
                guided = guided_outputs(transport, model, case, machine, **mesh)
                if expected is not None:
                    expected.check(guided[0])
                    assert torch.equal(*guided)
                outputs += guided
            digest.update(b"".join(output.float().numpy().tobytes() for output in outputs))
        gathered = transport.gather_object(digest.hexdigest())
        if transport.rank == 0:
            assert len(gathered) == transport.size and len(set(gathered)) == 1, gathered
        digests.append(digest.hexdigest())

    for name in ("mpi", "mpi-rma", "gloo"):
        code = run_ranks(None, detect(), Config(transport=name, device="cpu", timeout_s=120.0), {}, work)
        if code:
            return code
    assert len(set(digests)) == 1, "MPI, windows and gloo gave different bits"
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
