"""A stand-in for SGLang 0.5.23 and vLLM 0.33.0: a real HTTP server with switches for what goes wrong."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

KEY = "sk-very-secret"
ENGINES = ("sglang", "vllm")


@dataclass
class Engine:
    """An engine with three levels of cache, a token a word, and switches for what goes wrong."""

    kind: str
    stores: bool = True
    reports: bool = True  # --enable-cache-report, --enable-prompt-tokens-details
    details: bool = True  # SGLang's answer to return_cached_tokens_details
    resets: bool = True
    connector: str = "OffloadingConnector"
    busy: int = 0  # resets that are refused
    key: str = ""
    admin_key: str = ""
    wrong: int = 0  # hits whose text is another
    owner: str = ""
    longest: int = 40960
    tokens_each: float = 1  # tokens of a word
    names: tuple[str, ...] = ("qwen3-next", "an-adapter")
    models: bytes | None = None
    stream: bytes | None = None  # instead of an answer
    status: int = 200
    hang: bool = False
    trickle: bool = False
    always_cached: int = 0
    computing: float = 0
    restoring: float = 0
    device: set[str] = field(default_factory=set)
    host: set[str] = field(default_factory=set)
    storage: set[str] = field(default_factory=set)
    seen: list[tuple[str, str, dict[str, Any]]] = field(default_factory=list)
    url: str = ""
    released: threading.Event = field(default_factory=threading.Event)

    def restart(self) -> None:
        self.device.clear()
        self.host.clear()

    @property
    def asked(self) -> list[dict[str, Any]]:
        return [body for _, path, body in self.seen if path == "/v1/completions"]

    @property
    def resets_seen(self) -> list[str]:
        return [path for _, path, _ in self.seen if "flush" in path or "reset" in path]

    def answer(self, request: dict[str, Any]) -> Iterator[dict[str, Any]]:
        prompt, count = request["prompt"], int(len(request["prompt"].split()) * self.tokens_each)
        where = next((name for name in ("device", "host", "storage") if prompt in getattr(self, name)), "")
        cached = count - count % 16 if where else self.always_cached
        time.sleep(self.restoring if where else self.computing)
        self.device.add(prompt)
        self.host.add(prompt)
        if self.stores:
            self.storage.add(prompt)
        words = prompt.split()[6 : 6 + request["max_tokens"]]
        if where and self.wrong:
            self.wrong -= 1
            words[-1] = "nonsense"
        for n in range(0, len(words), 8):
            yield {"choices": [{"index": 0, "text": f" {' '.join(words[n : n + 8])}", "finish_reason": None}]}
        if self.kind == "sglang" and self.details and request.get("return_cached_tokens_details") and cached:
            yield {
                "choices": [],
                "sglext": {
                    "cached_tokens_details": {"device": 0, "host": 0, "storage": 0}
                    | {where or "device": cached}
                },
            }
        usage = {"prompt_tokens": count, "completion_tokens": len(words), "total_tokens": count + len(words)}
        details = {"cached_tokens": cached} if self.reports else None
        yield {"choices": [], "usage": usage | {"prompt_tokens_details": details}}


class Server(ThreadingHTTPServer):
    engine: Engine
    request_queue_size = 64

    def handle_error(self, request: object, client_address: object) -> None:
        pass  # a client that has gone


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        engine = self.take()
        if self.path == "/v1/models" and self.allowed(engine.key):
            data = [
                {"id": name, "owned_by": engine.owner or engine.kind, "max_model_len": engine.longest}
                for name in engine.names
            ]
            self.reply(
                200,
                json.dumps({"object": "list", "data": data}).encode()
                if engine.models is None
                else engine.models,
            )
        elif urlsplit(self.path).path == "/server_info" and engine.kind == "vllm" and engine.resets:
            self.reply(
                200,
                json.dumps(
                    {"vllm_config": {"kv_transfer_config": {"kv_connector": engine.connector}}}
                ).encode(),
            )
        elif not self.replied:
            self.reply(404, b'{"detail":"Not Found"}')

    def do_POST(self) -> None:
        engine = self.take()
        path, query = urlsplit(self.path).path, parse_qs(urlsplit(self.path).query)
        if path == "/v1/completions":
            if self.allowed(engine.key):
                self.complete(engine)
        elif path == "/flush_cache" and engine.kind == "sglang" and engine.resets:
            if self.allowed(engine.admin_key or engine.key):
                self.flush(engine)
        elif path == "/reset_prefix_cache" and engine.kind == "vllm" and engine.resets:
            self.reset(engine, query.get("reset_external") == ["true"])
        else:
            self.reply(404, b'{"detail":"Not Found"}')

    def take(self) -> Engine:
        self.replied = False
        engine = self.server.engine
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        engine.seen.append((self.command, self.path, json.loads(body) if body else {}))
        self.body = engine.seen[-1][2]
        return engine

    def allowed(self, key: str) -> bool:
        if key and self.headers.get("Authorization") != f"Bearer {key}":
            self.reply(401, b'{"error":"Unauthorized"}')
            return False
        return True

    def reply(self, status: int, body: bytes) -> None:
        self.replied = True
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        if status == 307:
            self.send_header("Location", "http://elsewhere.invalid/")
        self.end_headers()
        self.wfile.write(body)

    def flush(self, engine: Engine) -> None:
        if engine.busy:
            engine.busy -= 1
            self.reply(400, b"Timed out waiting for idle state.")
            return
        engine.restart()
        self.reply(200, b"Cache flushed.\n")

    def reset(self, engine: Engine, external: bool) -> None:
        done = not engine.busy
        engine.busy -= not done
        if done:
            engine.device.clear()
        if done and external:
            (engine.storage if engine.connector == "MooncakeStoreConnector" else engine.host).clear()
        self.reply(200, json.dumps({"success": done}).encode())

    def complete(self, engine: Engine) -> None:
        if engine.hang:
            engine.released.wait(30)
            self.close_connection = True
            return
        if engine.status != 200:
            self.reply(engine.status, engine.stream or b"")
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        if engine.trickle:
            while not engine.released.wait(0.02):
                try:
                    self.chunk(b": keep-alive\n\n")
                except OSError:
                    break
            self.close_connection = True
            return
        if engine.stream is not None:
            self.chunk(engine.stream)
            self.wfile.write(b"0\r\n\r\n")
            return
        for event in engine.answer(self.body):
            self.chunk(b": keep-alive\n\ndata: " + json.dumps(event).encode() + b"\n\n")
        self.chunk(b"data: [DONE]\n\n")
        self.wfile.write(b"0\r\n\r\n")

    def chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))


def serve(engine: Engine) -> Iterator[Engine]:
    with Server(("127.0.0.1", 0), Handler) as server:
        server.engine = engine
        engine.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield engine
        engine.released.set()
        server.shutdown()
        thread.join()
