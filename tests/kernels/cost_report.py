"""What the kernels cost on a tile of GPU Max, counted in the instructions that Intel's offline compiler made of them:
`COCODIFF_OCLOC=FOLDER python tests/kernels/cost_report.py` prints them, a line for each kernel.

A hardware thread runs LANES work-items. Its hot loop is the innermost one whose instructions take the most cycles;
cases.cpp has the arithmetic kernels' path for heads of 128 channels without other paths beside it. A case whose name
goes on after a kernel's has a line of its own: it is another path of that kernel.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from cocodiff_sycl.build import kernel_source
from cocodiff_sycl.library import GPU_LANES
from intel_compiler import PREFIX, compile_native

CASE = "case_"
NUMBERS = 128  # that a pass of an arithmetic loop takes: a head's; one of a copy's takes four times as many
ITEMSIZE = {"f32": 4, "bf16": 2, "f16": 2}
NO_LOOP = ("choose_tokens", "compact_rows", "stream_begins", "join_strips")  # bound by latency
# By the name of a kernel, bytes that any such one moves for each byte of a tensor. Of the lossless codec: x and two
# known values read, what is known next and the code written; and without x.
MOVED = {"move_rows": 2, "l1_score": 2, "norm_rope": 2, "note_change": 3, "continue_linearly": 3}
MOVED |= {"code_strips": 4.5, "read_streams": 3.5}

# A tile of GPU Max 1550 [from its documentation]: 448 vector engines, each of which starts at most one instruction of
# 16 lanes a cycle, at 1.6 GHz at most, and 1 TB/s as measured by others.
ENGINES, CYCLES_S, MEMORY_BYTES_S = 448, 1.6e9, 1e12

LABEL = re.compile(r"^(L\d+):")
JUMP = re.compile(r"\b(?:goto|jmpi|while|brd)\b.*?\b(L\d+)\b")
SLOW = re.compile(r"\bmath\.")  # 4 cycles for 16 lanes
NO_WORK = re.compile(r"^\s*(?:\(.*?\))?\s*(?:sync\.|nop\b|illegal\b)")


def hot_loop(assembly: str) -> int:
    """Return the cycles in which the instructions of one pass are started, but for messages: of the innermost loop with
    the most of them, each from a label to a later jump back to it; of the kernel where it has none."""
    lines = assembly.splitlines()
    labels = {found[1]: number for number, line in enumerate(lines) if (found := LABEL.match(line))}
    jumps: set[tuple[int, int]] = set()
    for number, line in enumerate(lines):
        target = JUMP.search(line)
        if target and labels.get(target[1], number) < number:
            jumps.add((labels[target[1]], number + 1))
    counts = [0]
    for begin, end in jumps or {(0, len(lines))}:
        if not any(begin <= inner[0] and inner[1] <= end for inner in jumps - {(begin, end)}):
            counts.append(sum(_cycles(line) for line in lines[begin:end]))
    return max(counts)


def _cycles(line: str) -> int:
    if not line.strip() or LABEL.match(line) or NO_WORK.match(line) or "send." in line:
        return 0
    lanes = re.search(r"\((\d+)\|M\d+\)", line)
    whole = max(1, (int(lanes[1]) if lanes else 1) // 16)
    return whole * (4 if SLOW.search(line) else 1)


def moved_of(name: str) -> float:
    """Return the bytes that any such kernel moves for each byte of a tensor."""
    sizes = [ITEMSIZE[part] for part in name.split("_") if part in ITEMSIZE]
    if name.startswith("merge"):  # `out` read and written, `part` read
        return 2 + sizes[1] / sizes[0]
    if "residual" in name:  # x and one or two reconstructions read, one written; and the code with a scale of 4 bytes
        tensors = 2 + name.startswith("encode") + name.endswith(("_taylor", "_measure", "_onward"))
        return tensors + (NUMBERS * (2 if name.endswith("_int2") else 4) / 8 + 4) / (NUMBERS * sizes[0])
    return next(moved for kernel, moved in MOVED.items() if name.startswith(kernel))


def cost_of(name: str, cycles: int) -> str:
    """Return what a kernel costs on a tile for each megabyte of a tensor: by its traffic and by its instructions, of
    which the longer one counts. cycles: of its hot loop."""
    itemsize = next((ITEMSIZE[part] for part in name.split("_") if part in ITEMSIZE), 2)
    numbers = 4 * NUMBERS if name.startswith("move_rows") else NUMBERS
    traffic = 1e12 * moved_of(name) / MEMORY_BYTES_S
    instructions = 1e12 * cycles / (numbers * itemsize * ENGINES * CYCLES_S)
    a_number = cycles * GPU_LANES / numbers
    return f"{a_number:.1f} instructions a number; us/MB: traffic {traffic:.2f}, these {instructions:.2f}"


def report(device: str) -> Iterator[str]:
    """Yield a line for each kernel and case. Raises Unavailable."""
    cases = Path(__file__).with_name("cases.cpp").read_text()
    with tempfile.TemporaryDirectory() as parts:
        usage = compile_native(f"{kernel_source(GPU_LANES, gpu=True)}\n{cases}", device, Path(parts))
        text = {file.name: file.read_text() for file in Path(parts).rglob(".text.*.asm")}
    kernels = {one.name: one for one in usage}
    for name in sorted({name.removeprefix(CASE) for name in kernels}):
        path = CASE + name if CASE + name in kernels else name
        told = str(replace(kernels.get(name, kernels[path]), name=name))
        yield told if name in NO_LOOP else f"{told}, {cost_of(name, hot_loop(text[f'.text.{PREFIX}{path}.asm']))}"


if __name__ == "__main__":
    print(*report("pvc"), sep="\n")
