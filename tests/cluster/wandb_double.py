"""A test double of W&B's server for `wandb sweep` and `wandb agent`: a few GraphQL operations on loopback.

It hands out the runs that it was given and then tells the agent to stop; it stores nothing else.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import yaml

OPERATIONS = ("agentHeartbeat", "createAgent", "upsertSweep", "sweep(", "viewer")
NAMES = {"name": "kvexp", "entity": {"id": "e", "name": "me"}}


class Double:
    """Serves one sweep whose runs have the given parameters; use it in a `with` block."""

    def __init__(self, runs: Sequence[dict[str, Any]], resumed: str | None = None) -> None:
        self.config = ""
        self.asked: list[str] = []
        self._waiting = list(enumerate(runs))
        self._resumed = resumed
        double = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                answer = json.dumps({"data": double.answer(body)}).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Double:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the data of one GraphQL operation."""
        query, variables = body.get("query", ""), body.get("variables") or {}
        word = next(
            (w for w in ("agentHeartbeat", "createAgent", "upsertSweep", "sweep(", "viewer") if w in query),
            "",
        )
        self.asked.append(word)
        if word == "agentHeartbeat":
            return {
                "agentHeartbeat": {"agent": {"id": "a"}, "commands": json.dumps(self._commands(variables))}
            }
        if word == "createAgent":
            return {"createAgent": {"agent": {"id": "a"}}}
        sweep = {"id": "s", "name": "sweep1", "project": {"id": "p", **NAMES}}
        if word == "upsertSweep":
            self.config = variables["config"]
            return {"upsertSweep": {"sweep": sweep, "configValidationWarnings": []}}
        if word == "sweep(":
            method = yaml.safe_load(self.config)["method"]
            runs = {"edges": [], "pageInfo": {"endCursor": None, "hasNextPage": False}}
            found = {**sweep, "method": method, "state": "RUNNING", "config": self.config, "runs": runs}
            return {"project": {**NAMES, "sweep": found}}
        return {
            "viewer": {"id": "v", "entity": "me", "username": "me", "teams": {"edges": []}, "flags": "{}"}
        }

    def _commands(self, variables: dict[str, Any]) -> list[dict[str, Any]]:
        """The next run, once the agent has ended the last; the agent tells which it has."""
        if json.loads(variables.get("runState") or "{}"):
            return []
        if not self._waiting:
            return [{"type": "exit"}]
        index, values = self._waiting.pop(0)
        args = {key: {"value": value} for key, value in values.items()}
        if self._resumed:
            args["_wandb"] = {"value": {"resumed": self._resumed}}
        return [{"type": "run", "run_id": f"run{index}", "args": args, "program": None}]
