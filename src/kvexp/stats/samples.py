"""Attention-state samples on disk: more of them than fit in memory, read back in blocks.

One folder holds raw append-only files, one per layer and field, and a small JSON manifest with shapes,
dtypes and counts. Blocks are read with plain file reads, not mapped, so that resident memory does not grow
with the store.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

MANIFEST = "manifest.json"
SAMPLE_BLOCK = 4096  # rows per read of a random subset
_NUMPY = {"float16": np.float16, "float32": np.float32, "float64": np.float64}
_TORCH = {"float16": torch.float16, "float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class Field:
    """Shape of one sample of a field, and the dtype it has on disk."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def width(self) -> int:
        """Numbers per sample."""
        return math.prod(self.shape)


class _Part:
    """One folder of a store."""

    def __init__(self, folder: Path, fields: dict[str, Field], counts: dict[int, int]) -> None:
        self.folder, self.fields, self.counts = folder, fields, counts

    def path(self, layer: int, name: str) -> Path:
        return self.folder / f"layer{layer:03d}.{name}.bin"

    def read(self, layer: int, name: str, start: int, stop: int) -> np.ndarray:
        """Samples `start` to `stop` of a field, `[stop - start, ...]`."""
        field = self.fields[name]
        kind, path = np.dtype(_NUMPY[field.dtype]), self.path(layer, name)
        wanted = (stop - start) * field.width
        values = np.fromfile(path, kind, wanted, offset=start * field.width * kind.itemsize)
        if len(values) != wanted:
            raise OSError(f"{path} is shorter than its manifest says")
        return values.reshape(stop - start, *field.shape)

    def save(self) -> None:
        """Write the manifest; a reader sees the old one or the new one, never half of it."""
        manifest = {
            "format": 1,
            "fields": {n: {"shape": list(f.shape), "dtype": f.dtype} for n, f in self.fields.items()},
            "counts": {str(layer): n for layer, n in self.counts.items()},
        }
        temporary = self.folder / f".{MANIFEST}.{os.getpid()}"
        temporary.write_text(json.dumps(manifest), encoding="utf-8")
        os.replace(temporary, self.folder / MANIFEST)

    @classmethod
    def load(cls, folder: Path) -> _Part:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        fields = {n: Field(tuple(f["shape"]), f["dtype"]) for n, f in manifest["fields"].items()}
        return cls(folder, fields, {int(layer): n for layer, n in manifest["counts"].items()})


