"""The endpoint: a server on this machine is asked, answers are kept, and bad ones are told in a sentence."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from kvexp.errors import UserError
from kvexp.notes.endpoint import KEY, URL, Endpoint, configured, kept


class Server(ThreadingHTTPServer):
    """Answers every request with `status` and `body`, and remembers what it was asked."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[tuple[str, Any, dict[str, Any]]] = []
        self.status, self.body = 200, b""

    def say(self, text: Any) -> None:
        self.body = json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]}).encode()


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert isinstance(self.server, Server)
        given = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.asked.append((self.path, self.headers.get("Authorization"), json.loads(given)))
        self.send_response(self.server.status)
        self.send_header("Content-Length", str(len(self.server.body)))
        self.end_headers()
        self.wfile.write(self.server.body)

    def log_message(self, *args: Any) -> None:
        """Print nothing."""


@pytest.fixture
def server(monkeypatch, tmp_path) -> Iterator[Server]:
    """A server that KVEXP_LLM_URL names, whatever proxy the machine has."""
    with Server() as one:
        thread = threading.Thread(target=one.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        monkeypatch.setenv(URL, f"http://127.0.0.1:{one.server_port}/v1/")
        monkeypatch.delenv(KEY, raising=False)
        monkeypatch.setenv("KVEXP_CACHE", str(tmp_path))
        yield one
        one.shutdown()
        thread.join()


def test_a_chat_is_posted_and_its_answer_returned(server):
    server.say("Bonjour")
    assert configured("small", "notes.llm")("Say hello") == "Bonjour"
    [(path, authorization, body)] = server.asked
    assert path == "/v1/chat/completions"
    assert authorization is None
    assert body == {
        "model": "small",
        "messages": [{"role": "user", "content": "Say hello"}],
        "temperature": 0,
        "max_tokens": 1024,
    }


def test_the_key_is_sent_and_never_shown(server, monkeypatch):
    monkeypatch.setenv(KEY, "hush")
    server.say("x")
    endpoint = configured("small", "notes.llm")
    endpoint("a")
    assert server.asked[0][1] == "Bearer hush"
    assert "hush" not in repr(endpoint)


def test_answers_are_kept_by_model_and_prompt(server):
    for said, model, prompt, expected in (
        ("one\r\n", "small", "a", "one\r\n"),
        ("two", "small", "a", "one\r\n"),
        ("two", "small", "b", "two"),
        ("three", "large", "a", "three"),
    ):
        server.say(said)
        assert configured(model, "notes.llm")(prompt) == expected
    assert len(server.asked) == 3


@pytest.mark.parametrize(
    ("status", "body", "why"),
    [
        (500, b"", "HTTPError"),
        (401, b"{}", "HTTPError"),
        (200, b"<html>", "JSONDecodeError"),
        (200, b"\xff", "UnicodeDecodeError"),
        (200, b"{}", "KeyError"),
        (200, b'{"choices": []}', "IndexError"),
        (200, b"[]", "TypeError"),
        (200, b'{"choices": [{"message": {"content": null}}]}', "TypeError"),
    ],
)
def test_what_is_no_answer_is_told_and_not_kept(server, status, body, why):
    server.status, server.body = status, body
    with pytest.raises(UserError, match=rf"did not answer for small \({why}: .*\): check {URL} and {KEY}"):
        configured("small", "notes.llm")("a")
    server.status = 200
    server.say("now")
    assert configured("small", "notes.llm")("a") == "now"


def test_nobody_listens():
    def refused(url, headers, body):
        raise ConnectionRefusedError(111, "refused")

    with pytest.raises(UserError, match=r"http://here/v1 did not answer for m \(ConnectionRefusedError"):
        Endpoint("m", "http://here/v1", transport=refused)("a")


@pytest.mark.parametrize(
    ("given", "why"), [({}, "is not set"), ({URL: "file:///x"}, "=file:///x is no address")]
)
def test_an_endpoint_must_be_configured(given, why):
    with pytest.raises(
        UserError, match=f"notes.llm=m needs an endpoint, and {URL}{' ' * (not given)}{why.strip()}"
    ):
        configured("m", "notes.llm", given)


def test_nothing_is_kept_without_a_folder(tmp_path):
    answers = iter("ab")
    assert [kept(None, b"x", lambda: next(answers)) for _ in range(2)] == ["a", "b"]
    answers = iter("ab")
    assert [kept(tmp_path, b"x", lambda: next(answers)) for _ in range(2)] == ["a", "a"]
