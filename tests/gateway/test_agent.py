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

import pytest
from msgspec.structs import replace

from stanchion.core.messages import Start
from stanchion.core.outcome import Completed

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


def test_claude_code_writes_a_file(served: tuple[FakeWorker, Gateway], tmp_path: Path):
    worker, gateway = served
    folder = tmp_path / "project"
    folder.mkdir()
    target = folder / "hello.txt"
    content = 'two\nlines, "quoted" – ✓ </tool_call>'
    call = (
        f"<tool_call>Write<arg_key>file_path</arg_key><arg_value>{target}</arg_value>"
        f"<arg_key>content</arg_key><arg_value>{content}</arg_value></tool_call>"
    )

    def plan(start: Start) -> Plan:
        prompt = prompt_of(start)
        thinking = "" if prompt.endswith("</think>") else "I think.</think>"
        if "[toolu_" in prompt:
            return spoken(start, f"{thinking}It is written.")
        if '"name": "Write"' in prompt:
            return spoken(start, f"{thinking}I write it.{call}")
        return spoken(start, f"{thinking}ok")

    worker.plan = plan
    done = subprocess.run(
        [CLAUDE, "-p", "Write hello.txt.", *OPTIONS],
        cwd=folder,
        env={
            "PATH": os.environ["PATH"],
            "HOME": str(tmp_path),
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
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)
    assert (told["is_error"], told["result"]) == (False, "It is written.")
    assert target.read_text() == content
    assert {start.tenant for start in worker.starts} == {"agent"}
    results = [prompt for start in worker.starts if "[toolu_" in (prompt := prompt_of(start))]
    assert results and call in results[-1]  # it came back as the model had said it
