"""Peak resident memory of ASM's calibration at 500 and at 5,000 traces: it must not grow with their number.

    python scripts/asm_streaming.py data_dir=PATH [task.context_tokens=1024] [budget=256] [...]

Each size runs in a process of its own (`python -m kvexp method=asm task=banking77 limit=4`), whose peak is
read when it ends. The words are those of `python -m kvexp`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time

SIZES = (500, 5000)


def main(words: list[str]) -> int:
    """Run the sizes in turn and print what each took."""
    peaks = []
    for size in SIZES:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "kvexp", "method=asm", "task=banking77", "budget=256", "limit=4"]
            command += [
                "calibration.labels=gold",
                f"calibration.n={size}",
                f"output_dir={folder}",
                "logger=none",
            ]
            start = time.perf_counter()
            process = subprocess.Popen([*command, *words])
            _, status, usage = os.wait4(process.pid, 0)
            if status:
                return 1
            peaks.append(usage.ru_maxrss / 1024)
            seconds = time.perf_counter() - start
            print(f"{size} traces: peak {peaks[-1]:.0f} MiB, {seconds:.0f} s", flush=True)
    print(f"ratio of peaks: {peaks[1] / peaks[0]:.3f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
