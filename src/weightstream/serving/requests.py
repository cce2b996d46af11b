"""Requests of the OpenAI API: bodies of chat completions and completions, checked field by field. Knows no HTTP.

A field that would change the text, and that is not supported, is refused by name. Fields that only concern OpenAI's own
service, such as `user` and `store`, are accepted and have no effect.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from weightstream.text.engine import Inputs, TextModel
from weightstream.text.sampling import Sampling

_MOST_TOP, _MOST_TOP_OF_COMPLETIONS = 20, 5  # log-probabilities of a token, as in OpenAI's API
_MOST_STOPS = 16
_TOKENS_OF_COMPLETIONS = 16  # as in OpenAI's API

_OF_THE_SERVICE = frozenset(
    "user metadata store service_tier prompt_cache_key prompt_cache_retention safety_identifier prediction "  # noqa: SIM905
    "parallel_tool_calls".split()
)
# Fields that are not supported, with the values by which clients say that they do not use them.
_WITHOUT_EFFECT = MappingProxyType(
    {
        "n": (1,),
        "best_of": (1,),
        "echo": (False,),
        "suffix": ("",),
        "presence_penalty": (0,),
        "frequency_penalty": (0,),
        "logit_bias": ({},),
        "response_format": ({"type": "text"},),
        "modalities": (["text"],),
        "functions": ([],),
        "function_call": ("auto", "none"),
        "audio": (),
        "web_search_options": (),
        "reasoning_effort": (),
        "verbosity": ("medium",),
    }
)


class ApiError(Exception):
    """An error that a client gets, in OpenAI's form."""

    def __init__(self, status: int, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        kind = kinds.get(status, "server_error" if status >= 500 else "invalid_request_error")
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


_Stop = Annotated[str, Field(min_length=1)]


class _StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # of OpenAI's connections: no effect


class _Body(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True, strict=True, allow_inf_nan=False)

    model: str
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: Annotated[Annotated[list[_Stop], Field(max_length=_MOST_STOPS)] | None, BeforeValidator(_listed)] = None

    @model_validator(mode="after")
    def _knows_its_fields(self) -> Self:
        for name, value in (self.model_extra or {}).items():
            if name in _OF_THE_SERVICE or value is None:
                continue
            if name not in _WITHOUT_EFFECT:
                raise ApiError(400, f"{name}: unknown field", code="unknown_parameter", param=name)
            if value not in _WITHOUT_EFFECT[name]:
                raise ApiError(400, f"{name}: not supported; leave it out", code="unsupported_parameter", param=name)
        return self

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with a chunk of the tokens used."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def most_tokens(self) -> int | None:
        """The limit of the answer's tokens; None: the request has none."""
        return self.max_tokens

    @property
    def usual_tokens(self) -> int | None:
        """The limit where the request has none; None: all that the context has room for."""
        return None

    @property
    def num_top(self) -> int | None:
        """The most likely tokens whose log-probabilities are wanted; None: no log-probabilities."""
        raise NotImplementedError

    def encoded(self, model: TextModel) -> Inputs:
        """The tokens of the prompt. Raises `PromptError`."""
        raise NotImplementedError

    def sampling(self, num_prompt: int, context: int) -> Sampling:
        """How the answer is generated, after a prompt of so many tokens and within `context` tokens."""
        room, most = context - num_prompt, self.most_tokens
        if room < (most or 1):
            wanted = "an answer" if most is None else f"{most} of the answer"
            raise ApiError(
                400,
                f"This server's context is {context} tokens, and {num_prompt} of the prompt + {wanted} are more: "
                "shorten one of them, or start the server with a larger --context",
                code="context_length_exceeded",
            )
        return Sampling(
            max_new_tokens=most or min(room, self.usual_tokens or room),
            temperature=self.temperature,
            top_p=self.top_p,
            seed=self.seed,
            stop=tuple(self.stop or ()),
            top_logprobs=self.num_top,
        )


class _TextPart(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    type: Literal["text"]
    text: str


class _CalledFunction(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    name: str
    arguments: str | dict[str, Any] | None = None


class _ToolCall(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    id: str | None = None
    type: Literal["function"] = "function"
    function: _CalledFunction

    def for_template(self) -> dict[str, Any]:
        """The call as chat templates have it: with an object of arguments, which are a JSON text in OpenAI's API."""
        arguments: Any = self.function.arguments
        if isinstance(arguments, str):
            with suppress(ValueError, RecursionError):  # a model may have written anything
                arguments = json.loads(arguments)
        return {"id": self.id, "type": self.type, "function": {"name": self.function.name, "arguments": arguments}}


class _Message(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)  # clients send back what they were sent

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[_TextPart] | None = None
    name: str | None = None
    tool_calls: list[_ToolCall] | None = None
    tool_call_id: str | None = None

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates have it."""
        content = self.content or ""
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": text}
        message |= {name: value for name in ("name", "tool_call_id") if (value := getattr(self, name)) is not None}
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        return message


class _ToolFunction(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True, strict=True)

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _Tool(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True, strict=True)

    type: Literal["function"]
    function: _ToolFunction


class ChatRequest(_Body):
    """The body of /v1/chat/completions. Descriptions of tools go to the chat template; calls come as text."""

    messages: list[_Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=_MOST_TOP)
    tools: list[_Tool] | None = None
    tool_choice: Literal["auto", "none"] | None = None

    @property
    def most_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def num_top(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def encoded(self, model: TextModel) -> Inputs:
        messages = [message.for_template() for message in self.messages]
        tools = [] if self.tool_choice == "none" else self.tools or []
        return model.encode_chat(messages, [tool.model_dump(exclude_none=True) for tool in tools])


class CompletionRequest(_Body):
    """The body of /v1/completions: one prompt, as text or tokens."""

    prompt: str | list[int] | list[str] | list[list[int]]
    logprobs: int | None = Field(None, ge=0, le=_MOST_TOP_OF_COMPLETIONS)

    @property
    def usual_tokens(self) -> int | None:
        return _TOKENS_OF_COMPLETIONS

    @property
    def num_top(self) -> int | None:
        return self.logprobs

    def encoded(self, model: TextModel) -> Inputs:
        prompt: Any = self.prompt
        if isinstance(prompt, list) and not (prompt and isinstance(prompt[0], int)):
            if len(prompt) != 1:
                raise ApiError(400, f"prompt: a request has one prompt, not {len(prompt)}", param="prompt")
            (prompt,) = prompt
        return model.encode(prompt) if isinstance(prompt, str) else model.encode_ids(prompt)


_AnyBody = TypeVar("_AnyBody", bound=_Body)


def parsed(kind: type[_AnyBody], data: bytes) -> _AnyBody:
    """The request of a body. Raises `ApiError` with the first field that is wrong."""
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        found = _most_specific(error.errors(include_url=False, include_input=False))
        # in the path of a union, members come as the names of their types
        path = [part for part in found["loc"] if isinstance(part, int) or (part.isidentifier() and part != "str")]
        at = ".".join(map(str, path))
        name = str(path[0]) if path else None
        raise ApiError(400, f"{at}: {found['msg']}" if at else found["msg"], param=name) from None


def _most_specific(errors: Sequence[Any]) -> Any:
    """Of a union there is an error for each member: the deepest is of the member that was meant."""
    same = [each for each in errors if each["loc"][:1] == errors[0]["loc"][:1]]
    return max(same, key=lambda each: len(each["loc"]))
