"""Small results folders for tests."""

from pathlib import Path

from cocodiff.jobs.folder import OutputFolder
from cocodiff.jobs.record import MARK


def open_with_image(folder: OutputFolder, text: str) -> Path:
    partial = folder.open()
    (partial / "images").mkdir(exist_ok=True)
    (partial / "images" / "a.png").write_text(text)
    return partial


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir())


def publish(out, text: str, overwrite: bool = False) -> None:
    folder = OutputFolder(str(out), overwrite)
    (open_with_image(folder, text) / MARK).write_text(text)
    folder.publish()
