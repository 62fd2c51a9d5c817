"""What queries look like before RoPE: their mean, size and spread in each rotary band, for each query head.

Measured on any text, forward only, and kept as safetensors with a manifest; a memory of another model is
refused with a sentence. The numbers depend on neither method, budget nor context.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import load_file, save_file

from kvexp.attention import families
from kvexp.attention.bands import Bands, bands
from kvexp.attention.function import Call
from kvexp.errors import UserError
from kvexp.methods import artefact
from kvexp.methods.eviction.listen import ListeningLayer, listen, rows
from kvexp.methods.memory.prepare import dims, weights
from kvexp.methods.memory.states import refuse_mismatch
from kvexp.stats.moments import NAMES, Moments, MomentSums

SUMS = "query_sums.safetensors"


@dataclass
class QueryStatistics:
    """Moments [Hq, F] of the queries of each full-attention layer, with the bands that they are seen in."""

    FORMAT: ClassVar[int] = 1  # of the files and of how they are made; part of the fingerprint

    layers: dict[int, Moments]
    bands: dict[int, Bands]
    manifest: dict[str, Any] = field(default_factory=dict)

    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(moments.nbytes() for moments in self.layers.values())

    def to(self, device: torch.device | str) -> QueryStatistics:
        """Move every tensor to a device."""
        self.layers = {index: moments.to(device) for index, moments in self.layers.items()}
        return self

    def concentrations(self) -> list[float]:
        """Return for each layer, in order, the share of the queries' size that their mean keeps, 0 to 1.

        sum |E q_f| / sum E|q_f| over heads and bands, numbers that do not rotate among them.
        """
        found = []
        for index in sorted(self.layers):
            moments = self.layers[index]
            kept = moments.mean.abs().sum() + moments.still_mean.abs().sum()
            found.append(float(kept / (moments.magnitude.sum() + moments.still_magnitude.sum())))
        return found

    def save(self, folder: Path) -> None:
        """Write memory.safetensors and manifest.json into `folder`, each whole or not at all."""
        tensors = _flat(self.layers) | {f"{i}.inv_freq": b.inv_freq for i, b in self.bands.items()}
        described = {
            str(i): {"scaling": b.scaling, "last": b.last, "before": b.before, "after": b.after}
            for i, b in self.bands.items()
        }
        artefact.write(folder, tensors, {**self.manifest, "format": self.FORMAT, "bands": described})

    @classmethod
    def load(cls, folder: Path, expected: dict[str, Any]) -> QueryStatistics:
        """Read statistics; UserError if damaged, or measured on something else than `expected` says."""
        tensors, manifest = artefact.read(folder, {**expected, "format": cls.FORMAT})
        described = {int(i): facts for i, facts in manifest.pop("bands").items()}
        found = {i: Bands(tensors.pop(f"{i}.inv_freq"), **facts) for i, facts in described.items()}
        return cls(_layers(tensors), found, manifest)


def prepare(model: Any, calibration: Any) -> QueryStatistics:
    """Measure the queries of `calibration.traces`, segments of a text, each read on its own.

    Every token counts once. Raises UserError when there is no text, or no layer that attends to all of it.
    """
    families.require_full_layer(model.config.get_text_config())
    segments = calibration.traces
    if not segments or not all(map(len, segments)):
        raise UserError(
            "query statistics are measured on text, and there is none, or a part without tokens: pass others"
        )
    meter = QueryMeter(model)
    calibration.run(meter, segments, "measuring queries")
    meter.save(calibration.folder)
    total = QueryMeter(model)
    for folder in calibration.shards():
        total.merge(folder)
    manifest = {
        "context": calibration.context.key,
        "calibration_segments": len(segments),
        "calibration_tokens": sum(map(len, segments)),
        **identity(model),
    }
    layers = {index: sums.moments() for index, sums in sorted(total.sums.items())}
    return QueryStatistics(layers, {index: bands(model, index) for index in layers}, manifest)


class QueryMeter:
    """Sums over the queries of every full-attention layer; called with batches of segments."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.sums: dict[int, MomentSums] = {}
        self._bands: dict[int, Bands] = {}

    def __call__(self, segments: list[Any]) -> None:
        """Measure one batch."""
        listen(self.model, segments, self.hear)

    def hear(self, layer: ListeningLayer, call: Call) -> None:
        """Count the real queries of one call."""
        index, query = call.layer_index, call.query_pre
        assert query is not None
        if index not in self._bands:
            self._bands[index] = bands(self.model, index)
        turning, still = self._bands[index].tapped(rows(query, layer.real(call)))
        self.sums.setdefault(index, MomentSums()).add(turning, still)

    def save(self, folder: Path) -> None:
        """Write the sums for other processes."""
        folder.mkdir(parents=True, exist_ok=True)
        sums = {index: part.sums for index, part in self.sums.items() if part.sums is not None}
        counts = {f"{index}.count": torch.tensor(part.count) for index, part in self.sums.items()}
        save_file({name: x.cpu().contiguous() for name, x in (_flat(sums) | counts).items()}, folder / SUMS)

    def merge(self, folder: Path) -> None:
        """Add the sums that another process wrote."""
        tensors = load_file(folder / SUMS)
        counts = {
            int(name.partition(".")[0]): int(tensors.pop(name)) for name in [*tensors] if "count" in name
        }
        for index, sums in _layers(tensors).items():
            other = MomentSums()
            other.count, other.sums = counts[index], sums
            mine = self.sums.setdefault(index, MomentSums())
            mine.merge(other)


def identity(model: Any) -> dict[str, Any]:
    """What statistics must have been measured on to serve this model."""
    config = model.config.get_text_config()
    sizes = "/".join(map(str, dims(model)))
    return {
        "architecture": f"{config.model_type}, {config.num_hidden_layers} layers, heads {sizes}",
        "dtype": str(model.dtype),
        "rope": json.loads(json.dumps(getattr(config, "rope_parameters", None))),
        "weights": weights(model),
    }


def refuse_other(memory: Any, model: Any) -> None:
    """Raise UserError where `memory` is none, or was measured on another model."""
    if not isinstance(memory, QueryStatistics):
        raise UserError(
            "this method needs query statistics: pass memory=method.prepare(model, calibration, budget)"
        )
    refuse_mismatch(memory.manifest, identity(model))


def _flat(layers: dict[int, Moments]) -> dict[str, torch.Tensor]:
    return {f"{i}.{name}": x for i, moments in layers.items() for name, x in moments.tensors().items()}


def _layers(tensors: dict[str, torch.Tensor]) -> dict[int, Moments]:
    indices = sorted({int(name.partition(".")[0]) for name in tensors})
    return {i: Moments.of({name: tensors[f"{i}.{name}"] for name in NAMES}) for i in indices}
