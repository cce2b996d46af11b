"""The OpenAI API as an ASGI application: routes, errors, and the way of a request to the model and back.

[Note: why not transformers' server] transformers 5.24 has one (`transformers serve`). It loads models by a private
method, calls `model.generate` itself, starts a request whenever one comes, and refuses logprobs, `stream_options` and
`n`; nothing in it bounds a queue, checks a key or reports errors in OpenAI's form. What could be shared is the routing
of four paths, which Starlette has. FastAPI would add a second validation: bodies are parsed and checked in one pass, by
pydantic, so that every error has OpenAI's form.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import wraps
from ipaddress import ip_address
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from weightstream.serving.metrics import Metrics
from weightstream.serving.replies import DONE, ChatReply, CompletionReply, event, usage_of
from weightstream.serving.request_queue import ClosingError, Job, JobError, QueueFullError, RequestQueue
from weightstream.serving.requests import ApiError, ChatRequest, CompletionRequest, parsed
from weightstream.text.engine import Inputs, PromptError, TextModel
from weightstream.text.sampling import Sampling
from weightstream.text.stream import Answer, Piece

logger = logging.getLogger("weightstream")

_MOST_BODY_NBYTES = 4 << 20  # a million tokens; tokenizers take seconds for more
_RETRY_S = "1"

AnswerJob = Job[Piece, Answer]
Endpoint = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A loaded model, and what its requests may take.

    Attributes:
        model: the model.
        name: by which requests ask for it.
        context: tokens of prompt and answer together, at most.
        drafts: those of `TextModel.exact_drafts`: answers do not depend on what is drafted.
        api_key: None: requests need none.
    """

    model: TextModel
    name: str
    context: int
    drafts: Mapping[str, Any]
    api_key: str | None = None


class _Asked(NamedTuple):
    """A request that was checked."""

    inputs: Inputs
    sampling: Sampling

    @property
    def num_prompt(self) -> int:
        return self.inputs["input_ids"].shape[1]


def application(served: ServedModel, queue: RequestQueue, *, is_local: bool) -> Starlette:
    """The application that answers with a model, whose requests take turns.

    If it `is_local`, and needs no key, requests have to name this machine by a loopback name or address.
    """
    api = _Api(served, queue, any_host=served.api_key is not None or not is_local)
    routes = [
        Route("/v1/chat/completions", api.guarded(api.chat), methods=["POST"]),
        Route("/v1/completions", api.guarded(api.completions), methods=["POST"]),
        Route("/v1/models", api.guarded(api.models)),
        Route("/v1/models/{name:path}", api.guarded(api.model)),
        Route("/metrics", api.guarded(api.metrics)),
        Route("/health", api.health),
    ]
    handlers: Any = {ApiError: _api_error, HTTPException: _http_error}
    return Starlette(routes=routes, exception_handlers=handlers)


async def _api_error(_: Request, error: ApiError) -> Response:
    headers = {"Retry-After": _RETRY_S} if error.status in (429, 503) else None
    return JSONResponse(error.body, error.status, headers)


async def _http_error(request: Request, error: HTTPException) -> Response:
    found = ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
    return JSONResponse(found.body, error.status_code, error.headers)


def _failed(error: Exception) -> ApiError:
    """The error of a request that may be good."""
    if isinstance(error, ClosingError):
        return ApiError(503, "The server is shutting down")
    cause = error.cause if isinstance(error, JobError) else error
    logger.error("serve: a request failed: %s: %s", type(cause).__name__, cause, exc_info=cause)
    return ApiError(500, f"The model failed: {type(cause).__name__}; the server's log has the details")


