"""Time one Lloyd iteration by torch and by FAISS, turn about in one process.

    python scripts/bench_kmeans.py

Prints milliseconds of CPU time per iteration (median) and the ratio torch / FAISS: above 1, FAISS is faster.
This is the ground for the rule of `backend="auto"` in kvexp.stats.nearest.
"""

from __future__ import annotations

import statistics
import time

import torch

from kvexp.stats.kmeans import lloyd

ROWS, BLOCK, ROUNDS = 16_384, 8_192, 5


def main() -> None:
    """Print one line for each size."""
    print(f"{'entries':>8} {'dim':>5} {'torch ms':>9} {'faiss ms':>9} {'ratio':>6}")
    for k in (256, 1024, 4096):
        for d in (64, 128, 192, 576):
            x = torch.randn(ROWS, d, generator=torch.Generator().manual_seed(0))
            spent: dict[str, list[float]] = {"torch": [], "faiss": []}
            for round_number in range(ROUNDS + 1):
                for backend, times in spent.items():
                    start = time.process_time()
                    lloyd(lambda x=x: iter(x.split(BLOCK)), k, 1, seed=0, backend=backend, init=x[:k].clone())
                    if round_number:  # the first one pays for imports and warm-up
                        times.append((time.process_time() - start) * 1e3)
            torch_ms, faiss_ms = (statistics.median(times) for times in spent.values())
            print(f"{k:8d} {d:5d} {torch_ms:9.1f} {faiss_ms:9.1f} {torch_ms / faiss_ms:6.2f}")


if __name__ == "__main__":
    main()
