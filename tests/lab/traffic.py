"""Traffic of coding agents through a real gateway, recorded whole; canaries in every field."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from stanchion.core.messages import Start
from stanchion.core.outcome import Completed
from stanchion.gateway.tokens import Vocabulary, load_vocabulary
from stanchion.lab.anonymise.canary import Plant, chat, completion, planting
from stanchion.lab.formats.sniff import read
from stanchion.lab.formats.trace import Trace

from ..gateway.conftest import Gateway, running
from ..gateway.worker import HELLO, FakeWorker, Plan, end, say

TINY = Path(__file__).parents[2] / "stanchion" / "model" / "tiny"
PAGE = 16
SOURCE = Path(json.__file__).read_text()


@cache
def vocabulary() -> Vocabulary:
    return load_vocabulary(TINY)


@contextmanager
def tiny_worker(folder: Path) -> Iterator[FakeWorker]:
    hello = msgspec.structs.replace(
        HELLO, vocabulary=vocabulary().size, page_tokens=PAGE, context_max=65536, pages=65536,
        eos_ids=vocabulary().eos_ids,
    )  # fmt: skip
    folder.mkdir(exist_ok=True)
    with FakeWorker(f"ipc://{folder}/worker", hello) as worker:
        yield worker


def saying(plant: Plant) -> Any:
    """An answer with reasoning, text and a call, canaries in all of them."""

    def plan(start: Start) -> Plan:
        text = f"{plant()}</think>I look at {plant()} first.<tool_call>{plant()}\n"
        text += f"<arg_key>{plant()}</arg_key>\n<arg_value>{plant()}</arg_value>\n</tool_call>"
        ids = vocabulary().encode(text, False)
        return [say(start, [*ids, vocabulary().eos_ids[0]]), end(start, Completed("stop"))]

    return plan


def talk(gateway: Gateway, plant: Plant) -> None:
    """Every API, streamed and not, what is refused too; then sessions that grow and share."""
    headers = {"x-session-id": plant(), "x-request-id": plant(), "user-agent": plant()}
    client = gateway.client
    for stream in (False, True):
        told = chat(plant, tools=True) | {"stream": stream, "max_tokens": 200}
        assert client.post("/v1/chat/completions", json=told, headers=headers).status_code == 200
        told = completion(plant) | {"stream": stream, "max_tokens": 200}
        assert client.post("/v1/completions", json=told, headers=headers).status_code == 200
        told = anthropic(plant) | {"stream": stream}
        reply = client.post("/v1/messages", json=told, headers=headers)
        assert reply.status_code == 200, reply.text
    refused = chat(plant, tools=True) | {"temperature": plant()}
    assert client.post("/v1/chat/completions", json=refused, headers=headers).status_code == 400
    agents(gateway, plant)


def agents(gateway: Gateway, plant: Plant) -> None:
    """Three sessions: the same tools and system prompt, files of many lines, five turns each."""
    shared = chat(plant, tools=True)
    system = {"role": "system", "content": f"You are {plant()}. " + SOURCE[:1500]}
    for session in range(3):
        begin = SOURCE[2000 : 2600 if session else 3000]
        messages = [system, {"role": "user", "content": f"{begin} {session} {plant()}"}]
        for turn in range(5):
            body = {"messages": messages, "tools": shared["tools"], "max_tokens": 200}
            gateway.client.post("/v1/chat/completions", json=body).raise_for_status()
            call = {"name": "read", "arguments": json.dumps({"path": f"/a/{turn}.py", "n": 12345})}
            calls = [{"id": f"call{turn}", "type": "function", "function": call}]
            first = 3000 + 700 * turn + session
            messages = [
                *messages,
                {"role": "assistant", "content": f"Turn {turn}.", "tool_calls": calls},
                {
                    "role": "tool",
                    "content": SOURCE[first : first + 650],
                    "tool_call_id": f"call{turn}",
                },
            ]
    body = {"prompt": [SOURCE[:300], SOURCE[100:500]], "n": 2, "max_tokens": 5}
    gateway.client.post("/v1/completions", json=body).raise_for_status()
    for length in (400, 900, 900, 1500):  # prompts of which one is the beginning of another
        body = {"prompt": SOURCE[:length], "max_tokens": 5}
        gateway.client.post("/v1/completions", json=body).raise_for_status()
        ids = vocabulary().encode(SOURCE[:length], False)
        body = {"prompt": ids, "max_tokens": 5}
        gateway.client.post("/v1/completions", json=body).raise_for_status()


def anthropic(plant: Plant) -> dict[str, Any]:
    schema = {"type": "object", "properties": {plant(): {"type": "string", "description": plant()}}}
    used = {
        "type": "tool_use",
        "id": plant(),
        "name": plant(),
        "input": {plant(): [1234567, plant()]},
    }
    result = {"type": "tool_result", "tool_use_id": used["id"], "content": plant()}
    return {
        "model": "hashed",
        "max_tokens": 200,
        "system": [{"type": "text", "text": plant()}],
        "messages": [
            {"role": "user", "content": plant()},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": plant()}, used]},
            {"role": "user", "content": [result, {"type": "text", "text": plant()}]},
        ],
        "tools": [{"name": plant(), "description": plant(), "input_schema": schema}],
        "metadata": {"user_id": plant()},
        "stop_sequences": [plant()],
    }


def recording(folder: Path, content: bool = True) -> tuple[Trace, Plant]:
    """What was recorded of it, and what planted the canaries."""
    plant = planting()
    with tiny_worker(folder / "wire") as worker:
        worker.plan = saying(plant)
        keys = {"record": str(folder / "recording"), "record_content": content}
        with running(worker, vocabulary(), **keys) as gateway:
            talk(gateway, plant)
    return read(folder / "recording"), plant


def replayed(folder: Path, trace: Trace) -> Trace:
    """All bodies of a trace, sent in order to a gateway that records what comes."""
    with tiny_worker(folder / "wire") as worker:
        worker.plan = lambda start: [end(start)]
        with running(worker, vocabulary(), record=str(folder / "recording")) as gateway:
            for one in trace:
                assert one.content is not None
                path = "completions" if "prompt" in one.content.body else "chat/completions"
                body = {
                    k: v
                    for k, v in one.content.body.items()
                    if k not in ("model", "stream_options")
                }
                body["stream"] = False
                gateway.client.post(f"/v1/{path}", json=body).raise_for_status()
    return read(folder / "recording")