class _Api:
    def __init__(self, served: ServedModel, queue: RequestQueue, *, any_host: bool) -> None:
        self._served = served
        self._queue = queue
        self._any_host = any_host
        self._metrics = Metrics()

    def guarded(self, endpoint: Endpoint) -> Endpoint:
        """The endpoint, for requests that have the API key, if there is one, and name an allowed host."""

        @wraps(endpoint)
        async def checked(request: Request) -> Response:
            key = self._served.api_key
            scheme, _, given = request.headers.get("authorization", "").encode("latin-1").partition(b" ")
            if key is not None and not (scheme.lower() == b"bearer" and hmac.compare_digest(given, key.encode())):
                raise ApiError(401, "Incorrect API key provided", code="invalid_api_key")
            host = request.headers.get("host", "localhost")
            if not (self._any_host or _is_loopback(host)):
                raise ApiError(
                    403, f"The Host header {host} does not name this machine: ask localhost, or set an API key"
                )
            try:
                return await endpoint(request)
            except (ApiError, HTTPException):
                raise
            except ClientDisconnect:
                return Response(status_code=499)  # it gets no reply
            except Exception as error:
                raise _failed(error) from error

        return checked

    # -- facts ---------------------------------------------------------------------------------------------------------

    async def health(self, _: Request) -> Response:
        is_alive = self._queue.is_alive
        return JSONResponse({"status": "ok" if is_alive else "stopped"}, 200 if is_alive else 503)

    async def metrics(self, _: Request) -> Response:
        stats = await asyncio.to_thread(self._served.model.streamer.stats)  # it may wait for a copy
        text = self._metrics.text(self._queue, stats)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    async def models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        self._check_name(request.path_params["name"])
        return JSONResponse(self._model())

    def _model(self) -> dict[str, Any]:
        return {
            "id": self._served.name,
            "object": "model",
            "created": self._metrics.started_at,
            "owned_by": "weightstream",
            "max_model_len": self._served.context,
        }

    def _check_name(self, name: str) -> None:
        if name != self._served.name:
            raise ApiError(
                404, f"The model {name!a} is not served here, but {self._served.name!a} is", code="model_not_found"
            )

    # -- answers -------------------------------------------------------------------------------------------------------

    async def chat(self, request: Request) -> Response:
        body = parsed(ChatRequest, await _body(request))
        return await self._answered(request, body)

    async def completions(self, request: Request) -> Response:
        body = parsed(CompletionRequest, await _body(request))
        return await self._answered(request, body)

    async def _answered(self, request: Request, body: ChatRequest | CompletionRequest) -> Response:
        self._check_name(body.model)
        if self._queue.is_full:
            raise self._refused()  # before the prompt is tokenised
        asked = await self._checked(body)
        kind = ChatReply if isinstance(body, ChatRequest) else CompletionReply
        reply = kind(model=self._served.name, has_logprobs=asked.sampling.top_logprobs is not None)
        job = self._submitted(asked)
        if body.stream:
            events = _events(job, reply, asked.num_prompt, wants_usage=body.wants_usage)
            return _EventStream(events, on_end=lambda: self._queue.withdraw(job))
        try:
            answer = await _unless_gone(request, job.result())
        finally:
            self._queue.withdraw(job)
        return JSONResponse(reply.whole(answer, asked.num_prompt))

    async def _checked(self, body: ChatRequest | CompletionRequest) -> _Asked:
        try:
            inputs = await asyncio.to_thread(body.encoded, self._served.model)  # long prompts take a while
        except PromptError as error:
            raise ApiError(400, _text(str(error))) from error
        return _Asked(inputs, body.sampling(inputs["input_ids"].shape[1], self._served.context))

    def _submitted(self, asked: _Asked) -> AnswerJob:
        def work(job: AnswerJob) -> Answer:
            try:
                answer = self._served.model.generate(
                    asked.inputs,
                    asked.sampling,
                    on_piece=job.add,
                    is_cancelled=lambda: job.is_cancelled,
                    cache_length=self._served.context,
                    **self._served.drafts,
                )
            except BaseException:
                self._metrics.num_failed += 1
                raise
            self._metrics.answered(answer, asked.num_prompt, job.created_at)
            return answer

        job = AnswerJob(work)
        try:
            self._queue.submit(job)
        except QueueFullError:  # it filled up meanwhile
            raise self._refused() from None
        return job

    def _refused(self) -> ApiError:
        self._metrics.num_refused += 1
        return ApiError(429, "Too many requests are waiting; try again later", code="queue_full")


class _EventStream(StreamingResponse):
    """Events as they come. `on_end` is called however the response ends: also if the client goes before the first."""

    def __init__(self, events: AsyncIterator[str], *, on_end: Callable[[], object]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with suppress(ClientDisconnect):
                await super().__call__(scope, receive, send)
        finally:
            self._on_end()


async def _events(
    job: AnswerJob, reply: ChatReply | CompletionReply, num_prompt: int, *, wants_usage: bool
) -> AsyncIterator[str]:
    """The events of an answer."""
    try:
        if (opening := reply.opening()) is not None:
            yield event(opening)
        while (piece := await job.next_piece()) is not None:
            yield event(reply.piece(piece))
        answer = await job.result()
        yield event(reply.ending(answer.finish))
        if wants_usage:
            yield event(reply.usage(usage_of(num_prompt, len(answer.ids))))
        yield DONE
    except Exception as error:
        yield event(_failed(error).body)


def _text(message: str) -> str:
    """A message that can be sent: one that quotes a prompt may hold halves of surrogate pairs."""
    return message.encode(errors="replace").decode()


def _is_loopback(host: str) -> bool:
    """Whether a Host header names a loopback address. A page of another site may have its own name lead here (DNS
    rebinding), but its browser still sends that name."""
    with suppress(ValueError):
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or ip_address(name).is_loopback
    return False


async def _body(request: Request) -> bytes:
    """The body of a request. A page of another site can send one, but not as JSON without asking first (CORS)."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, "The body is JSON: send the header Content-Type: application/json")
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > _MOST_BODY_NBYTES:
            raise ApiError(413, f"The body is longer than {_MOST_BODY_NBYTES} bytes")
    return bytes(data)


async def _unless_gone(request: Request, result: Awaitable[Answer]) -> Answer:
    """The result; raises `ClientDisconnect` as soon as the client has gone."""
    gone, found = asyncio.ensure_future(request.receive()), asyncio.ensure_future(result)
    try:
        await asyncio.wait({gone, found}, return_when=asyncio.FIRST_COMPLETED)
        if not found.done():
            raise ClientDisconnect
        return found.result()
    finally:
        gone.cancel()
        found.cancel()
