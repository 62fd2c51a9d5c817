"""The adapter against lm-eval's own HFLM, and what it promises about contexts, batches and refusals."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from tokenizers.processors import TemplateProcessing

from helpers import plain_logits
from kvexp import tiny
from kvexp.budget import Budget
from kvexp.errors import UserError
from kvexp.methods.baseline.full import Full
from kvexp.prompt import Context
from kvexp.tasks.adapter import KVLM, NOTHING, query_instance
from kvexp.tasks.session import Session
from kvexp.tasks.trie import Trie

TOKENIZER = tiny.tokenizer()
HEADER, CHUNKS = "Say the colour.\n", ["Q: sky\nA: blue\n", "Q: blood\nA: red\n", "Q: a leaf\nA: green\n"]
TEXTS = ["Q: coal\nA:", "Q: a much longer question about milk\nA:", "Q: x\nA:", "Q: gold\nA:"]


class Counting(Full):
    """Full attention that counts how often a context is encoded."""

    encoded: ClassVar[list[int]] = []

    def encode(self, model: Any, context: Any, memory: Any = None, budget: Any = None) -> Any:
        """Note the length of what is encoded."""
        self.encoded.append(len(context))
        return super().encode(model, context, memory, budget)


def ids(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.encode(text, add_special_tokens=False))


CONTEXT = Context(ids(HEADER), tuple(ids(chunk) for chunk in CHUNKS))
FLAT = HEADER + "".join(CHUNKS)


def build(family: str, **changes: Any) -> Any:
    return tiny.build(family, changes=changes or None)


@contextmanager
def served(model: Any, tokenizer: Any = TOKENIZER, batch_size: int = 4, method: Any = None) -> Iterator[KVLM]:
    """An adapter at work: its method is attached to the model."""
    method = method or Full()
    loaded = SimpleNamespace(model=model, tokenizer=tokenizer)
    with method.attach(model):
        yield KVLM(Session(loaded, method, None, Budget(None)), batch_size)


def hflm(model: Any, tokenizer: Any = TOKENIZER, batch_size: int = 3) -> HFLM:
    return HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)


def scoring(*pairs: tuple[str, str]) -> list[Instance]:
    return [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]


def generating(options: dict[str, Any], *prompts: str) -> list[Instance]:
    return [Instance("generate_until", {}, (prompt, options), i) for i, prompt in enumerate(prompts)]


def assert_same(ours: Sequence[Any], theirs: Sequence[Any]) -> None:
    assert [greedy for _, greedy in ours] == [greedy for _, greedy in theirs]
    torch.testing.assert_close(
        torch.tensor([value for value, _ in ours]),
        torch.tensor([value for value, _ in theirs]),
        atol=1e-4,
        rtol=0,
    )


def greedy_letter(model: Any) -> tuple[str, str]:
    """A prompt and the ASCII letter that the model would go on with."""
    for prompt in (f"Question {i}:" for i in range(200)):
        letter = TOKENIZER.decode([int(plain_logits(model, ids(prompt))[-1].argmax())])
        if letter.isascii() and letter.isprintable() and letter.strip():
            return prompt, letter
    raise AssertionError("this model prefers no letter anywhere")


@pytest.mark.parametrize("batch_size", [1, 3, 32])
@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_log_likelihoods_are_those_of_hflm(family: str, batch_size: int) -> None:
    model = build(family)
    requests = scoring(
        ("The sky is", " blue"),
        ("The", " quick brown fox jumps"),
        ("A prompt that is a good deal longer than the others, to be padded for", "!"),
        ("", "nothing before it"),
        ("trailing spaces  ", "move over"),
        ("The sky is", " green"),
        greedy_letter(model),
        ("two\nlines\n", "é and ü"),
    )
    theirs = hflm(model).loglikelihood(requests, disable_tqdm=True)
    assert [greedy for _, greedy in theirs].count(True) >= 1
    with served(model, batch_size=batch_size) as adapter:
        assert_same(adapter.loglikelihood(requests), theirs)


def test_an_over_long_prompt_is_cut_on_the_left_and_said(caplog: pytest.LogCaptureFixture) -> None:
    model = build("llama", max_position_embeddings=40)
    requests = scoring(("x" * 33 + "abc", " tail!"), ("short", " one"), ("y" * 200, "z"), ("k" * 9, "w" * 40))
    theirs = hflm(model).loglikelihood(requests, disable_tqdm=True)
    with served(model) as adapter:
        assert_same(adapter.loglikelihood(requests), theirs)
        assert [record.args for record in caplog.records if record.name == "kvexp.tasks.adapter"] == [
            (36, 35),
            (200, 40),
            (9, 1),
        ]
        with pytest.raises(UserError, match="answers of 40 tokens, and the model takes 40"):
            adapter.loglikelihood(scoring(("k", "w" * 41)))
        with pytest.raises(UserError, match="answers of 40 tokens"):
            adapter.generate_until(generating({"until": [], "max_gen_toks": 40}, "k"))


@pytest.fixture(scope="module")
def opening() -> Any:
    """A tokenizer that opens every text with BOS, as that of Llama does."""
    tokenizer = tiny.tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", tokenizer.bos_token_id)]
    )
    return tokenizer


def test_there_is_exactly_one_bos(opening: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    requests = scoring(("The sky is", " blue"), ("<|begin|>The sky is", " blue"), ("", "blue"))
    theirs = hflm(model, opening).loglikelihood(requests, disable_tqdm=True)
    prompts: list[Any] = []
    with served(model, opening) as adapter:
        run = adapter.session.run
        monkeypatch.setattr(
            adapter.session, "run", lambda context, queries: prompts.extend(queries) or run(context, queries)
        )
        assert_same(adapter.loglikelihood(requests), theirs)
        options = {"until": [], "max_gen_toks": 5}
        ours = adapter.generate_until(generating(options, "The sky is", "<|begin|>The sky is"))
    assert ours == hflm(model, opening, 1).generate_until(
        generating(options, "The sky is", "<|begin|>The sky is"), disable_tqdm=True
    )
    assert [list(prompt).count(opening.bos_token_id) for prompt in prompts] == [1] * 5


def generated(model: Any, request: Instance, monkeypatch: pytest.MonkeyPatch) -> tuple[str, list[int]]:
    """What HFLM generates for one request: its text, and the tokens before it is cut."""
    lm, seen = hflm(model, batch_size=1), []
    decode = lm.tok_decode
    monkeypatch.setattr(
        lm, "tok_decode", lambda tokens, **more: seen.append(tokens) or decode(tokens, **more)
    )
    (text,) = lm.generate_until([request], disable_tqdm=True)
    return text, seen[-1]


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "mistral", "deepseek_v3"])
def test_greedy_texts_are_those_of_hflm_token_for_token(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(family)
    free = {"until": [], "max_gen_toks": 12}
    _, tokens = generated(model, generating(free, TEXTS[0])[0], monkeypatch)
    assert len(tokens) == 12
    other, _ = generated(model, generating(free, TEXTS[1])[0], monkeypatch)
    stop = next(other[i : i + 2] for i in range(2, len(other) - 1) if "\ufffd" not in other[i : i + 2])
    requests = [
        *generating(free, *TEXTS),
        *generating({"until": [stop, "\n\n"], "max_gen_toks": 12, "do_sample": False}, *TEXTS),
        *generating({"until": stop, "max_new_tokens": 7, "temperature": 0.0}, TEXTS[1]),
        *generating({"until": ["no such stop"], "max_gen_toks": 1}, TEXTS[2]),
    ]
    model.generation_config.eos_token_id = [model.config.eos_token_id, tokens[4]]  # a second end token
    expected = [generated(model, request, monkeypatch) for request in requests]
    with served(model, batch_size=3) as adapter:
        made: list[list[int]] = []
        ends: list[str] = []
        run = adapter.continue_all

        def continue_all(*arguments: Any) -> Any:
            results = run(*arguments)
            made.extend(results[0]), ends.extend(results[1])
            return results

        monkeypatch.setattr(adapter, "continue_all", continue_all)
        assert adapter.generate_until(requests) == [text for text, _ in expected]
    assert sorted(made) == sorted(tokens for _, tokens in expected)
    assert {"eos", "stop", "length"} == set(ends)


def flat_scores(model: Any, requests: Sequence[Instance]) -> list[tuple[float, bool]]:
    """Log-likelihoods from one plain forward each, outside of any method."""
    scores = []
    for context, answer in (request.args for request in requests):
        table = plain_logits(model, ids(context + answer)).log_softmax(-1)[len(ids(context)) - 1 : -1]
        target = torch.tensor(ids(answer))
        value = table.gather(-1, target[:, None]).sum()
        scores.append((float(value), bool((table.argmax(-1) == target).all())))
    return scores


def test_a_context_apart_equals_the_flat_prompt_and_is_encoded_once() -> None:
    model = build("qwen3")
    other = Context(ids(HEADER), CONTEXT.chunks[1:])
    answers = [" black", " white", " y", " gold and more"]
    apart, flat = [], []
    for text, answer in zip(TEXTS, answers, strict=True):
        for context, before in ((CONTEXT, FLAT), (other, HEADER + "".join(CHUNKS[1:]))):
            apart.append(query_instance(context, ids(text), text, answer))
            flat += scoring((before + text, answer))
    expected = flat_scores(model, flat)
    Counting.encoded.clear()
    with served(model, batch_size=3, method=Counting()) as adapter:
        assert_same(adapter.loglikelihood(apart), expected)
        assert sorted(Counting.encoded) == [len(other), len(CONTEXT)]
        mixed = adapter.loglikelihood([flat[1], apart[0], flat[0]])
        assert_same(mixed, [expected[1], expected[0], expected[0]])
    options = {"until": ["\n"], "max_gen_toks": 6}
    for instance in apart:
        instance.arguments = (instance.args[0], options)
    prompts = [request.args[0] for request in flat]
    with served(model, batch_size=3) as adapter:
        assert adapter.generate_until(apart) == adapter.generate_until(generating(options, *prompts))


def queries(texts: Sequence[str] = TEXTS) -> list[Instance]:
    return [query_instance(CONTEXT, ids(text), text) for text in texts]


def test_labels_of_one_token_score_their_normalised_likelihood() -> None:
    model, labels = build("llama"), [ids(letter) for letter in "aBxz"]
    with served(model) as adapter:
        scores = adapter.label_scores(queries(), Trie.build(labels, end_id=ids("\n")[0]))
    rows = [plain_logits(model, CONTEXT.ids + ids(text))[-1] for text in TEXTS]
    expected = torch.stack(rows)[:, [label[0] for label in labels]].log_softmax(-1)
    torch.testing.assert_close(scores, expected, atol=1e-4, rtol=0)


def test_labels_of_several_tokens_score_as_by_brute_force() -> None:
    """A label pays at each token where another label would go on differently, its end included."""
    model, end = build("llama"), ids("\n")[0]
    labels = [ids(word) for word in (" red", " redder", " rose", " blue")]
    with served(model) as adapter:
        scores = adapter.label_scores(queries(), Trie.build(labels, end_id=end))
    for text, row in zip(TEXTS, scores, strict=True):
        expected = []
        for label in labels:
            total, whole = 0.0, (*label, end)
            logits = plain_logits(model, CONTEXT.ids + ids(text) + whole)[-len(whole) - 1 :]
            for at in range(len(whole)):
                rivals = {(*other, end)[at] for other in labels if (*other, end)[:at] == whole[:at]}
                allowed = sorted(rivals)
                total += float(logits[at][allowed].log_softmax(-1)[allowed.index(whole[at])])
            expected.append(total)
        torch.testing.assert_close(row, torch.tensor(expected), atol=1e-4, rtol=0)
        assert float(row.exp().sum()) == pytest.approx(1, abs=1e-5)


@contextmanager
def forwards(model: Any) -> Iterator[list[int]]:
    """Count forwards of the model by their number of tokens."""
    seen: list[int] = []
    handle = model.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape[1]))
    try:
        yield seen
    finally:
        handle.remove()


def test_the_latest_batch_runs_once() -> None:
    model, trie = build("llama"), Trie.build([ids(" a"), ids(" b")], end_id=ids("\n")[0])
    longest = max(len(ids(text)) for text in TEXTS)
    with served(model) as adapter, forwards(model) as seen:
        adapter.label_scores(queries(), trie)
        assert seen == [len(CONTEXT), longest, 1]  # context, queries, and " " before the letters part
        adapter.continue_all(queries(), 1, lambda made: None)
        adapter.answer_distributions(queries(), [ids(" ")] * len(TEXTS))
        assert seen == [len(CONTEXT), longest, 1]
        adapter.label_scores(queries(TEXTS[:2]), trie)  # another batch
        adapter.label_scores(queries(), trie)  # and the first again: only the latest is kept
        assert seen[3::2] == [len(ids(TEXTS[1])), longest]


def test_a_new_batch_is_never_taken_for_one_that_is_gone() -> None:
    """A document made after another was freed may have its id(): what counts is what was asked."""
    model = build("llama")
    texts = [f"Q: number {i}\nA:" for i in range(12)]
    with served(model) as adapter:
        ours = [adapter.batch(queries([text])).logits[0] for text in texts]
    for text, logits in zip(texts, ours, strict=True):
        torch.testing.assert_close(
            logits, plain_logits(model, CONTEXT.ids + ids(text))[-1], atol=1e-4, rtol=0
        )


def test_a_batch_shares_its_context() -> None:
    with served(build("llama")) as adapter, pytest.raises(ValueError, match="share their context"):
        adapter.batch([*queries(), query_instance(NOTHING, ids("x"))])


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"do_sample": True, "temperature": 0.8}, "samples its answers"),
        ({"temperature": 0.5}, "samples its answers"),
        ({"num_beams": 4}, "decodes with num_beams"),
        ({"repetition_penalty": 1.2}, "decodes with repetition_penalty"),
    ],
)
def test_what_is_not_greedy_is_refused(options: dict[str, Any], why: str) -> None:
    with served(build("llama")) as adapter, pytest.raises(UserError, match=why):
        adapter.generate_until(generating({"until": ["\n"], **options}, "x"))


def test_greedy_decoding_spelt_out_is_served() -> None:
    options = {"until": ["\n"], "do_sample": False, "temperature": 0, "top_p": 0.9, "num_beams": 1}
    with served(build("llama")) as adapter:
        assert len(adapter.generate_until(generating({**options, "max_gen_toks": 2}, "x", ""))) == 2


def test_rolling_perplexity_is_refused() -> None:
    with served(build("llama")) as adapter, pytest.raises(UserError, match="no query to serve"):
        adapter.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, ("text",), 0)])


def test_while_attached_nothing_bypasses_the_method() -> None:
    model, requests = build("llama"), scoring(("The sky is", " blue"))
    with served(model):
        with pytest.raises(RuntimeError, match="no kvexp cache"):
            hflm(model).loglikelihood(requests, disable_tqdm=True)
        with pytest.raises(RuntimeError, match="no kvexp cache"):
            model.generate(torch.tensor([ids("The sky")]), max_new_tokens=2)
    hflm(model).loglikelihood(requests, disable_tqdm=True)


def test_chats_are_formatted_as_by_hflm() -> None:
    tokenizer = tiny.tokenizer()
    chat = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi"}]
    with served(build("llama"), tokenizer) as adapter:
        with pytest.raises(UserError, match="no chat template"):
            adapter.apply_chat_template(chat)
        tokenizer.chat_template = (
            "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
            "{% if add_generation_prompt %}[assistant]{% endif %}"
        )
        opened = adapter.apply_chat_template(chat)
        assert opened == "<|begin|>[system]Be short.[user]Hi[assistant]"
        prefilled = [*chat, {"role": "assistant", "content": "Hel"}]
        assert adapter.apply_chat_template(prefilled, add_generation_prompt=False).endswith("[assistant]Hel")
        assert adapter.chat_template(True) == tokenizer.chat_template and "/" not in adapter.tokenizer_name
    assert opened == hflm(build("llama"), tokenizer).apply_chat_template(chat)
