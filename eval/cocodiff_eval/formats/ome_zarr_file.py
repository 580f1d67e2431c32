"""OME-Zarr stores of results: level 0 in chunks of one slice, smaller levels when all slices are there."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from itertools import product
from typing import Any, Literal

import numpy as np

from cocodiff.files import flush
from cocodiff_eval.formats.ngff import level_names, transform_of
from cocodiff_eval.formats.ome_zarr import open_node
from cocodiff_eval.formats.tiff_metadata import NOTES
from cocodiff_eval.formats.volume import VolumeFile, plain, writing

SMALLEST_LEVEL = 256  # voxels on the longer side of the last level
LABELS = "labels"  # the group of label images beside the levels
CHUNK_SIDE = 1024  # of an input that is in no chunks


class ZarrFile(VolumeFile):
    """A store with one multiscale image in its root: of a Zarr input in its version, with its axes, compression and
    attributes, else in NGFF 0.4, which most tools read.

    A chunk holds voxels of one slice, so that no two processes write the same one.
    """

    def _create(self) -> None:
        import zarr

        zarr.create_group(self.path, zarr_format=self.zarr_format, attributes=self._attributes(1))
        self._make_level(0, self._stored_shape(self.shape))

    def write(self, index: int, image_YX: np.ndarray) -> None:
        self._check(image_YX)
        self._put(self._level(0), self._name(0), index, image_YX)

    def read(self, index: int) -> np.ndarray:
        return self._get(self._level(0), index)

    def finish(self) -> None:
        import zarr

        with writing(self.path):
            for unfinished in self.path.rglob("*.partial"):  # of a run that was killed while it wrote
                unfinished.unlink()
            shapes = self._level_shapes()
            for level in range(1, len(shapes)):
                self._make_level(level, self._stored_shape(shapes[level]), overwrite=True)
                smaller, larger = self._level(level), self._level(level - 1)
                for index in range(shapes[level][0]):
                    halved = self._mean(larger, shapes[level - 1][0], index)
                    self._put(smaller, self._name(level), index, halved)
            zarr.open_group(self.path, mode="r+").attrs.put(self._attributes(len(shapes)))

    def _mean(self, larger: Any, slices: int, index: int) -> np.ndarray:
        """A slice of the next level [Y, X]: means of up to 2 x 2 x 2 voxels, fewer at the ends of odd sides."""
        step = self._step[0]
        together = range(step * index, min(step * (index + 1), slices))
        images = [halve(self._get(larger, one).astype(np.float64)) for one in together]
        mean_YX = sum(images[1:], images[0]) / len(images)
        return (np.rint(mean_YX) if self.dtype.kind in "ui" else mean_YX).astype(self.dtype)

    @cached_property
    def _source(self) -> Any:
        """The input's level 0, where the input is Zarr."""
        if self.metadata.kind != "zarr":
            return None
        details = self.metadata.details
        return open_node(details["store"], "/".join(filter(None, [details["inner"], details["level"]])))

    @property
    def zarr_format(self) -> Literal[2, 3]:
        """The version of Zarr that the store is written in."""
        return 3 if self._source is not None and self._source.metadata.zarr_format == 3 else 2

    @property
    def _lead(self) -> int:
        return int(self.metadata.details["lead"]) if self.metadata.kind == "zarr" else 0

    @property
    def _image(self) -> Mapping[str, Any]:
        """What the input says of its multiscale image; empty where it is none."""
        return self.metadata.details["image"] if self.metadata.kind == "zarr" else {}

    @property
    def _step(self) -> tuple[int, int, int]:
        """How many slices, rows and columns become one in the next level: where the input keeps its slices, so does
        the result."""
        levels = self.metadata.details.get("levels", ()) if self.metadata.kind == "zarr" else ()
        slices = [level[-3] for level in levels[:2] if len(level) > 2]
        whole = len(slices) == 2 and slices[0] == slices[1] > 1
        return (1, 2, 2) if whole or self.ndim == 2 else (2, 2, 2)

    def _level_shapes(self) -> list[tuple[int, int, int]]:
        """[N, Y, X] of every level: as many as the input has, or until the longer side is SMALLEST_LEVEL or less."""
        given = len(self.metadata.details.get("levels", ())) if self.metadata.kind == "zarr" else 0
        shapes = [self.shape]
        while len(shapes) < given if given > 1 else max(shapes[-1][1:]) > SMALLEST_LEVEL:
            n, y, x = (-(-side // step) for side, step in zip(shapes[-1], self._step, strict=True))
            if (n, y, x) == shapes[-1]:
                break
            shapes.append((n, y, x))
        return shapes

    def _stored_shape(self, shape: tuple[int, int, int]) -> tuple[int, ...]:
        return (1,) * self._lead + shape[-self.ndim :]

    def _name(self, level: int) -> str:
        return self._names[level]

    @cached_property
    def _names(self) -> list[str]:
        """The paths of all levels: the input's own where it has one."""
        there = len(self.metadata.details.get("levels", ())) if self._image else 0
        return level_names(self._image.get("datasets", ())[:there], len(self._level_shapes()), [LABELS])

    def _level(self, level: int) -> Any:
        return self._level0 if level == 0 else self._open(level)

    @cached_property
    def _level0(self) -> Any:
        return self._open(0)

    def _open(self, level: int) -> Any:
        import zarr

        # A chunk of the fill value alone is written too: it may equal that value, as -0.0 and NaN do, and not its bits.
        with zarr.config.set({"array.write_empty_chunks": True}):
            return zarr.open_array(self.path, path=self._name(level), mode="r+")

    def _make_level(self, level: int, shape: tuple[int, ...], overwrite: bool = False) -> None:
        import zarr

        source, version = self._source, self.zarr_format
        big = self.metadata.byteorder == ">"
        options: dict[str, Any] = {}
        chunks = (CHUNK_SIDE, CHUNK_SIDE)
        if source is not None:
            chunks = source.chunks[-2:]
            options = kept_codecs(source, self.dtype)
            if version == 3:
                options["dimension_names"] = source.metadata.dimension_names
        if version == 3:
            from zarr.codecs import BytesCodec

            one_byte = self.dtype.itemsize == 1
            options["serializer"] = BytesCodec(endian=None if one_byte else "big" if big else "little")
        else:
            options["chunk_key_encoding"] = {"name": "v2", "separator": "/"}
        fitting = tuple(min(chunk, side) for chunk, side in zip(chunks, shape[-2:], strict=True))
        attributes = plain(source.attrs.asdict()) if source is not None and level == 0 else {}
        zarr.create_array(
            self.path,
            name=self._name(level),
            shape=shape,
            dtype=self.dtype if version == 3 else self._stored,
            chunks=(1,) * (len(shape) - 2) + fitting,
            zarr_format=version,
            attributes=attributes,
            overwrite=overwrite,
            **options,
        )

    def _put(self, array: Any, name: str, index: int, image_YX: np.ndarray) -> None:
        place = (0,) * self._lead + ((index,) if self.ndim == 3 else ())
        array[place if place else ...] = image_YX
        encode = array.metadata.encode_chunk_key
        counts = [-(-side // chunk) for side, chunk in zip(image_YX.shape, array.chunks[-2:], strict=True)]
        for cell in product(*map(range, counts)):
            flush(self.path / name / encode((*place, *cell)))

    def _get(self, array: Any, index: int) -> np.ndarray:
        place = (0,) * self._lead + ((index,) if self.ndim == 3 else ())
        return np.asarray(array[place if place else ...]).astype(self.dtype)

    def _attributes(self, levels: int) -> dict[str, Any]:
        """The root's attributes: the input's, with the levels as they are now."""
        kept = dict(self.metadata.attributes)
        image = {name: value for name, value in self._image.items() if name != "datasets"}
        if not image:
            image = {"name": self.path.name.split(".")[0], "axes": self._new_axes()}
            image |= {"type": "mean"}
        image["datasets"] = [
            {"path": self._name(level), "coordinateTransformations": self._transforms(level)} for level in range(levels)
        ]
        if self.metadata.kind != "zarr":
            kept = {"attributes": kept} if kept else {}
            if self.metadata.description:
                kept["description"] = self.metadata.description
        if self.provenance:
            kept[NOTES] = self.notes()
        if self.zarr_format == 3:
            return {**kept, "ome": {"version": "0.5", **kept.get("ome", {}), "multiscales": [image]}}
        return {**kept, "multiscales": [{"version": "0.4", **image}]}

    def _new_axes(self) -> list[dict[str, str]]:
        unit = {"unit": self.metadata.unit} if self.metadata.unit else {}
        lead = [{"name": "t", "type": "time"}, {"name": "c", "type": "channel"}][-self._lead :] if self._lead else []
        return [*lead, *({"name": name, "type": "space", **unit} for name in "zyx"[-self.ndim :])]

    def _transforms(self, level: int) -> list[dict[str, Any]]:
        """Scale and translation of a level: the input's of its level 0, moved to the region, and to the middle of the
        voxels that became one."""
        count = self._lead + self.ndim
        given: Mapping[str, Any] = (self._image.get("datasets") or [{}])[0]
        size = list(self.metadata.voxel_size or (1.0, 1.0, 1.0))[-self.ndim :] if not self._image else [1.0] * self.ndim
        scale = transform_of(given, "scale") or [1.0] * self._lead + size
        translation = transform_of(given, "translation")
        shift = translation or [0.0] * count
        start = [0] * self._lead + list(self.region.start if self.region is not None else (0, 0, 0))[-self.ndim :]
        factor = [1] * self._lead + [step**level for step in self._step[-self.ndim :]]
        moved = [t + s * (o + (f - 1) / 2) for t, s, o, f in zip(shift, scale, start, factor, strict=True)]
        transforms: list[dict[str, Any]] = [
            {"type": "scale", "scale": [s * f for s, f in zip(scale, factor, strict=True)]}
        ]
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
