"""A server that answers by a script, in vLLM's words: what stands behind the gateways that are
measured. `python -m stanchion.cli.bench.streams --log FILE ...`

It notes when each chunk of each answer was sent, in a file that both sides map: seconds of the
machine's monotonic clock, a row for each request number (the prompt's first word), a column for
each chunk. Prompts come as text or as token ids; each chunk has three tokens of source text.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn
from numpy.typing import NDArray

from stanchion.cli.settings import model_folder
from stanchion.gateway.tokens import Vocabulary, load_vocabulary
from stanchion.lab.corpus import tokens

MODEL = "stub"
TOKENS_A_CHUNK = 3
FACTS: dict[str, bytes] = {
    "/health": b"{}",
    "/metrics": b"vllm:num_requests_running 0\n",
    "/v1/models": json.dumps(
        {
            "object": "list",
            "data": [{"id": MODEL, "object": "model", "owned_by": "vllm", "max_model_len": 32768}],
        }
    ).encode(),
}

Send = Callable[[dict[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[dict[str, Any]]]


@dataclass(frozen=True)
class Script:
    """The first chunk comes after `first_s`, the others `gap_s` apart; 0: as fast as can be."""

    chunks: int
    first_s: float
    gap_s: float


@dataclass
class Stub:
    vocabulary: Vocabulary
    corpus: Sequence[int]
    script: Script
    sent: NDArray[np.float64]

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        body = await _body(receive)
        if scope["path"] == "/v1/completions":
            await self._stream(json.loads(body), send)
            return
        fact = FACTS.get(scope["path"])
        await _start(send, 200 if fact is not None else 404, b"application/json")
        await send({"type": "http.response.body", "body": fact or b"{}"})

    async def _stream(self, body: dict[str, Any], send: Send) -> None:
        number = self._number(body["prompt"])
        began = time.monotonic()
        await _start(send, 200, b"text/event-stream")
        for chunk in range(self.script.chunks):
            due = began + self.script.first_s + chunk * self.script.gap_s
            if (wait := due - time.monotonic()) > 0:
                await asyncio.sleep(wait)
            event = self._event(number, chunk, body)
            self.sent[number, chunk] = time.monotonic()
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": self._end(body)})

    def _number(self, prompt: str | list[int]) -> int:
        if not isinstance(prompt, str):
            prompt = b"".join(self.vocabulary.pieces[one] for one in prompt[:16]).decode(
                errors="replace"
            )
        return int(prompt.split()[0])

    def _event(self, number: int, chunk: int, body: dict[str, Any]) -> bytes:
        first = (number * 7919 + chunk * TOKENS_A_CHUNK) % (len(self.corpus) - TOKENS_A_CHUNK)
        ids = list(self.corpus[first : first + TOKENS_A_CHUNK])
        text = b"".join(self.vocabulary.pieces[one] for one in ids).decode(errors="replace")
        choice: dict[str, Any] = {"index": 0, "text": text, "finish_reason": None}
        if body.get("return_token_ids"):
            choice["token_ids"] = ids
        if body.get("logprobs") is not None:
            names = [f"token_id:{one}" for one in ids]
            choice["logprobs"] = {
                "tokens": names,
                "token_logprobs": [-0.5] * len(ids),
                "top_logprobs": [{name: -0.5} for name in names],
            }
        return _data({"id": f"{number}", "model": MODEL, "choices": [choice]})

    def _end(self, body: dict[str, Any]) -> bytes:
        end = {"index": 0, "text": "", "finish_reason": "length"}
        count = self.script.chunks * TOKENS_A_CHUNK
        usage = {"prompt_tokens": 16, "completion_tokens": count, "total_tokens": 16 + count}
        last = _data({"model": MODEL, "choices": [end]})
        return last + _data({"model": MODEL, "choices": [], "usage": usage}) + b"data: [DONE]\n\n"


def _data(event: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(event).encode() + b"\n\n"


async def _body(receive: Receive) -> bytes:
    parts: list[bytes] = []
    while True:
        message = await receive()
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)


async def _start(send: Send, status: int, kind: bytes) -> None:
    headers = [(b"content-type", kind)]
    await send({"type": "http.response.start", "status": status, "headers": headers})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--requests", type=int, required=True, help="rows of the log")
    parser.add_argument("--chunks", type=int, required=True)
    parser.add_argument("--first-ms", type=float, default=0.0)
    parser.add_argument("--gap-ms", type=float, default=0.0)
    parser.add_argument("--port", type=int, required=True)
    asked = parser.parse_args()
    script = Script(asked.chunks, asked.first_ms / 1000, asked.gap_ms / 1000)
    shape = (asked.requests, asked.chunks)
    sent = np.memmap(asked.log, np.float64, "w+", shape=shape)
    vocabulary = load_vocabulary(model_folder("tiny"))
    stub = Stub(vocabulary, tokens(vocabulary), script, sent)
    uvicorn.run(stub, port=asked.port, log_level="error", access_log=False, lifespan="off")


if __name__ == "__main__":
    main()
