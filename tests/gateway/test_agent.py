"""A real coding agent works through the gateway: Claude Code, which `runs/claude_code.sh` installs.

The worker follows a script, since no model that fits here can use tools; everything else is real:
the agent's prompts and tools, streams, tool calls, results sent back.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from stanchion.core.messages import Start, Tokens
from stanchion.core.outcome import Completed, PeerLost

from .conftest import Gateway, running
from .glm import as_tokens, glm_special
from .worker import EOS, HELLO, FakeWorker, Plan, end, say

CLAUDE = os.environ.get("STANCHION_CLAUDE", "")
LARGE = replace(HELLO, context_max=2**20, pages=2**15)  # agents' prompts are long, in bytes
PIECES = glm_special().pieces
TIMEOUT_S = 120
OPTIONS = ["--output-format", "json", "--permission-mode", "acceptEdits", "--allowedTools=Write"]

pytestmark = pytest.mark.skipif(not CLAUDE, reason="STANCHION_CLAUDE names no claude command")


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[FakeWorker, Gateway]]:
    with (
        FakeWorker(f"ipc://{tmp_path}/worker", LARGE) as worker,
        running(worker, glm_special(), api_keys=("agent:key",)) as gateway,
    ):
        yield worker, gateway


def prompt_of(start: Start) -> str:
    return b"".join(map(PIECES.__getitem__, start.tokens)).decode()


def spoken(start: Start, text: str) -> Plan:
    ids = [*as_tokens(text, True), EOS]
    parts = [ids[at : at + 3] for at in range(0, len(ids), 3)]
    return [*(say(start, part) for part in parts), end(start, Completed("stop"))]


class Project:
    """What the agent is to do: a file to write, by a call that the worker says."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        self.target = folder / "hello.txt"
        self.content = 'two\nlines, "quoted" – ✓ </tool_call>'
        self.call = (
            f"<tool_call>Write<arg_key>file_path</arg_key><arg_value>{self.target}</arg_value>"
            f"<arg_key>content</arg_key><arg_value>{self.content}</arg_value></tool_call>"
        )

    def plan(self, start: Start) -> Plan:
        prompt = prompt_of(start)
        thinking = "" if prompt.endswith("</think>") else "I think.</think>"
        if "[toolu_" in prompt:
            return spoken(start, f"{thinking}It is written.")
        if '"name": "Write"' in prompt:
            return spoken(start, f"{thinking}I write it.{self.call}")
        return spoken(start, f"{thinking}ok")


def claude(project: Project, gateway: Gateway) -> dict[str, Any]:
    done = subprocess.run(
        [CLAUDE, "-p", "Write hello.txt.", *OPTIONS],
        cwd=project.folder,
        env={
            "PATH": os.environ["PATH"],
            "HOME": str(project.folder.parent),
            "ANTHROPIC_BASE_URL": gateway.url,
            "ANTHROPIC_AUTH_TOKEN": "key",
            "ANTHROPIC_MODEL": "hashed",
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": "hashed",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    told: dict[str, Any] = json.loads(done.stdout or "{}")
    assert done.returncode == 0 and told["is_error"] is False, done.stdout + done.stderr
    return told


def test_claude_code_writes_a_file(served: tuple[FakeWorker, Gateway], tmp_path: Path):
    worker, gateway = served
    project = Project(tmp_path / "project")
    worker.plan = project.plan
    assert claude(project, gateway)["result"] == "It is written."
    assert project.target.read_text() == project.content
    assert {start.tenant for start in worker.starts} == {"agent"}
    results = [prompt for start in worker.starts if "[toolu_" in (prompt := prompt_of(start))]
    assert results and project.call in results[-1]  # it came back as the model had said it


def test_claude_code_tries_again_where_a_worker_was_lost_in_the_middle_of_a_call(
    served: tuple[FakeWorker, Gateway], tmp_path: Path
):
    worker, gateway = served
    project = Project(tmp_path / "project")
    lost: list[str] = []

    def plan(start: Start) -> Plan:
        whole = project.plan(start)
        if not lost and project.call in b"".join(_bytes(whole)).decode():
            lost.append(start.request)
            return [*whole[: len(whole) // 2], end(start, PeerLost("gone"))]
        return whole

    worker.plan = plan
    assert claude(project, gateway)["result"] == "It is written."
    assert project.target.read_text() == project.content and len(lost) == 1


def _bytes(plan: Plan) -> Iterator[bytes]:
    for message in plan:
        if isinstance(message, Tokens):
            yield from map(PIECES.__getitem__, message.tokens)
