"""Real coding agents work through the gateway: Claude Code and pi, which `runs/agents.sh` installs.

The worker follows a script, since no model that fits here can use tools; everything else is real:
the agents' prompts and tools, streams, tool calls, results sent back.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from stanchion.core.messages import Start, Tokens
from stanchion.core.outcome import Completed, PeerLost

from .conftest import Gateway, running
from .glm import as_tokens, glm_special
from .worker import EOS, HELLO, FakeWorker, Plan, end, say

AGENTS = os.environ.get("STANCHION_AGENTS", "")
LARGE = replace(HELLO, context_max=2**20, pages=2**15)  # agents' prompts are long, in bytes
PIECES = glm_special().pieces
TIMEOUT_S = 120
CONTENT = 'two\nlines, "quoted" – ✓ </tool_call>'
TASK = "Write hello.txt."
DONE = "It is written."

pytestmark = pytest.mark.skipif(not AGENTS, reason="STANCHION_AGENTS names no folder of agents")
Agent = Callable[[Path, str], str]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[FakeWorker, Gateway]]:
    with (
        FakeWorker(f"ipc://{tmp_path}/worker", LARGE) as worker,
        running(worker, glm_special(), api_keys=("agent:key",)) as gateway,
    ):
        yield worker, gateway


def claude(folder: Path, url: str) -> str:
    options = ["--output-format", "json", "--permission-mode", "acceptEdits"]
    environment = {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_AUTH_TOKEN": "key",
        "ANTHROPIC_MODEL": "hashed",
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": "hashed",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    said = _run(["claude", "-p", TASK, "--allowedTools=Write", *options], folder, environment)
    told = json.loads(said)
    assert told["is_error"] is False, said
    return str(told["result"])


def pi(api: str) -> Agent:
    def agent(folder: Path, url: str) -> str:
        base = f"{url}/v1" if api == "openai-completions" else url
        model = {"id": "hashed", "reasoning": True, "contextWindow": 2**20, "maxTokens": 4000}
        provider = {"baseUrl": base, "api": api, "apiKey": "key", "models": [model]}
        settings = folder.parent / "settings"
        settings.mkdir()
        (settings / "models.json").write_text(json.dumps({"providers": {"stanchion": provider}}))
        environment = {"PI_CODING_AGENT_DIR": str(settings), "PI_OFFLINE": "1"}
        command = ["pi", "-p", TASK, "--provider", "stanchion", "--model", "hashed"]
        return _run(command, folder, environment).strip()

    return agent


def _run(command: list[str], folder: Path, environment: dict[str, str]) -> str:
    name, *options = command
    known = {"PATH": os.environ["PATH"], "HOME": str(folder.parent)}
    done = subprocess.run(
        [str(Path(AGENTS) / name), *options],
        cwd=folder,
        env=known | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


CASES: list[tuple[Agent, str, str]] = [
    (claude, "Write", "file_path"),
    (pi("anthropic-messages"), "write", "path"),
    (pi("openai-completions"), "write", "path"),
]
NAMES = ["claude", "pi-anthropic", "pi-openai"]


class Project:
    """What an agent is to do: a file to write, by a call that the worker says."""

    def __init__(self, folder: Path, tool: str, argument: str) -> None:
        folder.mkdir()
        self.folder = folder
        self.target = folder / "hello.txt"
        self.told = f'"name": "{tool}"'
        values = {argument: str(self.target), "content": CONTENT}
        pairs = (
            f"<arg_key>{key}</arg_key><arg_value>{value}</arg_value>"
            for key, value in values.items()
        )
        self.call = f"<tool_call>{tool}{''.join(pairs)}</tool_call>"

    def plan(self, start: Start) -> Plan:
        prompt = prompt_of(start)
        thinking = "" if prompt.endswith("</think>") else "I think.</think>"
        if self.call in prompt:
            return spoken(start, f"{thinking}{DONE}")
        if self.told in prompt:
            return spoken(start, f"{thinking}I write it.{self.call}")
        return spoken(start, f"{thinking}ok")


def prompt_of(start: Start) -> str:
    return b"".join(map(PIECES.__getitem__, start.tokens)).decode()


def spoken(start: Start, text: str) -> Plan:
    ids = [*as_tokens(text, True), EOS]
    parts = [ids[at : at + 3] for at in range(0, len(ids), 3)]
    return [*(say(start, part) for part in parts), end(start, Completed("stop"))]


@pytest.mark.parametrize(("agent", "tool", "argument"), CASES, ids=NAMES)
def test_an_agent_writes_a_file(served, tmp_path: Path, agent: Agent, tool: str, argument: str):
    worker, gateway = served
    project = Project(tmp_path / "project", tool, argument)
    worker.plan = project.plan
    assert agent(project.folder, gateway.url) == DONE
    assert project.target.read_text() == CONTENT
    assert {start.tenant for start in worker.starts} == {"agent"}


@pytest.mark.parametrize(("agent", "tool", "argument"), CASES, ids=NAMES)
def test_an_agent_tries_again_where_a_worker_was_lost_in_the_middle_of_a_call(
    served, tmp_path: Path, agent: Agent, tool: str, argument: str
):
    worker, gateway = served
    project = Project(tmp_path / "project", tool, argument)
    lost: list[str] = []

    def plan(start: Start) -> Plan:
        whole = project.plan(start)
        if not lost and project.call in _text(whole):
            lost.append(start.request)
            return [*whole[: len(whole) // 2], end(start, PeerLost("gone"))]
        return whole

    worker.plan = plan
    assert agent(project.folder, gateway.url) == DONE
    assert project.target.read_text() == CONTENT and len(lost) == 1


def _text(plan: Plan) -> str:
    said = (message.tokens for message in plan if isinstance(message, Tokens))
    return b"".join(PIECES[token] for tokens in said for token in tokens).decode()