class SampleStore:
    """Samples of trace tokens, per layer: q, a, s and whatever further fields it was created with.

    Made by `create` (append, then `close`), or by `open` / `merge` (read only). Samples keep the order in
    which they were appended; in a merged store the folders follow each other in the order given.
    """

    def __init__(self, parts: Sequence[_Part], writable: bool) -> None:
        """Not for callers: use `create`, `open` or `merge`."""
        self._parts, self._writable = list(parts), writable
        self.fields = self._parts[0].fields
        self.layers = tuple(self._parts[0].counts)

    @classmethod
    def create(
        cls,
        folder: str | Path,
        layers: Sequence[int],
        fields: Mapping[str, tuple[int, ...]],
        dtype: torch.dtype = torch.float16,
        full: Collection[str] = ("s",),
    ) -> SampleStore:
        """Start a store in a new or empty folder.

        `fields` gives the shape of one sample, such as `{"q": (Hq, D), "a": (Hq, Dv), "s": (Hq,)}`. They are
        stored in `dtype` (float16, float32 or float64), those named in `full` in float32 at least: a
        log-sum-exp of 60 to 100 needs more digits than float16 has. Raises FileExistsError when the folder
        holds anything.
        """
        kind = str(dtype).removeprefix("torch.")
        if kind not in _NUMPY:
            raise ValueError(f"samples are stored as {', '.join(_NUMPY)}, not {kind}")
        exact = "float64" if kind == "float64" else "float32"
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise FileExistsError(f"the folder for samples is not empty: {folder}")
        described = {n: Field(tuple(shape), exact if n in full else kind) for n, shape in fields.items()}
        part = _Part(folder, described, {layer: 0 for layer in layers})
        for layer in layers:
            for name in described:
                part.path(layer, name).touch()
        part.save()
        return cls([part], writable=True)

    @classmethod
    def open(cls, folder: str | Path) -> SampleStore:
        """Open a closed or flushed store to read it."""
        return cls.merge([folder])

    @classmethod
    def merge(cls, folders: Sequence[str | Path]) -> SampleStore:
        """Open several stores with the same layers and fields as one, in the order given (rank by rank)."""
        parts = [_Part.load(Path(folder)) for folder in folders]
        for part in parts[1:]:
            if part.fields != parts[0].fields or part.counts.keys() != parts[0].counts.keys():
                raise ValueError(f"{part.folder} has other layers or fields than {parts[0].folder}")
        return cls(parts, writable=False)

    def append(self, layer: int, **tensors: Tensor) -> None:
        """Add n samples to a layer: every field of the store, each `[n, ...]`, on any device.

        Raises ValueError, and writes nothing, when a value is NaN or infinite or too large for its dtype on
        disk.
        """
        if not self._writable:
            raise ValueError("this store is closed or was opened to read")
        if tensors.keys() != self.fields.keys():
            raise ValueError(f"the fields of a sample are {sorted(self.fields)}, not {sorted(tensors)}")
        rows = {len(tensor) for tensor in tensors.values()}
        if len(rows) != 1:
            raise ValueError(f"the fields of layer {layer} have different numbers of samples: {sorted(rows)}")
        part = self._parts[0]
        packed = {n: _packed(t, self.fields[n], f"{n} of layer {layer}") for n, t in tensors.items()}
        for name, values in packed.items():
            with part.path(layer, name).open("ab") as file:
                file.write(values.data)
        part.counts[layer] += rows.pop()

    def flush(self) -> None:
        """Write the manifest, so that what was appended so far can be read by others."""
        if self._writable:
            self._parts[0].save()

    def close(self) -> None:
        """Flush, and refuse further samples; reading goes on."""
        self.flush()
        self._writable = False

    def count(self, layer: int) -> int:
        """Samples of a layer."""
        return sum(part.counts[layer] for part in self._parts)

    def nbytes(self) -> int:
        """Bytes of all samples on disk."""
        row = sum(f.width * np.dtype(_NUMPY[f.dtype]).itemsize for f in self.fields.values())
        return row * sum(self.count(layer) for layer in self.layers)

    def blocks(
        self, layer: int, size: int, fields: Sequence[str] | None = None, rows: range | None = None
    ) -> Iterator[dict[str, Tensor]]:
        """Read a layer in order, or some neighbouring `rows` of it, `size` samples at a time.

        Yields each wanted field as `[n, ...]`, float32 on the CPU (float64 where stored so). The last block
        may be shorter. Blocks run on across the folders of a merged store: they do not depend on how samples
        were divided among ranks.
        """
        names, rows = list(fields or self.fields), range(self.count(layer)) if rows is None else rows
        for start in range(rows.start, rows.stop, size):
            stop = min(start + size, rows.stop)
            yield {name: self._read(layer, name, start, stop) for name in names}

    def sample(self, layer: int, n: int, seed: int, fields: Sequence[str] | None = None) -> dict[str, Tensor]:
        """Draw `n` samples of a layer uniformly without replacement, in stored order.

        Draws all if there are fewer. Layers with the same count get the same choice from the same seed.
        Raises ValueError on an empty layer.
        """
        names, total = list(fields or self.fields), self.count(layer)
        if not total:
            raise ValueError(f"layer {layer} has no samples")
        chosen = np.sort(np.random.default_rng(seed).choice(total, min(n, total), replace=False))
        found: dict[str, list[Tensor]] = {name: [] for name in names}
        for start in range(0, total, SAMPLE_BLOCK):
            stop = min(start + SAMPLE_BLOCK, total)
            inside = torch.from_numpy(chosen[np.searchsorted(chosen, start) : np.searchsorted(chosen, stop)])
            for name in names if len(inside) else ():
                found[name].append(self._read(layer, name, start, stop)[inside - start])
        return {name: torch.cat(pieces) for name, pieces in found.items()}

    def _read(self, layer: int, name: str, start: int, stop: int) -> Tensor:
        """Samples `start` to `stop` of a field, counted over all parts."""
        pieces: list[Tensor] = []
        first = 0
        for part in self._parts:
            low, high = max(start - first, 0), min(stop - first, part.counts[layer])
            if low < high:
                pieces.append(torch.from_numpy(part.read(layer, name, low, high)))
            first += part.counts[layer]
        values = torch.cat(pieces)
        return values if values.dtype == torch.float64 else values.float()


def _packed(tensor: Tensor, field: Field, what: str) -> np.ndarray:
    """The tensor as a contiguous array in its disk dtype, checked; `what` names it in errors."""
    if tuple(tensor.shape[1:]) != field.shape:
        raise ValueError(f"{what} has shape {tuple(tensor.shape[1:])} per sample, not {field.shape}")
    if not torch.isfinite(tensor).all():
        raise ValueError(f"{what} holds NaN or an infinity")
    packed = tensor.detach().to("cpu", _TORCH[field.dtype]).contiguous()
    if not torch.isfinite(packed).all():
        worst = tensor.flatten()[tensor.abs().argmax()].item()
        raise ValueError(f"{what} holds {worst:.6g}, too large for {field.dtype}; store samples as float32")
    return packed.numpy()
