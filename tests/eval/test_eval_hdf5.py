"""HDF5 files that name others, hold nothing, or lead in circles."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
from cocodiff_eval.masks import make_mask
from cocodiff_eval.slices import open_stack, open_truth

from cocodiff.errors import UserError

IMAGE = np.arange(400, dtype=np.uint16).reshape(20, 20)
pytestmark = pytest.mark.usefixtures("promptly")


def virtual(file: h5py.File, name: str, source: str) -> None:
    layout = h5py.VirtualLayout((20, 20), "u2")
    layout[:] = h5py.VirtualSource(source, "data", (20, 20))
    file.create_virtual_dataset(name, layout)


OTHER = {
    "external link": lambda file: file.__setitem__("a", h5py.ExternalLink("other.h5", "/data")),
    "external group": lambda file: file.__setitem__("a", h5py.ExternalLink("other.h5", "/group")),
    "a soft link to it": lambda file: file.update(
        {"b": h5py.ExternalLink("other.h5", "/data"), "a": h5py.SoftLink("/b")}
    ),
    "external storage": lambda file: file.create_dataset("a", (20, 20), "u2", external=[("other.raw", 0, 800)]),
    "virtual dataset": lambda file: virtual(file, "a", "other.h5"),
    "virtual of external": lambda file: (
        file.create_dataset("data", (20, 20), "u2", external=[("other.raw", 0, 800)]),
        virtual(file, "a", "."),
    ),
}


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[h5py.File], object]], str]:
    """A file beside others that it may name; external storage is looked up in the working folder."""
    monkeypatch.chdir(tmp_path)
    with h5py.File("other.h5", "w") as file:
        file["data"] = file["group/inner"] = IMAGE
    Path("other.raw").write_bytes(IMAGE.tobytes())

    def made(fill: Callable[[h5py.File], object]) -> str:
        with h5py.File("in.h5", "w") as file:
            fill(file)
        return "in.h5"

    return made


@pytest.mark.parametrize("kind", OTHER)
def test_other_files_are_read_only_where_that_is_allowed(make: Callable[..., str], kind: str) -> None:
    path = make(OTHER[kind]) + (":/a/inner" if kind == "external group" else ":/a")
    with pytest.raises(UserError, match=r"in\.h5: .* another file, .*other\.(h5|raw); .* --follow-links"):
        open_stack(path)
    stack = open_stack(path, follow_links=True)
    np.testing.assert_array_equal(stack.read(0), IMAGE)
    with pytest.raises(UserError, match="--follow-links"):
        open_truth(path, stack)
    with pytest.raises(UserError, match="--follow-links"):
        make_mask(path, stack)


def test_links_within_a_file_are_followed(make: Callable[..., str]) -> None:
    def fill(file: h5py.File) -> None:
        file["group/data"] = file["data"] = IMAGE
        file["group/relative"], file["absolute"] = h5py.SoftLink("data"), h5py.SoftLink("/group/relative")
        file["folder"] = h5py.SoftLink("group")
        file["circle"], file["dangling"] = h5py.SoftLink("/circle"), h5py.SoftLink("/nothing")
        file["round"] = h5py.SoftLink("/round/a")
        virtual(file, "virtual", ".")

    path = make(fill)
    for name in ("group/relative", "absolute", "folder/data", "folder/relative", "virtual", "//folder//./data"):
        np.testing.assert_array_equal(open_stack(f"{path}:/{name}").read(0), IMAGE)
    for name, said in {"circle": "in a circle", "round": "in a circle", "dangling": "is not there"}.items():
        with pytest.raises(UserError, match=said):
            open_stack(f"{path}:/{name}")


def test_a_link_to_a_pipe_is_refused_even_if_links_are_followed(make: Callable[..., str]) -> None:
    os.mkfifo("pipe.h5")
    for fill in (
        lambda file: file.__setitem__("a", h5py.ExternalLink("pipe.h5", "/data")),
        lambda file: file.create_dataset("a", (20, 20), "u2", external=[("pipe.h5", 0, 800)]),
        lambda file: virtual(file, "a", "pipe.h5"),
    ):
        with pytest.raises(UserError, match=r"pipe\.h5, which is a named pipe"):
            open_stack(make(fill) + ":/a", follow_links=True)


@pytest.mark.parametrize(
    ("fill", "said"),
    [
        (lambda file: file.create_dataset("a", data=h5py.Empty("f4")), "an empty dataspace"),
        (lambda file: file.create_dataset("a", data=3.0), "0 dimensions"),
        (lambda file: file.create_group("a"), "is a group"),
        (lambda file: file.create_dataset("a", (0, 20, 20), "f4"), "no slices"),
        (lambda file: file.create_dataset("a", (20, 20), h5py.vlen_dtype("f4")), "values of type object"),
        (lambda file: file.create_dataset("a", (20, 20), [("x", "f4"), ("y", "i4")]), "values of type"),
    ],
)
def test_datasets_that_are_no_images(make: Callable[..., str], fill: Callable[[h5py.File], object], said: str) -> None:
    with pytest.raises(UserError, match=said):
        open_stack(make(fill) + ":/a")
    with pytest.raises(UserError, match=r"in\.h5: name the dataset as in\.h5:/path; it holds"):
        open_stack("in.h5")
