"""The OpenAI API over a socket, with OpenAI's client: answers are those of `generate`, errors have OpenAI's form."""

from __future__ import annotations

import asyncio
import importlib
import json
import random
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from typing import Any

import pytest

from chat_model import streaming
from weightstream.text.engine import TextModel
from weightstream.text.sampling import Sampling
from weightstream.text.stream import Answer

openai = pytest.importorskip("openai")
pytest.importorskip("uvicorn")
ChatRequest = importlib.import_module("weightstream.serving.requests").ChatRequest
server = importlib.import_module("weightstream.serving.server")

CONTEXT, NUM_TOKENS, QUEUE = 48, 8, 2
NAME, KEY = "tiny", "sesame"
JSON = {"Content-Type": "application/json"}
USER = [{"role": "user", "content": "w5 w9"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TextModel]:
    with streaming(tmp_path_factory.mktemp("llama")) as loaded:
        yield loaded


@contextmanager
def serving(model: TextModel, api_key: str | None = KEY, host: str = "127.0.0.1") -> Iterator[tuple[Any, int]]:
    """A server and its port. It runs in a thread of its own, so it gets no signals."""
    served = server.ServedModel(model=model, name=NAME, context=CONTEXT, drafts={}, api_key=api_key)
    is_up, running = threading.Event(), []

    class Kept(server._Server):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            running.append(self)

    with pytest.MonkeyPatch.context() as patch, server.bound_socket(host, 0) as bound:
        patch.setattr(server, "_Server", Kept)
        thread = threading.Thread(target=server.serve_forever, args=(served, bound, QUEUE, is_up.set), daemon=True)
        thread.start()
        assert is_up.wait(30)
        yield running[0], bound.getsockname()[1]
        running[0].handle_exit(signal.SIGTERM, None)
        thread.join(30)
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def port(model: TextModel) -> Iterator[int]:
    with serving(model) as (_, port):
        yield port


@pytest.fixture(scope="module")
def client(port: int) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=KEY, max_retries=0) as made:
        yield made


def own(model: TextModel, prompt: str = "w7 w5 w9 w8 w11", **sampling: Any) -> Answer:
    sampling = {"max_new_tokens": NUM_TOKENS, "temperature": 0.0} | sampling
    return model.generate(model.encode(prompt), Sampling(**sampling))


def post(port: int, body: bytes, path: str = "/v1/chat/completions", **headers: str) -> tuple[int, Any]:
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    sent = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"} | headers
    connection.request("POST", path, body, sent)
    response = connection.getresponse()
    found = response.status, json.loads(response.read())
    connection.close()
    return found


def test_chat_answers_as_generate_does(client: Any, model: TextModel) -> None:
    answer = own(model)
    found = client.chat.completions.create(model=NAME, messages=USER, max_tokens=NUM_TOKENS, temperature=0)
    (choice,) = found.choices
    assert (choice.message.content, choice.finish_reason) == (answer.text, answer.finish)
    assert (choice.message.role, choice.logprobs) == ("assistant", None)
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (5, len(answer.ids))


def test_chat_streams_the_same_text(client: Any, model: TextModel) -> None:
    options = {"max_completion_tokens": NUM_TOKENS, "temperature": 0.8, "seed": 4, "logprobs": True, "top_logprobs": 2}
    usage = {"include_usage": True}
    stream = client.chat.completions.create(model=NAME, messages=USER, stream=True, stream_options=usage, **options)
    *chunks, last = stream
    deltas = [chunk.choices[0].delta for chunk in chunks]
    answer = own(model, temperature=0.8, seed=4, top_logprobs=2)
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == answer.text
    assert chunks[-1].choices[0].finish_reason == answer.finish
    assert (last.choices, last.usage.completion_tokens) == ([], len(answer.ids))
    found = [each for chunk in chunks if chunk.choices[0].logprobs for each in chunk.choices[0].logprobs.content]
    assert [each.logprob for each in found] == [each.logprob for each in answer.logprobs]
    assert [top.token for top in found[0].top_logprobs] == [token.text for token, _ in answer.logprobs[0].top]
    whole = client.chat.completions.create(model=NAME, messages=USER, **options)
    assert whole.choices[0].message.content == answer.text
    assert [each.logprob for each in whole.choices[0].logprobs.content] == [each.logprob for each in found]


