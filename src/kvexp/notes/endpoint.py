"""A language model behind an address that speaks the protocol of OpenAI's chat completions.

Off by default. `KVEXP_LLM_URL` is the address up to its version ("http://localhost:8000/v1"), `KVEXP_LLM_KEY`
its key where it wants one. Answers are decoded greedily and kept in the cache folder, so that a memory that
is built again has the same texts, whatever the endpoint would say now.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path

from kvexp.embedded import cache_folder
from kvexp.errors import UserError
from kvexp.files import write_atomic

URL, KEY = "KVEXP_LLM_URL", "KVEXP_LLM_KEY"
Transport = Callable[[str, Mapping[str, str], bytes], bytes]
"""Posts a body to an address with headers, and returns what comes back."""


def over_http(url: str, headers: Mapping[str, str], body: bytes) -> bytes:
    """Post over HTTP, with two minutes to answer; raises OSError or HTTPException where that fails."""
    from urllib.request import Request, urlopen

    with urlopen(Request(url, body, dict(headers)), timeout=120) as answer:  # http(s) only: see `configured`
        return bytes(answer.read())


@dataclass(frozen=True)
class Endpoint:
    """One model of an endpoint; called with a prompt, it returns the answer.

    Answers are kept in `folder` (None: nowhere); `max_tokens` is the length of one.
    """

    model: str
    url: str
    key: str | None = field(default=None, repr=False)
    transport: Transport = over_http
    folder: Path | None = None
    max_tokens: int = 1024

    def __call__(self, prompt: str) -> str:
        """Return the answer to a prompt; raises UserError where the endpoint gives none."""
        body = json.dumps(
            {
                "model": self.model,
                "messages": [{"role": "user", "content": prompt}],
                "temperature": 0,
                "max_tokens": self.max_tokens,
            },
            sort_keys=True,
        ).encode()
        return kept(self.folder, body, lambda: self._asked(body))

    def _asked(self, body: bytes) -> str:
        headers = {"Content-Type": "application/json"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        try:
            answer = self.transport(f"{self.url.rstrip('/')}/chat/completions", headers, body)
            text = json.loads(answer)["choices"][0]["message"]["content"]
            if not isinstance(text, str):
                raise TypeError(f"an answer is a text, not {text!r}")
            return text
        except (OSError, HTTPException, ValueError, KeyError, IndexError, TypeError) as error:
            raise UserError(
                f"the endpoint {self.url} did not answer for {self.model} ({type(error).__name__}: {error}): "
                f"check {URL} and {KEY}, or work offline"
            ) from error


def kept(folder: Path | None, request: bytes, answer: Callable[[], str]) -> str:
    """Return what `folder` keeps for a request, or else the answer, which it keeps from then on."""
    if folder is None:
        return answer()
    path = folder / f"{hashlib.sha256(request).hexdigest()}.txt"
    if not path.is_file():
        write_atomic(path, answer().encode())
    return path.read_bytes().decode()


def answers_folder() -> Path:
    """Return the folder that keeps the answers of language models."""
    return cache_folder() / "answers"


def configured(
    model: str,
    knob: str,
    environment: Mapping[str, str] = os.environ,
    transport: Transport = over_http,
) -> Endpoint:
    """Return the endpoint of the environment for a model.

    `knob` is the knob that asked for it, for the sentence of the UserError that an unset or unusable address
    raises.
    """
    url = environment.get(URL, "")
    if not re.match(r"https?://", url):
        lacks = f"{URL}={url} is no address" if url else f"{URL} is not set"
        raise UserError(
            f"{knob}={model} needs an endpoint, and {lacks}: set {URL}=http://HOST:PORT/v1 (and {KEY} where"
            f" it wants a key), or {knob}=null to work offline"
        )
    return Endpoint(model, url, environment.get(KEY) or None, transport, answers_folder())
