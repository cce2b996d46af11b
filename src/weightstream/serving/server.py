"""The HTTP server: a socket, uvicorn, and an end that leaves no request hanging."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import uvicorn

from weightstream.errors import ConfigError
from weightstream.serving.app import ServedModel, application
from weightstream.serving.request_queue import RequestQueue

_BACKLOG = 128  # connections that the kernel accepts ahead
_CLOSING_S = 5  # for clients that do not read the last bytes
_LAST_TOKEN_S = 30.0  # for the step in which the last job notices that it is cancelled


def bound_socket(host: str, port: int) -> socket.socket:
    """A socket at an address, before a long load; it listens once the model is loaded. Raises `ConfigError`."""
    with _refused(host, port):
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with ExitStack() as on_failure:
            bound = on_failure.enter_context(socket.socket(family, kind, protocol))
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
            on_failure.pop_all()
    return bound


def is_local(at: socket.socket) -> bool:
    """Whether only this machine reaches the socket."""
    return ipaddress.ip_address(at.getsockname()[0]).is_loopback


@contextmanager
def _refused(host: str, port: int) -> Iterator[None]:
    """Inside, errors of an address are `ConfigError`s."""
    try:
        yield
    except (OSError, UnicodeError) as error:  # a name that cannot be encoded
        raise ConfigError(f"--host {host} --port {port}: {getattr(error, 'strerror', None) or error}") from error


def _is_failure(record: logging.LogRecord) -> bool:
    """Whether a record of uvicorn's log is none of a request that the end of the server has cancelled."""
    return record.exc_info is None or not isinstance(record.exc_info[1], asyncio.CancelledError)


class _Server(uvicorn.Server):
    """uvicorn that cancels requests when it is to end, and then returns, whatever signal it was."""

    def __init__(self, config: uvicorn.Config, queue: RequestQueue, on_start: Callable[[], object]) -> None:
        super().__init__(config)
        self._queue = queue
        self._on_start = on_start

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_start()

    def handle_exit(self, sig: int, frame: Any) -> None:
        self.force_exit = self.should_exit  # at the second signal
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._queue.close()
        await super().shutdown(sockets)


def serve_forever(
    served: ServedModel, at: socket.socket, most_waiting: int, on_start: Callable[[], object] = lambda: None
) -> None:
    """Answer requests until SIGINT or SIGTERM, at which clients that wait for an answer get an error.

    `on_start` is called once requests are accepted.
    """
    with _refused(*at.getsockname()[:2]):
        at.listen(_BACKLOG)  # fails if another process has bound the address, too, and was first
    queue = RequestQueue(most_waiting)
    config = uvicorn.Config(
        application(served, queue, is_local=is_local(at)),
        log_config=None,
        backlog=_BACKLOG,
        access_log=False,
        timeout_graceful_shutdown=_CLOSING_S,
        lifespan="off",
        ws="none",
    )
    log = logging.getLogger("uvicorn.error")
    log.addFilter(_is_failure)
    try:
        asyncio.run(_Server(config, queue, on_start).serve([at]))
    finally:
        log.removeFilter(_is_failure)
        queue.close()
        queue.join(_LAST_TOKEN_S)
