from __future__ import annotations

from itertools import islice

import pytest
import torch

import helpers
from kvexp.errors import UserError


def test_steps_are_those_of_the_model(part, words) -> None:
    """Tokens fed one by one behind a prompt leave the logits of one forward over all of them."""
    one = part("decoder").Decoder(["method=full", *words]).read(20)
    ids = [*islice(one.text(), 20)]
    with one.attached():
        for _ in range(3):
            ids.append(int(one.logits.argmax()))
            one.step()
    torch.testing.assert_close(one.logits[0], helpers.plain_logits(one.model, ids)[-1], atol=2e-4, rtol=1e-4)
    assert (one.cache.seen, one.rows()) == (23, 23)


def test_held_bytes_are_those_of_buffers(part, words) -> None:
    """19 rows are read, and the 20th finds room for 20 + 64: 84 in 3 layers and 2 heads, 16 numbers each."""
    one = part("decoder").Decoder(["method=full", *words]).read(20)
    assert one.held() == 84 * 3 * 2 * 16 * 2 * 4
    assert one.cache.nbytes() == 20 * 3 * 2 * 16 * 2 * 4


def test_prompts_of_a_batch_differ(part, words) -> None:
    one = part("decoder").Decoder(["method=full", *words]).read(20, count=3)
    assert one.cache.batch == 3
    assert not torch.equal(one.logits[0], one.logits[1])


def test_cells_take_turns(part, words) -> None:
    decoding = part("decoder")
    cells = {
        name: decoding.Decoder([f"method={name}", "budget=24", *words]).read(24) for name in ("full", "h2o")
    }
    watch = decoding.in_turn(cells, 3)
    assert [watch.count(name) for name in cells] == [3, 3]
    assert [one.rows() for one in cells.values()] == [27, 24]
    assert watch.percentiles("h2o") is not None


def test_numbers_are_told_from_words(part) -> None:
    numbers_of, known = part("decoder").numbers_of, {"bytes": 1, "steps": 2}
    words = ["memory", "bytes=64M", "model=tiny-llama"]
    assert numbers_of(words, known) == ({"bytes": 64 << 20, "steps": 2}, ["memory", "model=tiny-llama"])
    assert numbers_of(["steps=3k", "bytes=7"], known)[0] == {"bytes": 7, "steps": 3072}
    for word in ("steps=", "steps=many", "steps=M", "steps=0", "steps=-1"):
        with pytest.raises(UserError, match="no number above 0: write steps=2"):
            numbers_of([word], known)
