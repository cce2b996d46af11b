"""Counters of a server, in the text format of Prometheus."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from weightstream.serving.request_queue import RequestQueue
from weightstream.text.stream import Answer

if TYPE_CHECKING:
    from weightstream.runtime.streamer.stats import Stats


class Metrics:
    """Sums over all answers. The thread of turns adds to them, and the event loop reads them."""

    def __init__(self) -> None:
        self.started_at = int(time.time())
        self.num_refused = 0
        self.num_failed = 0
        self._lock = threading.Lock()
        self._num_by_finish = dict.fromkeys(("stop", "length", "cancelled"), 0)
        self._num_prompt_tokens = 0
        self._num_tokens = 0
        self._waited_s = 0.0
        self._first_token_s = 0.0
        self._answered_s = 0.0

    def answered(self, answer: Answer, num_prompt: int, created_at: float) -> None:
        """Count an answer, whose request was made at `created_at` of the monotonic clock."""
        with self._lock:
            if answer.finish is not None:
                self._num_by_finish[answer.finish] += 1
            self._num_prompt_tokens += num_prompt
            self._num_tokens += len(answer.ids)
            self._first_token_s += answer.first_token_s
            self._answered_s += answer.seconds
            self._waited_s += max(0.0, time.monotonic() - created_at - answer.seconds)

    def text(self, queue: RequestQueue, stats: Stats) -> str:
        """All counters as of now."""
        with self._lock:
            lines = [
                _metric("requests_waiting", "gauge", "Requests that wait for their turn.", queue.num_waiting),
                _metric("requests_running", "gauge", "Requests at the model: 1 or 0.", int(queue.is_running)),
                _metric("requests_refused_total", "counter", "Requests that found the queue full.", self.num_refused),
                _metric("requests_failed_total", "counter", "Requests that the model failed.", self.num_failed),
                *_by_finish(self._num_by_finish),
                _metric("prompt_tokens_total", "counter", "Tokens of prompts.", self._num_prompt_tokens),
                _metric("generated_tokens_total", "counter", "Tokens of answers.", self._num_tokens),
                _metric("waiting_seconds_total", "counter", "Seconds in the queue.", self._waited_s),
                _metric("first_token_seconds_total", "counter", "Seconds to first tokens.", self._first_token_s),
                _metric("answer_seconds_total", "counter", "Seconds at the model.", self._answered_s),
            ]
        lines += [
            _metric("steps_total", "counter", "Steps of the model.", stats.steps),
            _metric("streamed_bytes_total", "counter", "Bytes of weights over the link.", stats.filled_nbytes),
            _metric("stall_seconds_total", "counter", "Seconds that compute waited for weights.", stats.stall_s),
        ]
        if (drafts := stats.speculation) is not None:
            lines += [
                _metric("drafted_tokens_total", "counter", "Tokens that were drafted.", drafts.drafted),
                _metric("accepted_tokens_total", "counter", "Drafted tokens that were accepted.", drafts.accepted),
            ]
        return "".join(lines)


def _metric(name: str, kind: str, text: str, value: float) -> str:
    full = f"weightstream_{name}"
    return f"# HELP {full} {text}\n# TYPE {full} {kind}\n{full} {value}\n"


def _by_finish(counts: dict[str, int]) -> list[str]:
    name = "weightstream_answers_total"
    head = f"# HELP {name} Answers by why they ended.\n# TYPE {name} counter\n"
    return [head, *(f'{name}{{finish="{finish}"}} {num}\n' for finish, num in counts.items())]
