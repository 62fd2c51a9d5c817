"""Triton's kernels run on the GPU where there is one; elsewhere Triton interprets them on CPU tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

# Products of bfloat16 are wrong in Triton's interpreter, so that only a GPU is asked for them.
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if torch.cuda.is_available() else [])]


@pytest.fixture(params=DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """Each dtype that kernels are held to here."""
    return request.param


@pytest.fixture
def device() -> str:
    """Where kernels run; skips where they cannot."""
    triton = pytest.importorskip("triton")
    if torch.cuda.is_available():
        return "cuda"
    if isinstance(triton.language.max, triton.JITFunction):
        pytest.skip("triton was imported before TRITON_INTERPRET=1 was set: set it when pytest starts")
    return "cpu"


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fill new tensors with NaN (integers: with their largest value), so that what is not written shows."""

    def dirty(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def made(*args: Any, **kwargs: Any) -> torch.Tensor:
            x = make(*args, **kwargs)
            if x.dtype == torch.bool:
                return x
            return x.fill_(torch.nan if x.is_floating_point() else torch.iinfo(x.dtype).max)

        return made

    for holder, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(holder, name, dirty(getattr(holder, name)))
    yield
