"""First and second moments of vectors whose numbers are seen in rotary bands: sums that shards can add."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvexp.attention.bands import wide

BLOCK = 4096  # vectors whose float64 features stand in memory at once
NAMES = ("mean", "magnitude", "square", "still_mean", "still_magnitude", "still_square")


@dataclass(frozen=True)
class Moments:
    """Means over tokens of x_f, |x_f| and |x_f|^2, for each of H heads.

    mean [..., H, F] complex, magnitude and square [..., H, F] of the F bands; still_mean, still_magnitude and
    still_square [..., H, N] of the N numbers that do not rotate: x_j, |x_j|, x_j^2. float64 where measured.
    """

    mean: torch.Tensor
    magnitude: torch.Tensor
    square: torch.Tensor
    still_mean: torch.Tensor
    still_magnitude: torch.Tensor
    still_square: torch.Tensor

    @property
    def concentration(self) -> torch.Tensor:
        """R = |E x_f| / E|x_f| of each band, [..., H, F]: 1 where all directions agree; 0 where all is 0."""
        ratio = self.mean.abs() / self.magnitude
        return ratio.nan_to_num(0.0).clamp(max=1.0)

    @property
    def variance(self) -> torch.Tensor:
        """E|x_f - E x_f|^2 of each band, [..., H, F]."""
        return (self.square - self.mean.abs().square()).clamp(min=0.0)

    @property
    def still_variance(self) -> torch.Tensor:
        """Variance of each number that does not rotate, [..., H, N]."""
        return (self.still_square - self.still_mean.square()).clamp(min=0.0)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors by name, complex ones as two reals at the end."""
        found = {name: getattr(self, name) for name in NAMES}
        return {**found, "mean": torch.view_as_real(self.mean.resolve_conj())}

    @classmethod
    def of(cls, tensors: dict[str, torch.Tensor]) -> Moments:
        """Return the moments that `tensors` names, as written by `tensors()`."""
        values = {name: tensors[name] for name in NAMES}
        return cls(**{**values, "mean": torch.view_as_complex(tensors["mean"].contiguous())})

    def to(self, device: torch.device | str) -> Moments:
        """Return the moments on a device (float32 where it has no float64)."""
        narrow = torch.device(device).type == "mps"
        moved = {name: (x.float() if narrow else x).to(device) for name, x in self.tensors().items()}
        return Moments.of(moved)

    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(x.numel() * x.element_size() for x in self.tensors().values())


def features(turning: torch.Tensor, still: torch.Tensor) -> Moments:
    """Return the quantities that moments are means of, for each vector (a single vector's moments)."""
    sizes = turning.abs(), still.abs()
    return Moments(turning, sizes[0], sizes[0].square(), still, sizes[1], still.square())


class MomentSums:
    """Adds vectors up, in float64."""

    def __init__(self, count: int = 0, sums: Moments | None = None) -> None:
        self.count, self.sums = count, sums

    def add(self, turning: torch.Tensor, still: torch.Tensor) -> None:
        """Count vectors: turning [H, n, F] complex, still [H, n, N]."""
        for z, x in zip(turning.split(BLOCK, dim=1), still.split(BLOCK, dim=1), strict=True):
            found = features(torch.complex(wide(z.real), wide(z.imag)), wide(x))
            self._join(Moments(*(getattr(found, name).sum(1) for name in NAMES)), z.shape[1])

    def merge(self, other: MomentSums) -> None:
        """Count what another has counted."""
        if other.sums is not None:
            self._join(other.sums, other.count)

    def _join(self, sums: Moments, count: int) -> None:
        before = self.sums
        self.count += count
        self.sums = (
            sums
            if before is None
            else Moments(*(getattr(before, name) + getattr(sums, name) for name in NAMES))
        )

    def moments(self) -> Moments:
        """Return the means; ValueError when nothing was counted."""
        if self.sums is None or not self.count:
            raise ValueError("no vectors were counted")
        return Moments(*(getattr(self.sums, name) / self.count for name in NAMES))
