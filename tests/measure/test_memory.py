"""Bytes of tensors and of the process."""

from __future__ import annotations

import subprocess
import sys

import torch

from kvexp.measure.memory import mib, peak_rss, tensor_bytes


def test_mib():
    assert mib(3 * 2**20) == 3.0
    assert mib(2**19) == 0.5


def test_bytes_follow_the_dtype():
    assert tensor_bytes(torch.zeros(3, 5)) == 60
    assert tensor_bytes(torch.zeros(3, 5, dtype=torch.bfloat16)) == 30
    assert (
        tensor_bytes({"a": torch.zeros(2, dtype=torch.int64), "b": [torch.zeros(3, dtype=torch.int8)]}) == 19
    )


def test_shared_storage_counts_once_and_whole():
    buffer = torch.zeros(10, 4)
    assert tensor_bytes([buffer, buffer[2:], buffer.view(-1), buffer.t()]) == 160
    assert tensor_bytes(buffer[:1]) == 160
    assert tensor_bytes(buffer[:1].clone()) == 16
    assert tensor_bytes(torch.zeros(1, 4).expand(1000, 4)) == 16
    assert tensor_bytes([buffer, torch.zeros(10, 4)]) == 320


def test_other_values_are_passed_over():
    assert tensor_bytes([None, "text", 3, torch.zeros(0), {"k": (torch.zeros(1), {1, 2})}]) == 4


def test_the_peak_of_a_process_holds_what_it_once_used_and_not_what_its_parent_used():
    ballast = bytearray(300 * 2**20)
    code = """
from kvexp.measure.memory import peak_rss
before = peak_rss()
block = bytearray(64 * 2**20)
del block
print(before, peak_rss())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    before, after = map(int, done.stdout.split())
    assert 60 * 2**20 < after - before < 96 * 2**20  # the kernel counts pages in lots
    assert before < 150 * 2**20
    assert peak_rss() > len(ballast)
