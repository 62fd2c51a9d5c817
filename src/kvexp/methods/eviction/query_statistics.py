"""What queries look like before RoPE: their mean, size and spread in each rotary band, for each query head.

Measured on any text, forward only, and kept as safetensors with a manifest; a memory of another model is
refused with a sentence. The numbers depend on neither method, budget nor context.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
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
from kvexp.methods.eviction.reconstruction import HeldOut, sampled
from kvexp.methods.memory.prepare import dims, weights
from kvexp.methods.memory.states import refuse_mismatch
from kvexp.stats.moments import NAMES, Moments, MomentSums

SUMS = "query_sums.safetensors"
HELD_OUT = 8  # one segment of so many is held out where means are tested on text that they have not seen


@dataclass
class QueryStatistics:
    """Moments [Hq, F] of the queries of each full-attention layer, with the bands that they are seen in.

    `reconstruction`: r [Hq] of each layer, how well the means of most of the text foretell the logits of the
    rest (`kvexp.methods.eviction.reconstruction`); {} where nobody asked.
    """

    FORMAT: ClassVar[int] = 1  # of the files and of how they are made; part of the fingerprint

    layers: dict[int, Moments]
    bands: dict[int, Bands]
    manifest: dict[str, Any] = field(default_factory=dict)
    reconstruction: dict[int, torch.Tensor] = field(default_factory=dict)

    def nbytes(self) -> int:
        """Bytes of all tensors."""
        of_moments = sum(moments.nbytes() for moments in self.layers.values())
        return of_moments + sum(r.nbytes for r in self.reconstruction.values())

    def to(self, device: torch.device | str | Sequence[torch.device]) -> QueryStatistics:
        """Move every tensor to a device, or to that of its layer among several."""
        for index, moments in self.layers.items():
            place = device if isinstance(device, torch.device | str) else device[index]
            self.layers[index] = moments.to(place)
        return self

    def concentrations(self) -> list[float]:
        """Return for each layer, in order, the share of the queries' size that their mean keeps, 0 to 1.

        sum |E q_f| / sum E|q_f| over heads and bands, numbers that do not rotate among them.
        """
        return [1 - self.unlike("concentration", index, 1)[0] for index in sorted(self.layers)]

    def unlike(self, kind: str, index: int, parts: int) -> list[float]:
        """Return how little the mean says of each of `parts` equal groups of a layer's query heads.

        1 - R, with R as in `concentrations` over the group's heads (`kind` concentration), or 1 - r, with r
        the mean of its heads (`reconstruction`).
        """
        if kind == "reconstruction":
            r = self.reconstruction[index]
            return (1 - r.double().unflatten(0, (parts, -1)).mean(-1)).tolist()
        moments = self.layers[index]
        kept = moments.mean.abs().sum(-1) + moments.still_mean.abs().sum(-1)
        size = moments.magnitude.sum(-1) + moments.still_magnitude.sum(-1)
        kept, size = (x.unflatten(0, (parts, -1)).sum(-1) for x in (kept, size))
        return (1 - kept / size).tolist()

    def save(self, folder: Path) -> None:
        """Write memory.safetensors and manifest.json into `folder`, each whole or not at all."""
        tensors = _flat(self.layers) | {f"{i}.inv_freq": b.inv_freq for i, b in self.bands.items()}
        tensors |= {f"{i}.reconstruction": r for i, r in self.reconstruction.items()}
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
        r = {i: tensors.pop(f"{i}.reconstruction") for i in found if f"{i}.reconstruction" in tensors}
        return cls(_layers(tensors), found, manifest, r)


def prepare(model: Any, calibration: Any, reconstruction: bool = False) -> QueryStatistics:
    """Measure the queries of `calibration.traces`, segments of a text, each read on its own.

    Every token counts once. With `reconstruction`, means of all but the last segments (an eighth, one at
    least) are first compared with the logits of these. Raises UserError when there is no text, or no layer
    that attends to all of it, or no second segment to compare with.
    """
    families.require_full_layer(model.config.get_text_config())
    segments = calibration.traces
    if not segments or not all(map(len, segments)):
        raise UserError(
            "query statistics are measured on text, and there is none, or a part without tokens: pass others"
        )
    known = len(segments) - (_held_out(segments) if reconstruction else 0)
    total = QueryMeter(model)
    for folder in calibration.collect(partial(QueryMeter, model), segments[:known], "measuring queries"):
        total.merge(folder)
    r = _tested(total, segments[known:]) if reconstruction else {}
    manifest = {
        "context": calibration.context.key,
        "calibration_segments": len(segments),
        "calibration_tokens": sum(map(len, segments)),
        **({"reconstruction": True} if reconstruction else {}),
        **identity(model),
    }
    return QueryStatistics(total.layers(), total.all_bands(), manifest, r)


def _held_out(segments: Sequence[Any]) -> int:
    """Return how many segments are kept from the means that are tested."""
    count = max(1, len(segments) // HELD_OUT)
    if len(segments) < 2 or not any(sampled(len(segment)) for segment in segments[-count:]):
        raise UserError(
            "reconstruction is measured on text that the means have not seen, and there is one segment alone,"
            " or none with 3 tokens behind it: set calibration.segment to less, or calibration.tokens to more"
        )
    return count


@torch.no_grad()
def _tested(total: QueryMeter, texts: Iterable[Any]) -> dict[int, torch.Tensor]:
    """Return r [Hq] of each layer on `texts`, whose queries are counted as well."""
    compared, late = HeldOut(total.layers(), total.all_bands()), QueryMeter(total.model)

    def hear(layer: ListeningLayer, call: Call) -> None:
        compared.hear(layer, call)
        late.hear(layer, call)

    for text in texts:
        compared.start(text)
        listen(total.model, [text], hear)
    for index, sums in late.sums.items():
        total.sums[index].merge(sums)
    return compared.correlations()


class QueryMeter:
    """Sums over the queries of every full-attention layer; called with batches of segments."""

    def __init__(self, model: Any, folder: Path | None = None) -> None:
        """Start empty; `folder` is where the sums go in the end, for other processes."""
        self.model, self.folder = model, folder
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

    def layers(self) -> dict[int, Moments]:
        """Return the moments so far, by layer."""
        return {index: sums.moments() for index, sums in sorted(self.sums.items())}

    def all_bands(self) -> dict[int, Bands]:
        """Return the bands of the same layers."""
        return {index: bands(self.model, index) for index in sorted(self.sums)}

    def close(self) -> None:
        """Write the sums into the folder."""
        assert self.folder is not None
        self.folder.mkdir(parents=True, exist_ok=True)
        sums = {index: part.sums for index, part in self.sums.items() if part.sums is not None}
        counts = {f"{index}.count": torch.tensor(part.count) for index, part in self.sums.items()}
        save_file(
            {name: x.cpu().contiguous() for name, x in (_flat(sums) | counts).items()}, self.folder / SUMS
        )

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


def refuse_other(memory: Any, model: Any, reconstruction: bool = False) -> None:
    """Raise UserError where `memory` is none, was measured on another model, or lacks `reconstruction`."""
    if not isinstance(memory, QueryStatistics):
        raise UserError(
            "this method needs query statistics: pass memory=method.prepare(model, calibration, budget)"
        )
    refuse_mismatch(memory.manifest, identity(model))
    if reconstruction and not memory.reconstruction:
        raise UserError(
            "budgets by reconstruction need statistics that say how well means foretell logits, and these do"
            " not: prepare them with the method that uses them"
        )


def _flat(layers: dict[int, Moments]) -> dict[str, torch.Tensor]:
    return {f"{i}.{name}": x for i, moments in layers.items() for name, x in moments.tensors().items()}


def _layers(tensors: dict[str, torch.Tensor]) -> dict[int, Moments]:
    indices = sorted({int(name.partition(".")[0]) for name in tensors})
    return {i: Moments.of({name: tensors[f"{i}.{name}"] for name in NAMES}) for i in indices}
