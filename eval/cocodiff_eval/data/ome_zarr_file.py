"""OME-Zarr stores of results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import zarr
from zarr.codecs import BytesCodec

from cocodiff.jobs.declared import SCALES
from cocodiff_eval.data.ome_zarr import open_node, transform_of
from cocodiff_eval.data.tiff_metadata import NOTES
from cocodiff_eval.data.volume import NewVolume, Triple, plain, start_of

SMALLEST_LEVEL = 256  # voxels on the longer side of the last level
CHUNK_SIDE = 1024  # of an input that is in no chunks


class ZarrStore:
    """A store with one multiscale image in its root: of a Zarr input in its version, with its axes, compression and
    attributes, else in NGFF 0.4, which most tools read. A chunk holds voxels of one slice.

    lead: axes before slices, rows and columns; image: what the input says of its multiscale image, empty where it is
    none; levels: the shapes of the input's; step: how many slices, rows and columns become one in the next level, where
    the input keeps its slices one slice.
    """

    def __init__(self, new: NewVolume) -> None:
        self.new, self.path = new, new.path
        self.lead, self.source = 0, None
        self.image: Mapping[str, Any] = {}
        levels: Sequence[tuple[int, ...]] = ()
        if new.metadata.kind == "zarr":
            details = new.metadata.details
            self.lead, self.image, levels = details["lead"], details["image"], details["levels"]
            self.source = open_node(details["store"], details["inner"], details["level"])
        self.version: Literal[2, 3] = 3 if self.source is not None and self.source.metadata.zarr_format == 3 else 2
        slices = [level[-3] for level in levels[:2] if len(level) > 2]
        whole = len(slices) == 2 and slices[0] == slices[1] > 1
        self.step = (1, 2, 2) if whole or new.ndim == 2 else (2, 2, 2)
        self.shapes = self._level_shapes(len(levels))

    def write(self) -> None:
        zarr.create_group(self.path, zarr_format=self.version, attributes=self.attributes())
        above = None
        for level, (slices, *_) in enumerate(self.shapes):
            array = self._make_level(level)
            for index in range(slices):
                image_YX = self.new.read(index) if above is None else self.smaller(above, self.shapes[level - 1], index)
                array[self._place(index)] = image_YX
            above = array

    def smaller(self, above: Any, shape: Triple, index: int) -> np.ndarray:
        """A slice of the next level [Y, X]: means of up to 2 x 2 x 2 voxels of the level before, `above`."""
        step, dtype = self.step[0], self.new.dtype
        together = range(step * index, min(step * (index + 1), shape[0]))
        images = [halve(self.get(above, one).astype(np.float64)) for one in together]
        mean_YX = sum(images[1:], images[0]) / len(images)
        return (np.rint(mean_YX) if dtype.kind in "ui" else mean_YX).astype(dtype)

    def get(self, array: Any, index: int) -> np.ndarray:
        return np.asarray(array[self._place(index)]).astype(self.new.dtype)

    def _place(self, index: int) -> Any:
        return (*(0,) * self.lead, *((index,) if self.new.ndim == 3 else ()), ...)

    def _level_shapes(self, given: int) -> list[Triple]:
        """[N, Y, X] of every level: as many as the input has, or until the longer side is SMALLEST_LEVEL or less."""
        shapes = [self.new.shape]
        while len(shapes) < given if given > 1 else max(shapes[-1][1:]) > SMALLEST_LEVEL:
            n, y, x = (-(-side // step) for side, step in zip(shapes[-1], self.step, strict=True))
            if (n, y, x) == shapes[-1]:
                break
            shapes.append((n, y, x))
        return shapes

    def _make_level(self, level: int) -> Any:
        source, dtype = self.source, self.new.dtype
        shape = (1,) * self.lead + self.shapes[level][-self.new.ndim :]
        options: dict[str, Any] = {}
        chunks: tuple[int, ...] = (CHUNK_SIDE, CHUNK_SIDE)
        if source is not None:
            chunks = source.chunks[-2:]
            options = kept_codecs(source, dtype)
            kept = source.attrs if level == 0 else SCALES
            without = self.new.metadata.details.get("without", ())
            given = {name: one for name, one in source.attrs.items() if name in kept and name not in without}
            options["attributes"] = plain(given)
        if self.version == 3 and source is not None:
            endian = "big" if self.new.metadata.byteorder == ">" else "little"
            options["dimension_names"] = source.metadata.dimension_names
            options["serializer"] = BytesCodec(endian=None if dtype.itemsize == 1 else endian)
        else:
            options["chunk_key_encoding"] = {"name": "v2", "separator": "/"}
        fitting = tuple(min(chunk, side) for chunk, side in zip(chunks, shape[-2:], strict=True))
        options |= {"dtype": dtype if self.version == 3 else self.new.stored, "zarr_format": self.version}
        chunks = (1,) * (len(shape) - 2) + fitting
        # A chunk of the fill value alone is written too: it may equal that value, as -0.0 and NaN do, and not its bits.
        options["config"] = {"write_empty_chunks": True}
        return zarr.create_array(self.path, name=str(level), shape=shape, chunks=chunks, **options)

    def attributes(self) -> dict[str, Any]:
        """The root's attributes: the input's, with the levels as they are now."""
        kept = dict(self.new.metadata.attributes)
        image = {name: value for name, value in self.image.items() if name != "datasets"}
        if not image:
            image = {"name": self.path.name.split(".")[0], "axes": self._new_axes(), "type": "mean"}
        image["datasets"] = [
            {"path": str(level), "coordinateTransformations": self._transforms(level)}
            for level in range(len(self.shapes))
        ]
        if self.new.metadata.kind != "zarr":
            kept = {"attributes": kept} if kept else {}
            if self.new.metadata.description:
                kept["description"] = self.new.metadata.description
        if self.new.provenance:
            kept[NOTES] = self.new.notes()
        if self.version == 3:
            return {**kept, "ome": {"version": "0.5", **kept.get("ome", {}), "multiscales": [image]}}
        return {**kept, "multiscales": [{"version": "0.4", **image}]}

    def _new_axes(self) -> list[dict[str, str]]:
        unit = {"unit": self.new.metadata.unit} if self.new.metadata.unit else {}
        lead = [{"name": "t", "type": "time"}, {"name": "c", "type": "channel"}][-self.lead :] if self.lead else []
        return [*lead, *({"name": name, "type": "space", **unit} for name in "zyx"[-self.new.ndim :])]

    def _transforms(self, level: int) -> list[dict[str, Any]]:
        """The input's scale and translation, moved to the region and to the middle of the voxels that became one."""
        lead, ndim = self.lead, self.new.ndim
        given: Mapping[str, Any] = (self.image.get("datasets") or [{}])[0]
        size = None if self.image else self.new.metadata.voxel_size
        scale = transform_of(given, "scale") or [1.0] * lead + [*(size or (1.0, 1.0, 1.0))][-ndim:]
        translation = transform_of(given, "translation")
        shift = translation or [0.0] * (lead + ndim)
        start = [0] * lead + [*start_of(self.new.region)][-ndim:]
        factor = [1] * lead + [step**level for step in self.step[-ndim:]]
        moved = [t + s * (o + (f - 1) / 2) for t, s, o, f in zip(shift, scale, start, factor, strict=True)]
        scaled = [s * f for s, f in zip(scale, factor, strict=True)]
        transforms: list[dict[str, Any]] = [{"type": "scale", "scale": scaled}]
        if any(moved) or translation is not None:
            transforms.append({"type": "translation", "translation": moved})
        return transforms


