"""Compiled kernels that are kept: taken whole and on the machine they are of, else compiled again."""

from __future__ import annotations

import shutil

import pytest
import torch
from cocodiff_sycl import SyclOps
from cocodiff_sycl.build import host_library, runtime_and_folder
from cocodiff_sycl.find import Unavailable
from cocodiff_sycl.kept import Kept
from cocodiff_sycl.library import Library

DAMAGES = {
    "a changed byte": lambda data: data[:5000] + bytes([data[5000] ^ 1]) + data[5001:],
    "half": lambda data: data[: len(data) // 2],
    "nothing": lambda data: b"",
    "only a digest": lambda data: data[:32],
    "another file": lambda data: bytes(range(256)) * 100,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_what_is_not_whole_is_not_taken(damage, tmp_path):
    kept = Kept(tmp_path / "saved", "a CPU 1.0 1")
    assert kept.read() is None
    kept.write(bytes(7000))
    assert kept.read() == bytes(7000) and [path.name for path in tmp_path.iterdir()] == ["saved"]
    kept.path.write_bytes(damage(kept.path.read_bytes()))
    assert kept.read() is None


def test_what_is_of_another_machine_is_not_taken(tmp_path, monkeypatch):
    kept = Kept(tmp_path / "saved", "a CPU 1.0 1")
    kept.write(b"program")
    assert Kept(kept.path, "a CPU 1.1 1").read() is None
    monkeypatch.setattr("cocodiff_sycl.kept.cpu_features", lambda: "another instruction")
    assert kept.read() is None


def test_a_folder_that_takes_no_file_is_an_error_with_words(tmp_path):
    with pytest.raises(Unavailable, match=r"cannot write the kernels' cache .*: No such file.*; set COCODIFF_CACHE"):
        Kept(tmp_path / "away" / "saved", "a CPU").write(b"program")
    (tmp_path / "saved").mkdir()
    with pytest.raises(Unavailable, match="Is a directory"):
        Kept(tmp_path / "saved", "a CPU").write(b"program")
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def test_kernels_come_from_what_is_kept_and_damage_compiles_again(sycl_on_cpu: SyclOps, monkeypatch, tmp_path):
    """The damaged file would end the process if the driver were given it."""
    of = sycl_on_cpu.library
    (whole,) = of.folder.glob(f"saved-*_{of.lanes}")
    monkeypatch.setenv("COCODIFF_CACHE", str(tmp_path))
    folder = runtime_and_folder()[1]
    shutil.copy(of.folder / "libcocodiff_sycl.so", folder)
    kept = folder / whole.name
    shutil.copy(whole, kept)
    compiled = []
    real = Library._compile
    monkeypatch.setattr(Library, "_compile", lambda *words: (compiled.append(1), real(*words))[1])
    for damage, times in ((None, 0), (DAMAGES["a changed byte"], 1), (None, 0)):
        if damage is not None:
            kept.write_bytes(damage(kept.read_bytes()))
        compiled.clear()
        ops = SyclOps(Library(None, of.lanes), torch.device("cpu"), lambda: None)
        assert len(compiled) == times
        buffer = torch.zeros(6)
        ops.pack([[torch.arange(6.0)]], [buffer])
        assert buffer.tolist() == [0, 1, 2, 3, 4, 5]


def test_the_library_outlives_the_environment_that_built_it(sycl_on_cpu, tmp_path):
    """It is kept beside the user's other caches, and another environment's libsycl serves it as well."""
    runtime, _ = runtime_and_folder()
    assert str(runtime.library.parent).encode() not in host_library(runtime, tmp_path).read_bytes()
