"""The client of serve.py, in a process of its own, as a user's: it shares no interpreter lock with the server.

    python benchmarks/serve_client.py PORT

A line of its stdin is the body of a completion as a stream. For each it prints a line: the `seconds` from just before
the request to each event with text, and the `text`.
"""

from __future__ import annotations

import json
import sys
import time
from http.client import HTTPConnection
from typing import Any


def completed(port: int, body: str) -> dict[str, Any]:
    connection, seconds, texts = HTTPConnection("127.0.0.1", port), [], []
    started = time.perf_counter()
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    for line in connection.getresponse():
        arrived = time.perf_counter()
        if line.startswith(b"data: {") and (text := json.loads(line[6:])["choices"][0]["text"]):
            seconds.append(arrived - started)
            texts.append(text)
    connection.close()
    return {"seconds": seconds, "text": "".join(texts)}


if __name__ == "__main__":
    for body in sys.stdin:
        print(json.dumps(completed(int(sys.argv[1]), body)), flush=True)
