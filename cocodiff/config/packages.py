"""Handling of packages that are installed but cannot be imported: one clear error line for a run that needs them,
nothing for others."""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module, metadata
from typing import Any

from cocodiff.config.errors import UserError

# Optional packages that diffusers imports if they are installed. peft imports transformers, so it comes after the
# packages that transformers imports.
TAKEN_UP = ("torchvision", "torchaudio", "xformers", "bitsandbytes", "torchao", "peft")
# The remedy for a package that is installed but cannot be imported; any other package is to be installed again.
REMEDIES = {
    "h5py": "pip install --ignore-installed --no-deps h5py into this environment, or on Aurora module load hdf5/1.14.6",
    "mpi4py": "load the MPI library that mpi4py was built on, or build it again on the one that is loaded",
    "torch": "load the module that brings this torch, or install torch again",
}
EXTRAS = {"mrcfile": "pip install cocodiff[mrc]"}  # how to install an optional package


def remedy_of(package: str) -> str:
    """Return a text for the user that says how to repair a package which is installed but cannot be imported."""
    distribution = metadata.packages_distributions().get(package, [package])[0]
    return REMEDIES.get(package) or f"pip install --ignore-installed --no-deps {distribution} into this environment"


def failed_import(error: BaseException) -> str:
    """Return one line that names the package whose import raised `error`, the reason and the remedy.

    Return "" for other errors: those not raised by an import, and those of cocodiff's own modules.
    """
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
    """Turn the error of a failed import in the block into a UserError whose message is one line with the remedy. Other
    errors pass unchanged."""
    try:
        yield
    except Exception as error:
        if line := failed_import(error):
            raise UserError(line) from error
        raise


def hide_broken(*packages: str) -> None:
    """Make optional packages that cannot be imported look as if they were not installed.

    Each package is imported. If that fails, `sys.modules` is changed so that later imports and `find_spec` do not find
    it. A warning gives the reason and the remedy, unless the package is not installed at all.

    Args:
        packages: names of packages that other libraries import if they are installed.
    """
    for package in packages:
        if package not in sys.modules:
            try:
                import_module(package)
            except Exception as error:
                sys.modules[package] = None  # type: ignore[assignment]  # Python then raises ModuleNotFoundError for it
                if not isinstance(error, ModuleNotFoundError) or error.name != package:
                    logging.getLogger("cocodiff").warning("the run does without it: %s", failed_import(error) or error)


def import_diffusers() -> Any:
    """Import diffusers, and return the module. Optional packages that would make its import fail are hidden first."""
    hide_broken(*TAKEN_UP)
    return import_module("diffusers")