@pytest.mark.parametrize("prompt", ["w5 w9", ["w5 w9"], [5, 9], [[5, 9]]], ids=str)
def test_completions_continue_text_and_tokens(client: Any, model: TextModel, prompt: Any) -> None:
    answer = own(model, "w5 w9", top_logprobs=1)
    found = client.completions.create(model=NAME, prompt=prompt, max_tokens=NUM_TOKENS, temperature=0, logprobs=1)
    (choice,) = found.choices
    assert (choice.text, choice.finish_reason) == (answer.text, answer.finish)
    assert choice.logprobs.token_logprobs == [each.logprob for each in answer.logprobs]
    begins = zip(choice.logprobs.tokens, choice.logprobs.text_offset, strict=True)
    assert all(choice.text.startswith(token, begin) for token, begin in begins)
    stop = answer.text.split()[2]
    options = {"max_tokens": NUM_TOKENS, "temperature": 0, "stop": stop}
    pieces = client.completions.create(model=NAME, prompt=prompt, stream=True, **options)
    assert "".join(piece.choices[0].text for piece in pieces) == answer.text[: answer.text.index(stop)]


def test_an_answer_without_a_limit_fills_the_context(client: Any) -> None:
    """Of completions, OpenAI's usual number of tokens, or what there is room for."""
    found = client.chat.completions.create(model=NAME, messages=USER, temperature=0)
    assert found.usage.total_tokens == CONTEXT or found.choices[0].finish_reason == "stop"
    for num_prompt, most in ((2, 16), (CONTEXT - 3, 3)):
        found = client.completions.create(model=NAME, prompt=[5] * num_prompt, temperature=0)
        assert found.usage.completion_tokens == most or found.choices[0].finish_reason == "stop"
    with pytest.raises(openai.BadRequestError, match="48 of the prompt"):
        client.completions.create(model=NAME, prompt=[5] * CONTEXT)


def test_models_and_health(client: Any, port: int) -> None:
    assert [each.id for each in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).id == NAME
    with pytest.raises(openai.NotFoundError, match="'other' is not served"):
        client.models.retrieve("other")
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", "/health")  # without a key
    assert connection.getresponse().status == 200
    connection.close()


@pytest.mark.parametrize(
    ("given", "kind", "text"),
    [
        ({"model": "other"}, "NotFoundError", "'other' is not served here, but 'tiny' is"),
        ({"max_tokens": CONTEXT}, "BadRequestError", "5 of the prompt [+] 48 of the answer"),
        ({"temperature": 3}, "BadRequestError", "temperature: Input should be less than or equal to 2"),
        ({"n": 2}, "BadRequestError", "n: not supported"),
        ({"logit_bias": {"5": 1}}, "BadRequestError", "logit_bias: not supported"),
        ({"response_format": {"type": "json_object"}}, "BadRequestError", "response_format: not supported"),
        ({"extra_body": {"top_q": 1}}, "BadRequestError", "top_q: unknown field"),
        ({"messages": []}, "BadRequestError", "messages: List should have at least 1 item"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "BadRequestError",
            "messages.0.content.0.type: Input should be 'text'",
        ),
    ],
)
def test_errors_name_the_field(client: Any, given: dict[str, Any], kind: str, text: str) -> None:
    with pytest.raises(getattr(openai, kind), match=text) as raised:
        client.chat.completions.create(**{"model": NAME, "messages": USER, **given})
    assert raised.value.body["type"] == "invalid_request_error"


def test_errors_of_the_transport(port: int, client: Any) -> None:
    with pytest.raises(openai.AuthenticationError, match="Incorrect API key"):
        client.with_options(api_key="wrong").models.list()
    body = json.dumps({"model": NAME, "messages": USER}).encode()
    assert post(port, body, **{"Content-Type": "text/plain"})[0] == 415
    assert post(port, b" " * (17 << 20))[0] == 413
    assert post(port, body, "/v1/embeddings")[0] == 404
    assert post(port, body, Authorization=f"bearer {KEY}")[0] == 200
    status, found = post(port, body[:-1])
    assert (status, found["error"]["type"]) == (400, "invalid_request_error")


@pytest.mark.parametrize(
    ("settings", "host", "status"),
    [
        ({"api_key": None}, "evil.example:8000", 403),
        ({"api_key": None}, "127.0.0.1.evil.example", 403),
        ({"api_key": None}, "[", 403),
        ({"api_key": None}, "localhost:8000", 200),
        ({"api_key": None}, "[::1]:8000", 200),
        ({}, "evil.example", 200),  # such a page has no key
        ({"api_key": None, "host": "0.0.0.0"}, "my-host", 200),
    ],
)
def test_without_a_key_a_local_server_is_asked_by_a_local_name(
    model: TextModel, settings: dict[str, Any], host: str, status: int
) -> None:
    with serving(model, **settings) as (_, port):
        body = {"model": NAME, "messages": USER, "max_tokens": 2}
        found = post(port, json.dumps(body).encode(), Host=host)
    assert found[0] == status
    assert status == 200 or host in found[1]["error"]["message"]


