"""Files of voxels and nothing else: PNG, which has no random access, so that an image is read when it is opened; and
NumPy's own, .npy."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

from cocodiff.config.errors import UserError
from cocodiff_eval.data.volume import (
    Metadata,
    NewVolume,
    RawVolume,
    as_volume_shape,
    check_memory,
    one_line,
    quiet_libraries,
    reading,
    same_channels,
)

PNG_CHANNELS = {0: 1, 2: 3, 3: 4, 4: 2, 6: 4}  # by colour type; a palette's images are read as RGBA
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def _read_png(file: str) -> np.ndarray:
    from PIL import Image

    with quiet_libraries():
        try:
            # Pillow silently reduces 16-bit colour to 8 bits; the header's bit depth tells before that happens.
            with Path(file).open("rb") as stream:
                header = stream.read(26)
            depth = colour = 0
            if header.startswith(PNG_SIGNATURE) and len(header) == 26:
                width, height, depth, colour = struct.unpack(">IIBB", header[16:])
                check_memory(file, (height, width), max(1, depth // 8) * PNG_CHANNELS.get(colour, 1))
            with Image.open(file, formats=["PNG"]) as image:
                if depth == 16 and colour != 0:
                    raise UserError(f"{file}: a 16-bit colour PNG; save it as 16-bit grey")
                if image.mode == "P":
                    return same_channels(np.asarray(image.convert("RGBA")), file)
                if image.mode in ("RGB", "RGBA", "LA"):
                    return same_channels(np.asarray(image), file)
                pixels_YX = np.asarray(image)
        except Image.DecompressionBombError:
            raise UserError(f"{file}: too many pixels for a PNG to be read safely; save it as TIFF or HDF5") from None
        except (OSError, SyntaxError, ValueError, EOFError) as error:
            if isinstance(error, UserError):
                raise
            raise UserError(f"{file}: not a readable PNG ({one_line(error)}); save it again") from error
    # Some Pillow versions hand out 16-bit grey as 32-bit integers.
    return pixels_YX.astype(np.uint16) if pixels_YX.dtype == np.int32 else pixels_YX


def open_png(file: str) -> RawVolume:
    image_YX = _read_png(file)
    shape = as_volume_shape(image_YX.shape, file)

    def read(index: int) -> np.ndarray:
        return image_YX

    return RawVolume(file, Path(file).stem, shape, image_YX.dtype, 2, read, Metadata("png"))


def open_npy(file: str) -> RawVolume:
    """Raises UserError for files with objects in them, which would have to be unpickled, and for damaged ones."""
    with reading(f"{file}: not a readable .npy file", "save it again with numpy.save"):
        voxels = np.load(file, mmap_mode="r", allow_pickle=False)
    shape = as_volume_shape(voxels.shape, file)
    check_memory(file, shape[1:], voxels.dtype.itemsize)
    byteorder = ">" if voxels.dtype.newbyteorder("S").isnative and voxels.dtype.itemsize > 1 else "<"

    def read(index: int) -> np.ndarray:
        return np.asarray(voxels if voxels.ndim == 2 else voxels[index])

    metadata = Metadata("npy", byteorder=byteorder)
    return RawVolume(file, Path(file).stem, shape, voxels.dtype.newbyteorder("="), voxels.ndim, read, metadata)


def write_npy(new: NewVolume) -> None:
    about = {"descr": new.stored.str, "fortran_order": False, "shape": new.stored_shape}
    with new.path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, about)
        for image_YX in new.slices():
            file.write(image_YX.astype(new.stored).tobytes())
