"""What the kernels cost on a tile of GPU Max, counted in the instructions that Intel's offline compiler made of them:
`COCODIFF_OCLOC=FOLDER python tests/kernels/cost_report.py` prints them, a line for each kernel.

A hardware thread runs LANES work-items. Its hot loop is the innermost one whose wide messages move the most bytes;
cases.cpp has the arithmetic kernels' path for heads of 128 channels without other paths beside it. A case whose name
goes on after a kernel's has a line of its own: it is another path of that kernel.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from cocodiff_sycl.build import kernel_source
from cocodiff_sycl.library import GPU_LANES
from intel_compiler import PREFIX, Ocloc, Usage, compile_native, find_ocloc

CASE = "case_"
WIDE_BYTES = 64  # of a thread, in one message
NUMBERS = 128  # that a pass of an arithmetic loop takes: a head's
SCALE_BYTES = 4  # of a head's residual, beside its codes
COPIED_BYTES = 1024  # that a pass of a copy's loop takes: BATCH blocks
ITEMSIZE = {"f32": 4, "bf16": 2, "f16": 2}

# A tile of GPU Max 1550 [from its documentation]: 448 vector engines, each of which starts at most one instruction of
# 16 lanes a cycle, at 1.6 GHz at most, and 1 TB/s as measured by others.
ENGINES, CYCLES_S, MEMORY_BYTES_S = 448, 1.6e9, 1e12

MESSAGE = re.compile(r"\((\d+)\|M\d+\).*(load|store)\.ugm\.d(\d+)(?:u\d+)?(?:x(\d+)(t)?)?\.a64")
LABEL = re.compile(r"^(L\d+):")
JUMP = re.compile(r"\b(?:goto|jmpi|while|brd)\b.*?\b(L\d+)\b")
SLOW = re.compile(r"\bmath\.")  # 4 cycles for 16 lanes
NO_WORK = re.compile(r"^\s*(?:\(.*?\))?\s*(?:sync\.|nop\b|illegal\b)")
# Of the lossless codec, bytes that are moved for a number: x and two known values read, what is known next and the code
# written; and without x.
STREAM_BYTES = {"code_strips": 9, "read_streams": 7}


@dataclass(frozen=True)
class Loop:
    """One pass: the bytes that it moves, those of them that are in wide messages, and the cycles in which its other
    instructions are started."""

    bytes: int
    wide_bytes: int
    cycles: int


@dataclass(frozen=True)
class Row:
    """A line of the report. numbers: of one tensor in a pass of the loop, of itemsize bytes; moved: the bytes that any
    kernel moves for them. Kernels without a loop of interest have none of that."""

    usage: Usage
    loop: Loop | None
    numbers: int
    moved: int
    itemsize: int = 2

    def seconds(self, tensor_bytes: float) -> tuple[float, float]:
        """On a tile, for a tensor of so many bytes: of its traffic and of its instructions; the longer one counts."""
        assert self.loop is not None
        passes = tensor_bytes / (self.numbers * self.itemsize)
        return passes * self.moved / MEMORY_BYTES_S, passes * self.loop.cycles / (ENGINES * CYCLES_S)

    def __str__(self) -> str:
        told = f"{self.usage}"
        if self.loop is not None:
            traffic, instructions = (1e6 * one for one in self.seconds(1e6))
            a_number = self.loop.cycles * GPU_LANES / self.numbers
            told += f", {a_number:.1f} instructions a number; us/MB: traffic {traffic:.2f}, these {instructions:.2f}"
        return told


def loops(assembly: str) -> Iterator[Loop]:
    """A kernel's innermost ones, each from a label to a later jump back to it; the kernel where it has none."""
    lines = assembly.splitlines()
    labels = {found[1]: number for number, line in enumerate(lines) if (found := LABEL.match(line))}
    jumps: set[tuple[int, int]] = set()
    for number, line in enumerate(lines):
        target = JUMP.search(line)
        if target and labels.get(target[1], number) < number:
            jumps.add((labels[target[1]], number + 1))
    for begin, end in sorted(jumps or {(0, len(lines))}):
        if any(begin <= inner[0] and inner[1] <= end for inner in jumps - {(begin, end)}):
            continue
        body = [line for line in lines[begin:end] if line.strip() and not LABEL.match(line) and not NO_WORK.match(line)]
        messages = [_bytes_of(found) for line in body if (found := MESSAGE.search(line))]
        wide_bytes = sum(count for count in messages if count >= WIDE_BYTES)
        yield Loop(sum(messages), wide_bytes, sum(_cycles(line) for line in body if "send." not in line))