def sent(port: int, body: bytes, num_more: int = 0) -> socket.socket:
    """A connection that has sent a request, except the last bytes of its body."""
    length = len(body) + num_more
    lines = f"Content-Type: application/json\r\nAuthorization: Bearer {KEY}\r\nContent-Length: {length}\r\n\r\n"
    connection = socket.create_connection(("127.0.0.1", port))
    connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n" + lines.encode() + body)
    return connection


def test_a_body_that_ends_early_is_no_error(port: int, client: Any, caplog: pytest.LogCaptureFixture) -> None:
    sent(port, b'{"model', num_more=9).close()
    for _ in range(3):
        assert client.models.list()
    assert not caplog.text


def test_a_server_that_is_forced_to_end_reports_no_failures(model: TextModel, caplog: pytest.LogCaptureFixture) -> None:
    with serving(model) as (running, port):
        waiting = sent(port, b'{"model', num_more=9)
        post(port, b"{}")  # after which it has begun
        for _ in range(2):
            running.handle_exit(signal.SIGTERM, None)
    waiting.close()
    assert not caplog.text


def test_fields_without_effect_are_accepted(client: Any, model: TextModel) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages: list[Any] = [
        {"role": "developer", "content": [{"type": "text", "text": "w5"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "w9"},
    ]
    unset = {name for name, field in ChatRequest.model_fields.items() if not field.is_required()}
    given = {"tools": tools, "n": 1, "user": "x", "presence_penalty": 0, "max_tokens": 4, "temperature": 0}
    nothing = dict.fromkeys(unset - set(given))
    found = client.chat.completions.create(model=NAME, messages=messages, **given, extra_body=nothing)
    answer = own(model, "w7 w5 w8w7 w8w7 w9 w8 w11", max_new_tokens=4)
    assert found.choices[0].message.content == answer.text


def test_requests_beyond_the_queue_are_refused(client: Any, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on, add = threading.Event(), Answer._add

    def held(self: Answer, token: int) -> None:
        assert goes_on.wait(60)
        add(self, token)

    monkeypatch.setattr(Answer, "_add", held)
    body = json.dumps({"model": NAME, "messages": USER, "max_tokens": 2}).encode()
    results: list[tuple[int, Any]] = []
    threads = [threading.Thread(target=lambda: results.append(post(port, body))) for _ in range(QUEUE + 3)]
    for thread in threads:
        thread.start()
    while len(results) < 2:
        time.sleep(0.01)
    assert [(status, found["error"]["code"]) for status, found in results] == 2 * [(429, "queue_full")]
    with monkeypatch.context() as patch:
        patch.setattr(TextModel, "encode_chat", lambda *_: pytest.fail("a refused prompt is tokenised"))
        assert post(port, body)[0] == 429
    goes_on.set()
    for thread in threads:
        thread.join(60)
    assert sorted(status for status, _ in results) == [200] * (QUEUE + 1) + [429] * 2


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_ends_its_answer(
    port: int, client: Any, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it is answered, and while it waits."""
    began, goes_on, add, ended = threading.Event(), threading.Event(), Answer._add, []

    def held(self: Answer, token: int) -> None:
        began.set()
        assert goes_on.wait(60)
        add(self, token)

    def end(self: Answer, ends: Any) -> None:
        finish(self, ends)
        ended.append((self.finish, len(self.ids)))

    finish = Answer.end
    monkeypatch.setattr(Answer, "_add", held)
    monkeypatch.setattr(Answer, "end", end)
    body = json.dumps({"model": NAME, "messages": USER, "stream": stream}).encode()
    sockets = []
    for _ in range(2):
        sockets.append(sent(port, body))
        assert began.wait(60)
    while _metric(port, "requests_waiting") != 1:
        time.sleep(0.01)
    for each in sockets:
        each.close()
    while _metric(port, "requests_waiting") != 0:
        time.sleep(0.01)
    time.sleep(0.1)  # the running one is cancelled in the same way, which no counter shows
    goes_on.set()
    while not ended:
        time.sleep(0.01)
    assert client.chat.completions.create(model=NAME, messages=USER, max_tokens=1).choices
    assert ended == [("cancelled", 1), ("length", 1)]


def test_a_client_that_goes_before_the_first_event_is_noticed() -> None:
    began, ended = [], []

    async def events() -> AsyncIterator[str]:
        began.append(1)
        yield "data: 1\n\n"

    async def gone(*_: Any) -> Any:
        raise OSError

    stream = importlib.import_module("weightstream.serving.app")._EventStream(events(), on_end=lambda: ended.append(1))
    asyncio.run(stream({"type": "http", "asgi": {"spec_version": "2.4"}}, gone, gone))
    assert (began, ended) == ([], [1])


def test_a_signal_ends_running_and_waiting_requests(model: TextModel, monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on, add, found = threading.Event(), Answer._add, []

    def held(self: Answer, token: int) -> None:
        add(self, token)
        assert goes_on.wait(60)

    monkeypatch.setattr(Answer, "_add", held)
    body = {"model": NAME, "messages": USER}
    with serving(model, None) as (running, port):
        stream = HTTPConnection("127.0.0.1", port, timeout=60)
        stream.request("POST", "/v1/chat/completions", json.dumps(body | {"stream": True}), JSON)
        response = stream.getresponse()
        while b"w" not in response.readline().partition(b'"content": ')[2]:
            pass
        waiting = threading.Thread(target=lambda: found.append(post(port, json.dumps(body).encode())))
        waiting.start()
        while _metric(port, "requests_waiting") != 1:
            time.sleep(0.01)
        running.handle_exit(signal.SIGTERM, None)
        waiting.join(60)
        goes_on.set()
        events = [line for line in response.read().splitlines() if line]
        stream.close()
    assert found[0][0] == 503
    assert json.loads(events[-1].removeprefix(b"data: "))["error"]["message"] == "The server is shutting down"


def _metric(port: int, name: str) -> float:
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", "/metrics", headers={"Authorization": f"Bearer {KEY}"})
    text = connection.getresponse().read().decode()
    connection.close()
    return float(text.partition(f"\nweightstream_{name} ")[2].partition("\n")[0])


def test_a_failure_of_the_model_is_an_error_of_the_server(
    client: Any, port: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise OSError("disk gone")

    with monkeypatch.context() as patch:
        patch.setattr(Answer, "_add", fail)
        with pytest.raises(openai.InternalServerError, match="The model failed: OSError"):
            client.chat.completions.create(model=NAME, messages=USER)
        with pytest.raises(openai.APIError, match="The model failed: OSError"):
            list(client.chat.completions.create(model=NAME, messages=USER, stream=True))
    assert "disk gone" in caplog.text
    assert _metric(port, "requests_failed_total") == 2
    assert client.chat.completions.create(model=NAME, messages=USER, max_tokens=1).choices


def fuzzed(draw: random.Random) -> bytes:
    """A body that no request can have."""
    odd = [None, True, -1, 1e400, 10**30, "", "\x00", "x" * 5000, [], [[]], {}, {"a": {}}, [None], 0.5, "auto"]
    body: dict[str, Any] = {"model": NAME, "messages": USER, "max_tokens": 1}
    kind = draw.randrange(5)
    if kind == 0:  # a value of another type
        wrong = {"model": [3, None, {}], "messages": odd[:-2], "max_tokens": [-1, 0, "a", 0.5, [], 10**30]}
        wrong |= {"stream": ["yes", 2, []], "temperature": [-1, "a", 1e400, []], "stop": [3, {}, [""], [[]]]}
        wrong |= {"seed": [1e400, "a", 2**70], "logprobs": [3, "a"], "tools": [3, [3], [{}], {}], "top_p": [2, "a"]}
        name = draw.choice(sorted(wrong))
        body[name] = draw.choice(wrong[name])
    elif kind == 1:  # a field that there is not
        body["".join(draw.choice("abcdefé_") for _ in range(9)) + "z"] = draw.choice(odd[1:])
    elif kind == 2:  # a message that is none
        message = {"role": draw.choice(["user", "king", 3, None]), "content": draw.choice([3, {}, [3], [{}], True])}
        body["messages"] = [*USER, message]
    elif kind == 3:  # no JSON, or cut
        data = json.dumps(body).encode()
        at = draw.randrange(1, len(data))
        return draw.choice(
            [data[:at], data[:at] + b"\xff" + data[at:], b"[" * 9999, b"", b"3", b'"\\ud800"', data + b"x"]
        )
    else:
        del body[draw.choice(["model", "messages"])]
    return json.dumps(body).encode()


@pytest.mark.parametrize("num", [60, pytest.param(500, marks=pytest.mark.stress)])
def test_fuzzed_bodies_are_refused(port: int, num: int, caplog: pytest.LogCaptureFixture) -> None:
    draw = random.Random(num)
    for _ in range(num):
        body = fuzzed(draw)
        status, found = post(port, body)
        assert 400 <= status < 500, body
        assert set(found["error"]) == {"message", "type", "param", "code"}
    assert not caplog.text