LOSSLESS = ("blosc", "zlib", "gzip", "gz", "zstd", "lz4", "bz2", "lzma", "shuffle", "delta")


def kept_codecs(source: Any, dtype: np.dtype) -> dict[str, Any]:
    """The input's compression for an array of a type; Zarr's own where one of its codecs could change a bit."""
    same = np.dtype(source.dtype).newbyteorder("=") == dtype
    filters = tuple(source.filters or ())
    names = [_codec_name(codec) for codec in (*filters, *source.compressors)]
    if any(name not in LOSSLESS for name in names) or ("delta" in names and not (same and dtype.kind in "ui")):
        return {"fill_value": source.fill_value} if same else {}
    return {"compressors": source.compressors} | ({"filters": filters, "fill_value": source.fill_value} if same else {})


def _codec_name(codec: Any) -> str:
    return str(getattr(codec, "codec_id", None) or type(codec).__name__.lower().removesuffix("codec"))


def halve(image_YX: np.ndarray) -> np.ndarray:
    """Means of 2 x 2 voxels, of fewer at the ends of odd sides. float64 [Y, X]."""
    rows, columns = (np.arange(0, side, 2) for side in image_YX.shape)
    sums_YX = np.add.reduceat(np.add.reduceat(image_YX, rows, axis=0), columns, axis=1)
    counts = [np.minimum(2, side - starts) for side, starts in zip(image_YX.shape, (rows, columns), strict=True)]
    return np.asarray(sums_YX / np.outer(*counts))
