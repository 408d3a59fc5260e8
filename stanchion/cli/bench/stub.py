"""A server that answers at stated times and computes nothing, to hold load generators against.

`python -m stanchion.cli.bench.stub serve` prints its port and answers every completion with chunks
of one token, the first after `FIRST_S`, the others `NEXT_S` apart. `... trace RATE SECONDS` prints
a trace of Mooncake's format, evenly spaced, whose prompts share their first blocks.

When completions were asked for is said, once, at `/arrivals`: seconds of the monotonic clock. So
all generators are judged by one clock that is not theirs.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

MODEL = "stub"
FIRST_S, NEXT_S = 0.05, 0.01
TOKENS = 8
INPUT, BLOCK = 1024, 512
SHARED = 10  # requests that have a first block in common
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\n"


class Stub(asyncio.Protocol):
    def __init__(self, arrivals: list[float]) -> None:
        self._arrivals = arrivals
        self._rest = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._rest += data
        while (request := self._taken()) is not None:
            self._answer(*request)

    def _taken(self) -> tuple[bytes, bytes] | None:
        """The first whole request: its path and its body."""
        head, end, rest = self._rest.partition(b"\r\n\r\n")
        if not end:
            return None
        length = 0
        for line in head.split(b"\r\n")[1:]:
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                length = int(value)
        if len(rest) < length:
            return None
        self._rest = rest[length:]
        return head.split(b" ", 2)[1], rest[:length]

    def _answer(self, path: bytes, raw: bytes) -> None:
        if path.startswith(b"/v1/models"):
            said = {
                "object": "list",
                "data": [{"id": MODEL, "object": "model", "owned_by": "stub"}],
            }
            self._whole(json.dumps(said).encode())
            return
        if path == b"/arrivals":
            self._whole(json.dumps(self._arrivals).encode())
            self._arrivals.clear()
            return
        if not path.startswith((b"/v1/completions", b"/v1/chat/completions")):
            self._whole(b"{}")
            return
        self._arrivals.append(time.monotonic())
        chat = b"chat" in path
        loop = asyncio.get_running_loop()
        self._transport.write(HEAD % b"text/event-stream" + b"transfer-encoding: chunked\r\n\r\n")
        for at in range(TOKENS):
            loop.call_later(FIRST_S + at * NEXT_S, self._event, _chunk(chat, at == TOKENS - 1))
        usage = {
            "prompt_tokens": INPUT,
            "completion_tokens": TOKENS,
            "total_tokens": INPUT + TOKENS,
        }
        last = _json({"choices": [], "usage": usage}) + b"data: [DONE]\n\n"
        loop.call_later(FIRST_S + (TOKENS - 1) * NEXT_S, self._event, last, True)

    def _event(self, data: bytes, last: bool = False) -> None:
        if not self._transport.is_closing():
            end = b"0\r\n\r\n" if last else b""
            self._transport.write(b"%x\r\n%s\r\n%s" % (len(data), data, end))

    def _whole(self, body: bytes) -> None:
        head = HEAD % b"application/json"
        self._transport.write(head + b"content-length: %d\r\n\r\n%s" % (len(body), body))


def _chunk(chat: bool, last: bool) -> bytes:
    choice: dict[str, Any] = {"index": 0, "finish_reason": "length" if last else None}
    choice |= {"delta": {"role": "assistant", "content": " x"}} if chat else {"text": " x"}
    kind = "chat.completion.chunk" if chat else "text_completion"
    return _json({"id": "x", "object": kind, "created": 1, "model": MODEL, "choices": [choice]})


def _json(said: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(said).encode() + b"\n\n"


def trace(rate: float, seconds: float) -> list[dict[str, Any]]:
    """Requests of Mooncake's format, evenly spaced."""
    return [
        {
            "timestamp": round(1000 * at / rate),
            "input_length": INPUT,
            "output_length": TOKENS,
            "hash_ids": [at // SHARED, 1_000_000 + at],
        }
        for at in range(int(rate * seconds))
    ]


async def serve(port: int) -> None:
    arrivals: list[float] = []
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Stub(arrivals), "127.0.0.1", port)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def main() -> None:
    match sys.argv[1:]:
        case ["serve", *port]:
            asyncio.run(serve(int(port[0]) if port else 0))
        case ["trace", rate, seconds]:
            print("\n".join(map(json.dumps, trace(float(rate), float(seconds)))))
        case _:
            sys.exit("stub serve [PORT] | stub trace RATE SECONDS")


if __name__ == "__main__":
    main()