def hot_loop(assembly: str) -> Loop:
    """The loop that moves the most bytes in wide messages."""
    return max(loops(assembly), key=lambda loop: loop.wide_bytes)


def _bytes_of(found: re.Match[str]) -> int:
    """What a message moves for a thread: of a block message, at one address for all lanes, the vector alone."""
    lanes, _, bits, vector, transposed = found.groups()
    return int(bits) // 8 * int(vector or 1) * (1 if transposed else int(lanes))


def _cycles(line: str) -> int:
    lanes = re.search(r"\((\d+)\|M\d+\)", line)
    whole = max(1, (int(lanes[1]) if lanes else 1) // 16)
    return whole * (4 if SLOW.search(line) else 1)


def report(device: str, ocloc: Ocloc) -> list[Row]:
    """Of all kernels and cases. Raises Unavailable."""
    cases = Path(__file__).with_name("cases.cpp").read_text()
    with tempfile.TemporaryDirectory() as parts:
        usage = compile_native(f"{kernel_source(GPU_LANES, gpu=True)}\n{cases}", device, ocloc, Path(parts))
        text = {file.name: file.read_text() for file in Path(parts).rglob(".text.*.asm")}
    paths = {name: replace(one, name=name) for one in usage if (name := one.name.removeprefix(CASE)) != one.name}
    own = {one.name: one for one in usage if not one.name.startswith(CASE)}
    return [
        row_of(one, text[f".text.{PREFIX}{CASE * (name in paths)}{name}.asm"])
        for name, one in sorted({**paths, **own}.items())
    ]


def row_of(usage: Usage, path: str) -> Row:
    """path: the assembly whose hot loop counts."""
    if usage.name in (
        "choose_tokens",
        "compact_rows",
        "stream_begins",
        "join_strips",
    ):  # bound by latency: no loop to count
        return Row(usage, None, 0, 0)
    loop = hot_loop(path)
    if usage.name.startswith("move_rows"):
        numbers = COPIED_BYTES // ITEMSIZE["bf16"]
        return Row(usage, loop, numbers, 2 * COPIED_BYTES)
    sizes = [ITEMSIZE[part] for part in usage.name.split("_") if part in ITEMSIZE]
    if usage.name.rpartition("_")[0] in STREAM_BYTES:
        loop = max(loops(path), key=lambda one: one.cycles)
        return Row(usage, loop, NUMBERS, NUMBERS * STREAM_BYTES[usage.name.rpartition("_")[0]])
    if "residual" in usage.name:  # x and one or two reconstructions read, one written; and the code
        tensors = 2 + usage.name.startswith("encode") + usage.name.endswith(("_taylor", "_measure", "_onward"))
        code_bytes = NUMBERS * (2 if usage.name.endswith("_int2") else 4) // 8 + SCALE_BYTES
        return Row(usage, loop, NUMBERS, tensors * sizes[0] * NUMBERS + code_bytes, sizes[0])
    # x read, the last values read and written; two reconstructions read, what continues them written
    if usage.name.startswith(("note_change", "continue_linearly")):
        return Row(usage, loop, NUMBERS, 3 * sizes[0] * NUMBERS, sizes[0])
    # merge: `out` read and written, `part` read; the others: one read and one more tensor read or written.
    moved = 2 * sizes[0] + sizes[1] if usage.name.startswith("merge") else 2 * sizes[0]
    return Row(usage, loop, NUMBERS, NUMBERS * moved, sizes[0])


if __name__ == "__main__":
    print(*report("pvc", find_ocloc()), sep="\n")
