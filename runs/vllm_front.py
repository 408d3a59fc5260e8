"""The check of runs/vllm_front.sh: what a client gets with and without the gateway before vLLM.

Prompts are beginnings of modules of Python's library; answers are greedy, one at a time and from
cold caches (a new salt each), since batches, cache hits and handoffs change vLLM's rounding in
bfloat16, and with it a near tie. "Equal" is equal to the character with what vLLM answers when it
is asked directly; a pair is asked directly in two steps.

* `single`: one server with n-gram drafts; completions and chats; a client that leaves.
* `pair`: prefill and decode apart, over NIXL.
* `gaps`: how far the scores of one server are from the cold ones of the other, in nats a token,
  over other prompts than those below; and the witness's scale that is learnt from them.
* `witnessed`: the same two servers, each for itself, in `strict`, with that scale.
* `sick`: these two and one with damaged weights, in `strict`, with that scale.
* `sick, default scale`: the same with the one that there is when nobody has measured: what it lets
  pass is told, and is no failure of the check.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
from calibrate import Served
from prometheus_client.parser import text_string_to_metric_families

from stanchion.gateway.monitor.baseline import Clean, write
from stanchion.gateway.monitor.witness import Scale, calibrate, gap

MODULES = (
    "argparse", "ast", "base64", "bisect", "calendar", "cmd", "code", "codecs", "configparser",
    "contextlib", "copy", "csv", "dataclasses", "difflib", "dis", "doctest", "enum", "filecmp",
    "fileinput", "fnmatch", "fractions", "functools", "getopt", "glob",
)  # fmt: skip
PROMPT_CHARACTERS = 900
ANSWER_TOKENS = 32
CONTEXT = 2048
READY_S, ANSWER_S, LEFT_S = 300.0, 300.0, 60.0
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}
NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
Tell = Callable[[str, dict[str, Any]], None]
COUNTED = ("witness_verdicts", "quality_retries", "request_retries", "output_anomalies")


def prompts(count: int) -> list[str]:
    folder = Path(sysconfig.get_path("stdlib"))
    return [
        (folder / f"{MODULES[at % len(MODULES)]}.py").read_text()[at : at + PROMPT_CHARACTERS]
        for at in range(count)
    ]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextmanager
def process(command: Sequence[str], ready: str, log: Path, **more: str) -> Iterator[None]:
    """Runs until the block ends; the block begins once `ready` answers 200."""
    with log.open("w") as said:
        made = subprocess.Popen(
            command, env={**os.environ, **more}, stdout=said, stderr=said, start_new_session=True
        )
        try:
            deadline = time.monotonic() + READY_S
            while True:
                with suppress(httpx.HTTPError):
                    if httpx.get(ready, trust_env=False).status_code == 200:
                        break
                if made.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"{command[0]} is not ready:\n{log.read_text()[-3000:]}")
                time.sleep(0.5)
            yield
        finally:
            made.terminate()
            with suppress(subprocess.TimeoutExpired):
                made.wait(60)
            with suppress(ProcessLookupError):
                os.killpg(made.pid, signal.SIGKILL)  # and what it has started
            made.wait()


@contextmanager
def vllm(cache: Path, folder: Path, *flags: str, model: str = "model") -> Iterator[str]:
    port, side = free_port(), free_port()
    url = f"http://127.0.0.1:{port}"
    command = [
        str(cache / "env/bin/vllm"), "serve", str(cache / model), "--host", "127.0.0.1",
        "--port", str(port), "--served-model-name", "smollm2", "--dtype", "bfloat16",
        "--enforce-eager", "--max-model-len", str(CONTEXT), "--enable-prompt-tokens-details",
        "--enable-scale-out", *flags,
    ]  # fmt: skip
    settings = {
        "HF_HUB_OFFLINE": "1",
        "KMP_BLOCKTIME": "0",
        "OMP_NUM_THREADS": "1",
        "UCX_TLS": "tcp,self",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # each binds itself to the first core otherwise
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side),
        "VLLM_NO_USAGE_STATS": "1",
    }
    with process(command, f"{url}/health", folder / f"vllm-{port}.log", **settings):
        yield url


@contextmanager
def front(cache: Path, folder: Path, *flags: str) -> Iterator[httpx.Client]:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [
        sys.executable, "-m", "stanchion.cli.main", "gateway", "--port", str(port),
        "--tokenizer", str(cache / "model"), *flags,
    ]  # fmt: skip
    with (
        process(command, f"{url}/ready", folder / f"gateway-{port}.log"),
        httpx.Client(base_url=url, timeout=ANSWER_S, trust_env=False) as client,
    ):
        yield client


# ---- asking ---------------------------------------------------------------------------------


def completed(client: httpx.Client, prompt: str) -> str:
    """Streamed. Raise httpx.HTTPError or ValueError if it does not end as a success."""
    body = {
        "model": "smollm2", "prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0,
        "stream": True, "cache_salt": fresh(),
    }  # fmt: skip
    return streamed(client, "/v1/completions", body)


def handed(first: str, second: str, prompt: str) -> str:
    """Of a pair without a gateway."""
    body = {
        "model": "smollm2", "prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0,
        "cache_salt": fresh(),
    }  # fmt: skip
    wanted = {"do_remote_decode": True, "do_remote_prefill": False}
    absent = ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")
    asked = {"max_tokens": 1, "kv_transfer_params": wanted | dict.fromkeys(absent)}
    moved = _post(first, body | asked)["kv_transfer_params"]
    return str(_post(second, body | {"kv_transfer_params": moved})["choices"][0]["text"])


def fresh() -> str:
    return os.urandom(8).hex()


def chatted(client: httpx.Client, prompt: str) -> str:
    messages = [{"role": "user", "content": f"What does this module do?\n{prompt}"}]
    body = {
        "model": "smollm2", "messages": messages, "max_tokens": ANSWER_TOKENS, "temperature": 0,
        "stream": True, "cache_salt": fresh(),
    }  # fmt: skip
    return streamed(client, "/v1/chat/completions", body)


def streamed(client: httpx.Client, path: str, body: dict[str, Any]) -> str:
    reply = client.post(path, json=body)
    if reply.status_code != 200 or not reply.text.endswith("data: [DONE]\n\n"):
        raise ValueError(reply.text[-500:])
    text = ""
    for line in reply.text.splitlines():
        if line.startswith("data: {"):
            choices = json.loads(line[6:]).get("choices") or [{}]
            text += choices[0].get("text") or choices[0].get("delta", {}).get("content") or ""
    return text


def compare(
    client: httpx.Client, asked: Any, expected: Sequence[tuple[str, str]]
) -> dict[str, int]:
    found = {"equal": 0, "different": 0, "errors": 0}
    for prompt, text in expected:
        try:
            found["equal" if asked(client, prompt) == text else "different"] += 1
        except ValueError as error:
            found["errors"] += 1
            print(f"  {error}", file=sys.stderr)
    return found


def counted(client: httpx.Client) -> dict[str, float]:
    names = {f"stanchion:{name}" for name in COUNTED}
    return {
        "|".join((sample.name.removeprefix("stanchion:"), *sample.labels.values())): sample.value
        for family in text_string_to_metric_families(client.get("/metrics").text)
        for sample in family.samples
        if family.name in names and sample.value
    }


def running(url: str) -> float:
    text = httpx.get(f"{url}/metrics", trust_env=False).text
    lines = [one for one in text.splitlines() if one.startswith("vllm:num_requests_running{")]
    return sum(float(one.rpartition(" ")[2]) for one in lines)


def left(client: httpx.Client, url: str) -> float:
    """Seconds from a client that leaves to a server that computes nothing."""
    body = {
        "prompt": "def main(", "max_tokens": CONTEXT - 100, "stream": True, "ignore_eos": True,
        "temperature": 1.0, "seed": 1,
    }  # fmt: skip
    with client.stream("POST", "/v1/completions", json=body) as reply:
        first = next(reply.iter_text())
        until(lambda: running(url) > 0, f"nothing runs that could be left: {first}")
    began = time.monotonic()
    until(lambda: running(url) == 0, "the server goes on for a client that left")
    return round(time.monotonic() - began, 3)


def until(met: Callable[[], bool], else_: str) -> None:
    deadline = time.monotonic() + LEFT_S
    while not met():
        if time.monotonic() > deadline:
            raise SystemExit(else_)
        time.sleep(0.02)


def gaps(one: str, other: str, texts: Sequence[str]) -> list[list[float]]:
    """Between the scores that `one` logs for its answers and those of `other` from cold KV: those
    of each answer, token by token."""
    found: list[list[float]] = []
    for text in texts:
        body = {
            "model": "smollm2", "prompt": text, "max_tokens": ANSWER_TOKENS, "temperature": 0,
            "logprobs": 0, "return_token_ids": True, "cache_salt": fresh(),
        }  # fmt: skip
        said = _post(one, body)["choices"][0]
        tokens = [*said["prompt_token_ids"], *said["token_ids"]]
        cold = _post(other, {"model": "smollm2", "prompt": tokens, "max_tokens": 1,
                             "prompt_logprobs": 0, "cache_salt": fresh()})  # fmt: skip
        scores = cold["choices"][0]["prompt_logprobs"][-len(said["token_ids"]) :]
        pairs = zip(said["token_ids"], said["logprobs"]["token_logprobs"], scores, strict=True)
        found.append([gap(logged, now[str(token)]["logprob"]) for token, logged, now in pairs])
    return found


def learnt(client: httpx.Client, runs: Sequence[Sequence[float]], out: Path) -> Scale:
    """Writes the scale for what this gateway serves to `out`."""
    served, scale = Served.of(client), calibrate(runs)
    clean = Clean(
        model=served.model, revision=served.revision, runs=scale.runs,
        drift=scale.drift, threshold=scale.threshold,
    )  # fmt: skip
    out.write_bytes(write([], [clean]))
    return scale


def _post(url: str, body: dict[str, Any]) -> Any:
    reply = httpx.post(f"{url}/v1/completions", json=body, timeout=ANSWER_S, trust_env=False)
    reply.raise_for_status()
    return reply.json()


# ---- the check ------------------------------------------------------------------------------


def single(cache: Path, folder: Path, texts: Sequence[str], tell: Tell) -> None:
    drafts = ("--speculative-config", json.dumps(DRAFTS))
    metrics = ("--per-request-spec-decode-metrics", "summary")
    with vllm(cache, folder, *drafts, *metrics) as url:
        with httpx.Client(base_url=url, timeout=ANSWER_S, trust_env=False) as direct:
            plain = [(one, completed(direct, one)) for one in texts]
            chats = [(one, chatted(direct, one)) for one in texts[: len(texts) // 2]]
        with front(cache, folder, "--upstream", url) as client:
            said = compare(client, completed, plain)
            more = {"chats": compare(client, chatted, chats), "left_s": left(client, url)}
            tell("single", said | more | {"counted": counted(client)})


def several(cache: Path, folder: Path, texts: Sequence[str], tell: Tell) -> None:
    handing = ("--kv-transfer-config", json.dumps(NIXL))
    with ExitStack() as stack:
        first, second = (stack.enter_context(vllm(cache, folder, *handing)) for _ in range(2))
        with httpx.Client(base_url=first, timeout=ANSWER_S, trust_env=False) as direct:
            plain = [(one, completed(direct, one)) for one in texts]
        sides = ("--upstream-prefill", first, "--upstream-decode", second)
        with front(cache, folder, *sides) as client:
            moved = [(one, handed(first, second, one)) for one in texts]
            pair = compare(client, completed, moved)
            tell("pair", pair | {"transfers": _moved(second), "counted": counted(client)})
        both = ("--upstream", first, "--upstream", second, "--integrity", "strict")
        known = folder / "baselines.json"
        with front(cache, folder, *both) as client:
            runs = gaps(first, second, prompts(2 * len(texts))[len(texts) :])
            scale = learnt(client, runs, known)
        every = [one for run in runs for one in run]
        found = {"tokens": len(every), "mean": sum(every) / len(every), "most": max(every)}
        tell("gaps", found | {"drift": scale.drift, "threshold": scale.threshold})
        measured = ("--set", f"gateway.baselines={known}")
        with front(cache, folder, *both, *measured) as client:
            witnessed = compare(client, completed, plain)
            tell("witnessed", witnessed | {"counted": counted(client)})
        sick = stack.enter_context(vllm(cache, folder, model="sick"))
        lenient = ("--set", "gateway.retries_spare=1000")
        for name, words in (("sick", measured), ("sick, default scale", ())):
            with front(cache, folder, *both, "--upstream", sick, *lenient, *words) as client:
                served = compare(client, completed, plain) | {"counted": counted(client)}
                tell(name, served)
        with httpx.Client(base_url=sick, timeout=ANSWER_S, trust_env=False) as direct:
            tell("sick, alone", compare(direct, completed, plain))


def _moved(url: str) -> float:
    """Transfers that the decode server has seen end."""
    text = httpx.get(f"{url}/metrics", trust_env=False).text
    lines = [
        one for one in text.splitlines() if one.startswith("vllm:nixl_xfer_time_seconds_count")
    ]
    return sum(float(one.rpartition(" ")[2]) for one in lines)


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--cache", type=Path, required=True)
    asked.add_argument("--requests", type=int, default=16)
    asked.add_argument("--json", metavar="FILE")
    given = asked.parse_args()
    texts = prompts(given.requests)
    found: dict[str, Any] = {
        "requests": given.requests,
        "answer_tokens": ANSWER_TOKENS,
        "vllm": "0.32.0 (CPU, bfloat16)",
        "python": platform.python_version(),
    }

    def tell(name: str, said: dict[str, Any]) -> None:
        found[name] = said
        print(name, json.dumps(said), flush=True)
        if given.json:
            Path(given.json).write_text(json.dumps(found, indent=1) + "\n")

    with tempfile.TemporaryDirectory() as folder:
        several(given.cache, Path(folder), texts, tell)
        single(given.cache, Path(folder), texts, tell)
    if any(found[name]["different"] for name in ("single", "pair", "witnessed", "sick")):
        sys.exit("a client got another text than vLLM's own")


if __name__ == "__main__":
    main()
