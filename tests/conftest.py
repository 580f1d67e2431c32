"""Makes the tests' helper modules importable from every folder of tests, and holds what many tests need."""

import ctypes
import gc
import importlib
import itertools
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

TESTS = Path(__file__).parent
sys.path.insert(0, str(TESTS))

import snapshots  # noqa: E402
from syncs import Syncs  # noqa: E402

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)

gc.disable()  # until all files are imported, see pytest_collection_finish
# Before torch is imported: ranks and workers share the cores, and the last bits of sums depend on threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# With AMX oneDNN 3.12 (torch 2.13) reads beyond its memory where a convolution of 16 bits with a stride of 2 has an
# output of one column and five rows or more: numbers are wrong, with bands and without.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # every program that a test starts would compile the project anew

try:  # what is compiled for tests is kept in the user's cache; where nothing can be, in the checkout's
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    cache.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=cache).close()
except (OSError, RuntimeError):
    os.environ["XDG_CACHE_HOME"] = os.environ["MPLCONFIGDIR"] = str(TESTS.parent / ".pytest_cache" / "of-programs")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="every test")
    parser.addoption("--rewrite-snapshots", action="store_true", help="take today's texts as the right ones")
    parser.addoption("--all", action="store_true", help="every test, whole products of worlds, and more examples")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without --full, what is marked `full` is left out, and all but some cases of what is marked `sample`; without
    --all, what is marked `exhaustive`."""
    if config.getoption("--all"):
        return
    left_out = {item for item in items if item.get_closest_marker("exhaustive")}
    cases: dict[tuple[pytest.Item | None, str], list[Any]] = {}
    for item in items if not config.getoption("--full") else ():
        if item not in left_out and item.get_closest_marker("sample"):
            cases.setdefault((item.parent, getattr(item, "originalname", item.name)), []).append(item)
    taken = {one for of_function in cases.values() for one in sample(of_function)}
    sampled = {one for of_function in cases.values() for one in of_function}
    if not config.getoption("--full"):
        left_out |= {item for item in items if item.get_closest_marker("full")} | (sampled - taken)
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=[*left_out])


def sample(cases: list[Any]) -> list[Any]:
    """As many of a test's cases as its marker says; each in turn brings the most values of parameters that are new."""
    most, chosen, seen = cases[0].get_closest_marker("sample").args[0], [], set()
    # pytest's own numbers of values are those of the cases. A value is one object in all of its cases.
    values = {case: {(name, id(value)) for name, value in case.callspec.params.items()} for case in cases}
    while values and len(chosen) < most:
        chosen.append(max(values, key=lambda case: len(values[case] - seen)))
        seen |= values.pop(chosen[-1])
    return chosen


def pytest_collection_finish() -> None:
    """What libraries and tests have made so far stays, so the collector need not search it again and again: it would
    for every few copies of a model, and has not since the first import."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Where only what runs alone is asked for, files that have none of it are not imported."""
    if config.getoption("markexpr") != "alone" or collection_path.suffix != ".py":
        return None
    named = any(str(argument).partition("::")[0].endswith(collection_path.name) for argument in config.args)
    return None if named or "mark.alone" in collection_path.read_text() else True


def pytest_configure(config: pytest.Config) -> None:
    """Where tests run side by side, each worker keeps to a core of its own. Signals that whoever started the tests
    ignores (a script's `&`, nohup, a service) have no effect on them, but their default one on the programs that they
    start: that passes from one program to the next where no handler is set."""
    if not config.getoption("numprocesses", None):  # else the workers do it
        for number in STOPS:
            if signal.getsignal(number) == signal.SIG_IGN:
                signal.signal(number, lambda *_: None)
    settings.register_profile("exhaustive")
    settings.register_profile("same", derandomize=True)  # a tier that was green stays so until something changes
    settings.load_profile("exhaustive" if config.getoption("--all") else "same")
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker is not None and hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[int(worker.removeprefix("gw")) % len(cores)]})


@pytest.fixture(scope="session", autouse=True)
def current_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An empty folder, in which the tests run: nothing that a user's runs have left can be found there."""
    before, folder = Path.cwd(), tmp_path_factory.mktemp("current")
    os.chdir(folder)
    yield folder
    os.chdir(before)


@pytest.fixture(autouse=True)
def nothing_is_left(current_folder: Path) -> Iterator[None]:
    """Neither there nor in the project's own folder, whose hidden files are those of tools that check it."""
    folders = current_folder, TESTS.parent
    before = [set(folder.iterdir()) for folder in folders]
    yield
    for folder, names in zip(folders, before, strict=True):
        left = {path.name for path in set(folder.iterdir()) ^ names if not path.name.startswith(".")}
        assert not left, f"the test has left or removed {sorted(left)} in {folder}"


@pytest.fixture(scope="module", autouse=True)
def memory_is_given_back() -> Iterator[None]:
    """Give the system back, after each file, what threads have freed: glibc keeps it, and workers grew to 8 GB."""
    yield
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


@pytest.fixture(scope="module")
def one_thread_a_rank():
    """For ranks that are threads themselves."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def alone() -> Iterator[Any]:
    """The transport of a world of one rank."""
    from cocodiff.comm.loopback import LoopbackTransport, LoopbackWorld

    transport = LoopbackTransport(LoopbackWorld(1), 0)
    yield transport
    transport.close()


@pytest.fixture
def promptly() -> Iterator[None]:
    """For what must not wait for ever: a test that does fails after twenty seconds."""

    def give_up(*_: object) -> None:
        pytest.fail("still waiting after twenty seconds")

    importlib.import_module("diffusers")  # which may take as long by itself, on a busy machine
    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, 20, 1)  # and again, should it wait in a second place
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def unsynced(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], list[str]]:
    """A function that names the files of a folder that were written since they were last synced, if ever."""
    syncs = Syncs()
    monkeypatch.setattr(os, "fsync", syncs.sync)
    return lambda folder: syncs.behind(folder.rglob("*"))


@pytest.fixture
def snapshot(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """A function that compares a text with the one that `snapshots.txt` has for this test. It may be called more than
    once in a test. `pytest --rewrite-snapshots` writes the text there instead."""
    calls = itertools.count(1)
    name = request.node.nodeid.removeprefix("tests/")

    def compare(text: str) -> None:
        key, text = f"{name} #{next(calls)}", text.rstrip("\n")
        if request.config.getoption("--rewrite-snapshots"):
            with snapshots.rewritten() as texts:
                texts[key] = text
        assert text == snapshots.read().get(key, "no snapshot: run pytest --rewrite-snapshots on this file")

    return compare


@pytest.fixture(scope="session")
def simulated() -> Any:
    """The simulated device, which is built once. Tests that need it are left out where there is no compiler."""
    try:
        return importlib.import_module("simulated_device")
    except ImportError as error:
        pytest.skip(str(error))
