"""Places where tests look behind public names, each a function that says what it looks at.

Every other test file is kept from private attributes by ruff (SLF001). Prefer what a user can see.
"""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from cocodiff_sycl import library
from cocodiff_sycl.build import host_library, kernel_option, runtime_and_folder
from cocodiff_sycl.find import Unavailable

from cocodiff.attention import local
from cocodiff.attention.v_major.codec import CardCall, SourceCall
from cocodiff.comm import connect
from cocodiff.comm.launch import Launch
from cocodiff.comm.loopback import LoopbackTransport
from cocodiff.comm.torch_dist import TorchDistTransport
from cocodiff.comm.transport import LaneOwner
from cocodiff.engine.engine import Engine
from cocodiff.jobs import arrays, ranks
from cocodiff.kernels import dispatch


def hooks_of(module: torch.nn.Module) -> list[Any]:
    """List the forward hooks on a module and on all of its parts."""
    found: list[Any] = []
    for part in module.modules():
        found += [*part._forward_pre_hooks.values(), *part._forward_hooks.values()]
    return found


def noise_of(inpainter: Any, keys: Sequence[int]) -> list[torch.Generator]:
    """Give the generators that an inpainter draws the noise of images with these keys from."""
    return list(inpainter._generators(keys))


@contextmanager
def unpacking_changed(pipe: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """A FLUX.2 pipeline that changes its latents before it unpacks them, while the block lasts."""
    unpack = type(pipe)._unpatchify_latents
    pipe._unpatchify_latents = lambda latents: unpack(change(latents))
    yield
    del pipe._unpatchify_latents


def notes_of_ranks(count: int) -> Any:
    """Make what forked ranks leave for their parent, as `run_ranks` does it."""
    return ranks._Notes(count)


def end_of_child(rank: int, status: int, notes: Any) -> ranks.RankEnd:
    """Tell how a forked rank has ended, from its exit status and its notes."""
    return ranks._child_end(rank, status, notes)


def wrap_ranks(wrapped: Callable[..., Any]) -> None:
    """Have ranks that start from now on call a function of (what they would call, its arguments...)."""
    ranks._run_rank = partial(wrapped, ranks._run_rank)  # type: ignore[assignment]


def count_compilations(counted: list[int]) -> None:
    """Add an entry to a list whenever kernels are compiled."""
    compile_kernels = library.Library._compile
    library.Library._compile = lambda *given: counted.append(1) or compile_kernels(*given)  # type: ignore


def end_of_error(error: BaseException) -> ranks.RankEnd:
    """Tell how a rank ends that raises an error."""
    return ranks._end_of(error)


def report_ends(launch: Launch, ends: dict[int, ranks.RankEnd], left: str) -> int:
    """Print the line of a job whose ranks have ended so, and return its exit code."""
    return ranks._report(launch, ends, left)


def call_before_ends_are_noted(call: Callable[[], None]) -> None:
    """Have `call` called in a forked rank when it is about to note its end, for good."""
    noted = ranks._Notes.note_end

    def note_end(notes: Any, rank: int, end: ranks.RankEnd) -> None:
        call()
        noted(notes, rank, end)

    ranks._Notes.note_end = note_end  # type: ignore[method-assign]


def connect_ranks_by(connecting: Callable[..., Any]) -> None:
    """Have the library's connection of ranks made by `connecting`, for good."""
    connect._initialise = connecting  # type: ignore[assignment]


def choose_backend(processor: Any, name: str) -> None:
    """Have a processor of diffusers attend by a backend, whether or not it is installed."""
    processor._attention_backend = name


def plan_of_diffusers(model: Any) -> dict[str, Any]:
    """List where diffusers' own context parallelism cuts and gathers the tokens of a model."""
    return model._cp_plan


def interrupt(pipe: Any) -> None:
    """Have a pipeline of diffusers leave out its further steps, as its users do from a callback."""
    pipe._interrupt = True


def save_as_restore(array: Any, path: Path) -> None:
    """Save an array, the volume or the mask by the file's name, as `cocodiff.restore` hands it to its job."""
    arrays._save(array, path)


def words_of_restore(options: dict[str, Any]) -> list[str]:
    """Return the words of the command line that `cocodiff.restore` makes of its options."""
    return arrays._words(options)


def watch_of_restore() -> Callable[..., None]:
    """Return the function by which `cocodiff.restore` waits for its job."""
    return arrays._watch


def bytes_held_of_parts(engine: Any) -> list[int]:
    """List what codecs of an engine keep: those of this rank's part of guidance, and those of all ranks together."""
    return [ranks.strategy.codec.bytes_held() for ranks in engine._guided.sequences]


def messages_kept_of_parts(engine: Any) -> int:
    """Count the messages between an engine's parts of guidance that it still holds, with their tensors."""
    return len(engine._guided._parts._awaited) + len(engine._guided._parts._sent)


def step_caches_of(engine: Any) -> Any:
    """Give the step caches that an engine attaches to its model on entering."""
    return engine._caches


def end_guidance_of(pipe: Any) -> None:
    """Set the scale of guidance of a pipeline of diffusers to 1 while it runs, as diffusers' guide says."""
    pipe._guidance_scale = 1.0


def steps_of(engine: Engine) -> int | None:
    """Look at how many steps an engine takes its pipeline's run to have."""
    return engine._steps()


def lanes_of(transport: LaneOwner) -> set[str]:
    """Look at the names of the lanes that a rank has."""
    return {*transport._lanes}


def number_of(storage: torch.UntypedStorage) -> int:
    """Look at what tells memory apart that has no address, as on meta."""
    return storage._cdata


def unreceived_of(transport: LoopbackTransport) -> int:
    """Count the messages between the ranks of one process that were sent and that nobody has received."""
    return sum(mailbox.qsize() for mailbox in transport._world._mailboxes.values())


def receives_of(flight: Any) -> tuple[int, list[Any]]:
    """The rank of messages of an exchange that are under way, and each that it receives."""
    return flight._here.rank, [receive for of_phase in flight._phases for receive in of_phase.values()]


def sums_on_the_device(notes: Any) -> Any:
    """V-Major's notes of a run that the host has not read."""
    return notes._sums


def watch_choosing(patch: Any, watch: Callable[[Callable[[], Any]], Any]) -> None:
    """Has V-Major's choice of rows, without arguments, given to `watch`, which makes it and returns it."""
    for call in (SourceCall, CardCall):
        choose = call._choose
        patch.setattr(call, "_choose", lambda self, x, choose=choose: watch(lambda: choose(self, x)))


def kernels_of_parts() -> dict[str, Any]:
    """The kernels that attend to a part of the keys and tell the sums, by the type of device that is known to have
    one."""
    return local._KERNELS


# Kernels --------------------------------------------------------------------------------------------------------------


def kept_by(layouts: Any) -> Any:
    """What is kept of the layouts that were looked at."""
    return layouts._kept


def opened_libraries() -> Any:
    """The function that opens a device's kernels once, with its cache."""
    return dispatch._open


def build(library: Any, about: str) -> None:
    """Takes a library's kernels from its cache, or compiles them there."""
    library._build(None, about)


def compile_for_cpu(source: str) -> None:
    """Has libsycl compile SYCL source for the CPU device, in whatever environment it is, as a library of others does
    that knows nothing of ours. Raises Unavailable."""
    runtime, folder = runtime_and_folder()
    if runtime.opencl_cpu is not None:
        os.environ.setdefault("OCL_ICD_FILENAMES", str(runtime.opencl_cpu))
    c = library._bind(host_library(runtime, folder), runtime)
    device = ctypes.c_void_p(c.cocodiff_open(None, 1))
    if not device or not c.cocodiff_build(device, source.encode(), kernel_option(runtime)):
        raise Unavailable(library._first_error(c))


# Communication --------------------------------------------------------------------------------------------------------


def cut(watch: Any) -> None:
    """Does what the death of a watch's process does: all its connections close, before it can say of one that it
    has."""
    with watch._changed:
        for line in watch._lines.values():
            line.socket.shutdown(socket.SHUT_RDWR)


def peers_of(watch: Any) -> Any:
    """What a watch knows of the other ranks."""
    return watch._peers


def put_behind_checksums(group: Any, faulty: Callable[[Any], Any]) -> None:
    """Has another group carry a checked group's messages and their checksums."""
    group._group = faulty(group._group)


def group_of_part(group: Any) -> Any:
    """The whole run's group that carries a part's messages."""
    return group._group


def tell_of_blocking(transport: Any) -> None:
    """Says, on rank 0, which settings keep messages from being hidden."""
    connect._tell_of_blocking(transport)


def meet(transport: Any, group: Any, members: tuple[int, ...]) -> None:
    """Makes the first call of a device backend's communicator."""
    TorchDistTransport._meet(transport, group, members)


def register_device(name: str, module: Any) -> None:
    """Makes torch know a type of device by its module."""
    torch._register_device_module(name, module)
