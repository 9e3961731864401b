"""`tiercache prove` against a stand-in for an engine, a real HTTP server."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.cli.store.test_samples import Done, call
from tests.lab.prove.stand_in import ENGINES, KEY, Engine, Handler, Server, serve
from tiercache.cli.terminal import Exit
from tiercache_lab.prove import server as server_module
from tiercache_lab.prove.run import WORDS, draw


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    yield from serve(Engine(request.param))


@pytest.fixture
def sglang() -> Iterator[Engine]:
    yield from serve(Engine("sglang"))


@pytest.fixture
def vllm() -> Iterator[Engine]:
    yield from serve(Engine("vllm"))


@pytest.fixture(autouse=True)
def no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("SGLANG_ADMIN_API_KEY", raising=False)


def prove(engine: Engine, *arguments: object, ok: int | None = 0) -> Done:
    done = call("prove", engine.url, "--settle", 0, "--tokens", 401, *arguments, ok=ok)
    assert KEY not in done.out + done.err
    return done


def proved(engine: Engine, *arguments: object, ok: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = prove(engine, "-o", "json", *arguments, ok=ok).document
    assert found["exit_code"] == ok
    return found


def notes(found: dict[str, Any]) -> list[str]:
    """Without the one about times, which a busy machine may bring."""
    return [note for note in found["notes"] if "slower than computing" not in note]


def refused(engine: Engine, *arguments: object, ok: int = Exit.UNKNOWN) -> str:
    """The one sentence of what cannot be told."""
    done = prove(engine, *arguments, ok=ok)
    assert done.out == ""
    assert done.err.startswith("tiercache: ")
    assert done.err.count("\n") == 1
    return done.error


def test_a_hit(engine: Engine) -> None:
    found = proved(engine)
    told = (found["verdict"], found["engine"], found["model"], found["url"])
    assert told == ("hit", engine.kind, "qwen3-next", engine.url)
    assert (notes(found), found["look_at"]) == ([], [])
    assert (found["restored_tokens"], found["same_text"]) == (400, True)
    assert [found[name]["cached_tokens"] for name in ("first", "again", "control")] == [0, 400, 0]
    assert found["again"]["sources"] == (
        {"device": 0, "host": 0, "storage": 400} if engine.kind == "sglang" else None
    )
    assert all(
        found[name]["prompt_tokens"] == 401 and found[name]["first_token_s"] > 0
        for name in ("first", "again", "control")
    )
    assert "400 of 401 tokens were restored and the text is the same" in found["sentence"]
    trial, first, again, control = engine.asked
    assert trial["prompt"] not in (first["prompt"], control["prompt"])
    assert first == again
    assert first["prompt"] != control["prompt"]
    assert len(first["prompt"].split()) == len(control["prompt"].split())
    assert (first["temperature"], first["max_tokens"]) == (0, 32)
    assert first["stream_options"] == {"include_usage": True}
    assert first.get("return_cached_tokens_details") == (True if engine.kind == "sglang" else None)
    assert engine.resets_seen == [
        "/flush_cache?timeout=60" if engine.kind == "sglang" else "/reset_prefix_cache?reset_external=true"
    ]


def test_a_server_that_counts_too_little_gets_no_longer_prompt(engine: Engine) -> None:
    engine.tokens_each = 0.01
    only = proved(engine, "--tokens", 3000)
    assert only["first"]["prompt_tokens"] == 30
    assert max(len(request["prompt"].split()) for request in engine.asked) == 3000


@pytest.mark.parametrize("each", [2, 3])
def test_the_prompt_has_the_length_that_the_server_counts(engine: Engine, each: int) -> None:
    engine.tokens_each = each
    only = proved(engine, "--tokens", 3000)
    assert 2970 <= only["first"]["prompt_tokens"] <= 3000
    assert 2970 <= only["control"]["prompt_tokens"] <= 3000


@pytest.mark.parametrize(("each", "asked"), [(1, [800, 799]), (16, range(800, 720, -16))])
def test_whole_pages_are_not_asked_again(engine: Engine, each: int, asked: Sequence[int], tmp_path) -> None:
    """A hybrid restores nothing of them, because their only state is after the token that is computed."""
    engine.tokens_each = each
    prove(engine, "--tokens", 800, "--save", tmp_path / "saved")
    assert [len(request["prompt"].split()) * each for request in engine.asked[1:]] == [*asked]


def test_what_a_hit_gains(sglang: Engine) -> None:
    sglang.computing = 0.1
    found = proved(sglang)
    assert found["gain"] > 1
    assert found["control"]["first_token_s"] >= 0.1
    assert found["notes"] == []
    sglang.computing, sglang.restoring = 0, 0.1
    found = proved(sglang)
    assert found["verdict"] == "hit"
    assert "restoring was slower than computing" in " ".join(found["notes"])


def test_a_hit_for_people(engine: Engine) -> None:
    out = prove(engine, "--seed", 17).out
    assert f"{engine.kind}, model qwen3-next" in out
    assert "HIT: 400 of 401 tokens were restored" in out
    for word in ("17", "first", "again", "never sent", "the same", "1st token"):
        assert word in out


def test_the_url_may_end_as_clients_want_it(sglang: Engine) -> None:
    plain, sglang.url = sglang.url, f"{sglang.url}/v1/"
    assert proved(sglang)["url"] == plain


def test_another_model_and_one_line(sglang: Engine) -> None:
    [found] = prove(sglang, "--model", "an-adapter", "-o", "jsonl").lines
    assert (found["verdict"], found["model"]) == ("hit", "an-adapter")
    assert {request["model"] for request in sglang.asked} == {"an-adapter"}


def test_an_engine_that_does_not_say_what_it_is(vllm: Engine) -> None:
    vllm.owner = "us"
    assert "give --engine sglang or --engine vllm" in refused(vllm, ok=Exit.MISUSED)
    assert proved(vllm, "--engine", "vllm")["verdict"] == "hit"


def test_a_miss(engine: Engine) -> None:
    engine.stores = False
    found = proved(engine, ok=Exit.NO)
    assert found["verdict"] == "miss"
    said = " ".join(found["look_at"])
    assert "docs/engines.md" in said
    assert "--settle" in said
    assert ("prefetch_threshold (256)" in said) == (engine.kind == "sglang")
    assert ("write_through_selective" in said) == (engine.kind == "sglang")
    assert "a KV hit without a state" in said
    assert ("TieringOffloadingSpec" in said) == (engine.kind == "vllm")
    out = prove(engine, ok=Exit.NO).out
    assert "MISS: nothing was restored" in out
    assert "possible causes:" in out


def test_what_all_prompts_share_is_no_hit(engine: Engine) -> None:
    engine.stores, engine.always_cached = False, 4
    assert proved(engine, ok=Exit.NO)["verdict"] == "miss"


def test_figures_that_cannot_be_are_not_believed(engine: Engine) -> None:
    engine.stores, engine.always_cached = False, 64
    found = proved(engine, ok=Exit.UNKNOWN)
    assert found["verdict"] == "unknown"
    assert "a new prompt is reported with 64 cached tokens" in found["sentence"]


@pytest.mark.parametrize("stores", [True, False])
def test_a_server_that_reports_nothing(engine: Engine, stores: bool) -> None:
    engine.reports, engine.details, engine.stores = False, False, stores
    found = proved(engine, ok=Exit.UNKNOWN)
    figures = (found["verdict"], found["restored_tokens"], found["again"]["cached_tokens"])
    assert figures == ("unknown", None, None)
    assert found["again"]["first_token_s"] > 0
    flag = "--enable-cache-report" if engine.kind == "sglang" else "--enable-prompt-tokens-details"
    assert f"start it with {flag}" in found["sentence"]
    assert "not reported" in prove(engine, ok=Exit.UNKNOWN).out


def test_sglang_says_without_the_flag_where_tokens_lay(sglang: Engine) -> None:
    sglang.reports = False
    assert proved(sglang)["again"]["cached_tokens"] == 400


def test_another_text_is_wrong(engine: Engine) -> None:
    engine.wrong = 1
    out = prove(engine, ok=Exit.CORRUPT).out
    assert "WRONG: 400 of 401 tokens were restored and the text differs from character" in out
    assert "repeat on a server without other load" in out
    assert "differs: ..." in out
    assert "nonsense" in out


def test_a_seed_that_was_used_is_noticed(engine: Engine) -> None:
    assert notes(proved(engine, "--seed", 5)) == []
    engine.restart()
    [note] = notes(proved(engine, "--seed", 5))
    assert "the seed was used before" in note
    assert len({request["prompt"] for request in engine.asked}) == 5  # one prompt, two controls, two trials


def test_vllm_with_another_connector_keeps_its_store(vllm: Engine) -> None:
    vllm.connector = "MooncakeStoreConnector"
    [note] = notes(proved(vllm))
    assert "connector MooncakeStoreConnector may not keep its storage" in note
    assert "may come from host memory" in note
    assert vllm.resets_seen == ["/reset_prefix_cache"]
    assert len(vllm.storage) == 3


def test_a_busy_engine(engine: Engine) -> None:
    engine.busy = 2
    if engine.kind == "vllm":  # it refuses at once, and is asked again; SGLang waits by itself
        assert proved(engine)["verdict"] == "hit"
        engine.busy = 1_000_000
    assert "try without other requests, or test over a restart: --save FILE" in refused(
        engine, "--timeout", 0.4
    )


def test_caches_that_cannot_be_emptied(engine: Engine) -> None:
    engine.resets = False
    said = refused(engine)
    assert "does not exist" in said
    assert ("VLLM_SERVER_DEV_MODE=1" in said) == (engine.kind == "vllm")
    assert "--after FILE" in said


def test_keys(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.key = KEY
    assert "/v1/models answers 401: the key is not accepted; set OPENAI_API_KEY" in refused(
        engine, ok=Exit.REFUSED
    )
    assert "answers 401" in refused(engine, "--api-key", "sk-very-secret-too", ok=Exit.REFUSED)
    assert proved(engine, "--api-key", KEY)["verdict"] == "hit"
    monkeypatch.setenv("OPENAI_API_KEY", f"{KEY}\n")
    assert proved(engine)["verdict"] == "hit"


def test_a_key_that_no_header_carries_is_not_shown(engine: Engine) -> None:
    for key in (f"{KEY}\nX-Other: 1", f"{KEY}\u20ac"):
        assert "has characters that no key can have" in refused(engine, "--api-key", key, ok=Exit.MISUSED)


def test_the_administrators_key(sglang: Engine) -> None:
    sglang.key, sglang.admin_key = "user", KEY
    assert "flush_cache?timeout=60 answers 401" in refused(sglang, "--api-key", "user", ok=Exit.REFUSED)
    assert proved(sglang, "--api-key", "user", "--admin-key", KEY)["verdict"] == "hit"


@pytest.mark.parametrize("of", ["status", "stream"])
def test_a_server_that_repeats_the_key(sglang: Engine, of: str) -> None:
    error = json.dumps({"error": {"message": f"no\n {KEY} here"}}).encode()
    sglang.status, sglang.stream = (422, error) if of == "status" else (200, b"data: " + error + b"\n\n")
    assert "*** here" in refused(sglang, "--api-key", KEY)


DATA = b'data: {"choices": [{"index": 0, "text": " a"}]}\n\n'


@pytest.mark.parametrize(
    ("stream", "sentence"),
    [
        (b"data: {not json\n\n", "malformed stream"),
        (b"data: \xff\xfe\n\n", "malformed stream"),
        (b"<html>hello</html>\n", "malformed stream"),
        (b"data: " + b"[" * 100_000 + b"\n\n", "malformed stream"),
        (b'data: {"choices": [{"text": 7}]}\n\n', "malformed stream"),
        (DATA + b'data: {"usage": {"prompt_tokens": "many"}}\n\ndata: [DONE]\n\n', "malformed stream"),
        (
            DATA + b'data: {"usage": {"prompt_tokens_details": {"cached_tokens": -1}}}\n\ndata: [DONE]\n\n',
            "malformed stream",
        ),
        (
            b'data: {"error": {"message": "CUDA out of memory"}}\n\n',
            "ends its answer with an error: CUDA out of memory",
        ),
        (b"data: [DONE]\n\n", "without a text"),
        (DATA, "stopped in the middle"),
        (b"", "stopped in the middle"),
    ],
)
def test_a_broken_answer_is_one_sentence(sglang: Engine, stream: bytes, sentence: str) -> None:
    sglang.stream = stream
    said = refused(sglang)
    assert f"{sglang.url}/v1/completions " in said
    assert sentence in said


def test_a_stream_that_ends_without_its_end(sglang: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def dying(handler: Handler, data: bytes) -> None:
        handler.wfile.write(b"ffff\r\n" + data)
        handler.connection.shutdown(socket.SHUT_RDWR)

    monkeypatch.setattr(Handler, "chunk", dying)
    sglang.stream = DATA
    assert "closed the connection" in refused(sglang)


@pytest.mark.parametrize(
    ("status", "body", "sentence"),
    [
        (404, b'{"error":\n"no such model"}', 'answers 404: {"error": "no such model"}'),
        (500, b"", "answers 500; is that the URL of an engine?"),
        (500, b"x" * 1000, "x..."),
        (503, b"\xff", "answers 503: "),
        (307, b"", "answers 307, a redirect, which is not followed"),
    ],
)
def test_other_statuses_are_one_sentence(sglang: Engine, status: int, body: bytes, sentence: str) -> None:
    sglang.status, sglang.stream = status, body
    assert sentence in refused(sglang)


@pytest.mark.parametrize("models", [b"<html>", b'{"data": []}', b'{"data": [{"id": 7}]}'])
def test_a_list_of_models_that_is_none(sglang: Engine, models: bytes) -> None:
    sglang.models = models
    assert "/v1/models offers no model" in refused(sglang)


@pytest.mark.parametrize("way", ["hang", "trickle"])
def test_time_is_bounded(sglang: Engine, way: str) -> None:
    setattr(sglang, way, True)
    began = time.monotonic()
    assert "took longer than 0.2 s; see the server's log, or give a higher --timeout" in refused(
        sglang, "--timeout", 0.2
    )
    assert time.monotonic() - began < 20, "without the limit, the stand-in would never answer"


def test_bytes_are_bounded(sglang: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "MAX_BYTES", 1 << 20)
    sglang.stream = b"data: " + b"x" * (2 << 20)
    assert "answers with more than 1 MiB" in refused(sglang)


def test_nobody_there() -> None:
    with Server(("127.0.0.1", 0), Handler) as server:
        url = f"http://127.0.0.1:{server.server_port}"
    said = refused(Engine("vllm", url=url), ok=Exit.UNREACHABLE)
    assert f"no server answers at {url}/v1/models (Connection refused); start the engine there" in said
    nowhere = Engine("vllm", url=f"http://{'a' * 64}.invalid")
    assert "no server answers at" in refused(nowhere, ok=Exit.UNREACHABLE)


def test_http_where_tls_is_expected(sglang: Engine) -> None:
    sglang.url = sglang.url.replace("http", "https")
    said = refused(sglang, ok=Exit.UNREACHABLE)
    assert "no server answers" in said
    assert "WRONG_VERSION_NUMBER" in said or "record layer failure" in said.lower()


def test_a_prompt_that_does_not_fit(sglang: Engine) -> None:
    sglang.longest = 420
    assert "--tokens 401 and --max-tokens 32 do not fit into the 420 tokens of this model" in refused(
        sglang, ok=Exit.MISUSED
    )
    assert sglang.asked == []


def test_over_a_restart(engine: Engine, tmp_path) -> None:
    path = tmp_path / "proof.json"
    assert f"--after {path}" in " ".join(
        prove(engine, "--save", path, "--seed", 3, "--max-tokens", 8).out.split()
    )
    assert len(engine.asked) == 2
    assert json.loads(path.read_text())["prompt"] == draw("3", 385) == engine.asked[1]["prompt"]
    engine.restart()
    found = proved(engine, "--after", path)
    assert (found["verdict"], found["seed"]) == ("hit", 3)
    assert engine.resets_seen == []
    assert [request["max_tokens"] for request in engine.asked] == [8, 8, 8, 8]
    assert engine.asked[1] == engine.asked[2] != engine.asked[3]
    assert len(notes(found)) == (engine.kind == "vllm")  # SGLang says that it came from storage
    engine.restart()
    assert proved(engine, "--after", path)["verdict"] == "hit"  # again: the control is another one


def test_a_restart_that_was_none(engine: Engine, tmp_path) -> None:
    path = tmp_path / "proof.json"
    saved = prove(engine, "--save", path, "-o", "json").document
    assert (saved["saved"], saved["engine"], saved["first"]["cached_tokens"]) == (str(path), engine.kind, 0)
    if engine.kind == "sglang":
        found = proved(engine, "--after", path, ok=Exit.UNKNOWN)
        assert "not from storage" in found["sentence"]
    else:
        assert "whether the server was restarted is not known" in " ".join(
            proved(engine, "--after", path)["notes"]
        )


def test_after_a_restart_without_a_store(engine: Engine, tmp_path) -> None:
    engine.stores = False
    path = tmp_path / "proof.json"
    prove(engine, "--save", path)
    engine.restart()
    assert proved(engine, "--after", path, ok=Exit.NO)["verdict"] == "miss"


def test_a_file_of_another_model_is_refused_and_of_another_url_is_not(engine: Engine, tmp_path) -> None:
    path = tmp_path / "proof.json"
    prove(engine, "--save", path)
    record = json.loads(path.read_text())
    path.write_text(json.dumps(record | {"url": "http://elsewhere:1"}))
    assert prove(engine, "--after", path, "-o", "json", ok=None).document["verdict"] in ("hit", "unknown")
    assert "is about model qwen3-next, not an-adapter; give --model" in refused(
        engine, "--after", path, "--model", "an-adapter", ok=Exit.MISUSED
    )


@pytest.mark.parametrize(
    "change", [{"format": 2}, {"tokens": 10**12}, {"max_tokens": 0}, {"prompt": None}, {"first": {}}]
)
def test_a_changed_file_is_refused(sglang: Engine, tmp_path, change: dict[str, Any]) -> None:
    path = tmp_path / "proof.json"
    prove(sglang, "--save", path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert "is not a file of --save of this version" in refused(sglang, "--after", path, ok=Exit.MISUSED)
    assert len(sglang.asked) == 2


@pytest.mark.parametrize("content", [b"", b"\xff", b"{}", b"[" * 100_000])
def test_a_file_that_is_something_else_is_refused(tmp_path, content: bytes) -> None:
    path = tmp_path / "proof.json"
    path.write_bytes(content)
    assert "is not a file of --save" in refused(
        Engine("vllm", url="http://127.0.0.1:9"), "--after", path, ok=Exit.MISUSED
    )


def test_files_that_cannot_be(sglang: Engine, tmp_path) -> None:
    assert "cannot be read: No such file" in refused(sglang, "--after", tmp_path / "none", ok=Exit.MISUSED)
    assert "cannot be read: Is a directory" in refused(sglang, "--after", tmp_path, ok=Exit.MISUSED)
    assert "is a directory, or its directory does not exist" in refused(
        sglang, "--save", tmp_path, ok=Exit.MISUSED
    )
    assert "is a directory, or its directory does not exist" in refused(
        sglang, "--save", tmp_path / "none" / "x", ok=Exit.MISUSED
    )
    assert sglang.seen == []


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("127.0.0.1:30000", "is not the URL of an engine"),
        ("ftp://host", "is not the URL of an engine"),
        ("http://", "is not the URL of an engine"),
        ("http://host\x1bc/", "is not the URL of an engine"),
        ("http://host:port", "is not the URL of an engine"),
        ("http://[::1", "is not the URL of an engine"),
        (f"http://user:{KEY}@host", "has a user or a password"),
    ],
)
def test_urls_that_are_none(url: str, sentence: str) -> None:
    assert sentence in refused(Engine("vllm", url=url), ok=Exit.MISUSED)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--save", "a", "--after", "b"), "give one of them"),
        (("--timeout", "nan"), "--timeout"),
        (("--tokens", "8"), "invalid value for '--tokens'"),
        (("--engine", "other"), "'other' is not one of"),
    ],
)
def test_wrong_use(arguments: tuple[str, ...], sentence: str) -> None:
    assert sentence in refused(Engine("vllm", url="http://127.0.0.1:9"), *arguments, ok=Exit.MISUSED)


def test_an_interruption_is_no_miss(sglang: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tiercache_lab.prove.run.empty", interrupted)
    prove(sglang, ok=Exit.INTERRUPTED)


def test_prompts() -> None:
    assert draw("a", 500) == draw("a", 500) != draw("b", 500)
    words = draw("a", 500).split()
    assert 480 <= len(words) <= 520
    assert words[-6:] == words[:6]  # it ends within a repetition of its beginning
    assert len(set(WORDS)) == len(WORDS) >= 120
