"""Packages that are installed and do not import: one line for whoever needs them, and no trouble for others."""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module, metadata
from typing import Any

from cocodiff.config.errors import UserError

# Packages that diffusers imports wherever they are installed, and does without where they are not. peft, which imports
# transformers, comes after those that transformers takes up.
TAKEN_UP = ("torchvision", "torchaudio", "xformers", "bitsandbytes", "torchao", "peft")
# What mends a package that is there and does not import; any other one is to be installed again.
REMEDIES = {
    "h5py": "pip install --ignore-installed --no-deps h5py into this environment, or on Aurora module load hdf5/1.14.6",
    "mpi4py": "load the MPI library that mpi4py was built on, or build it again on the one that is loaded",
    "torch": "load the module that brings this torch, or install torch again",
}
EXTRAS = {"mrcfile": "pip install cocodiff[mrc]"}  # what installs a package that only some need


def remedy_of(package: str) -> str:
    """Return what mends a package that does not import."""
    distribution = metadata.packages_distributions().get(package, [package])[0]
    return REMEDIES.get(package) or f"pip install --ignore-installed --no-deps {distribution} into this environment"


def failed_import(error: BaseException) -> str:
    """Return one line about the package whose import raised an error, with the reason and the remedy; "" for an error
    of another origin."""
    while error.__cause__ is not None:
        error = error.__cause__
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if frame.f_code.co_name == "<module>"]
    names = [name for frame in frames if (name := frame.f_globals["__name__"].partition(".")[0]) != "__main__"]
    if isinstance(error, ImportError) and error.name and (isinstance(error, ModuleNotFoundError) or not names):
        names.append(error.name.partition(".")[0])
    if not names or names[-1].startswith("cocodiff"):
        return ""
    reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
    absent = isinstance(error, ModuleNotFoundError) and error.name == names[-1]
    remedy = (absent and EXTRAS.get(names[-1])) or remedy_of(names[-1])
    return f"the package {names[-1]} does not import ({reason}): {remedy}"


@contextmanager
def one_line_of_imports() -> Iterator[None]:
    """Raise UserError with one line where a package does not import."""
    try:
        yield
    except Exception as error:
        if line := failed_import(error):
            raise UserError(line) from error
        raise


def hide_broken(*packages: str) -> None:
    """Import packages that other ones take up wherever they find them. One that does not import is absent from then on,
    for who asks `find_spec` or imports it, and a warning tells the reason and the remedy."""
    for package in packages:
        if package not in sys.modules:
            try:
                import_module(package)
            except Exception as error:
                sys.modules[package] = None  # type: ignore[assignment]  # Python's own mark of a module to be passed over
                if not isinstance(error, ModuleNotFoundError) or error.name != package:
                    logging.getLogger("cocodiff").warning("the run does without it: %s", failed_import(error) or error)


def import_diffusers() -> Any:
    """Return diffusers, after those packages that it would fail with are hidden from it."""
    hide_broken(*TAKEN_UP)
    return import_module("diffusers")
