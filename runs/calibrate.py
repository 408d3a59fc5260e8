"""Learn what healthy answers of a served model look like. `python runs/calibrate.py --out F TEXTS`

Asks a stanchion server that is known to be well (restarted, lightly loaded) to go on with stretches
of the given files, then asks it for the scores of prompt and answer once more, under a salt that is
new each time, so that nothing is found in a cache. The baseline is learnt from the acceptance and
the tokens of the answers, the witness's scale from the differences of the scores. The file is for
`--set gateway.baselines=F`; entries of other models that it has already are kept.

Acceptance is read from the running counters of the stream. Chunks that hold several verify steps
say nothing of the single ones and are left out, so ask for few answers at once.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
from prometheus_client.parser import text_string_to_metric_families

from stanchion.gateway.monitor.baseline import (
    NO_BASELINES,
    RANKS,
    Baselines,
    Clean,
    learn,
    rank,
    read,
    write,
)
from stanchion.gateway.monitor.witness import calibrate, gap

CHARACTERS = 3000  # of a prompt


@dataclass(frozen=True)
class Served:
    model: str
    revision: str
    drafts: int
    vocabulary: int

    @classmethod
    def of(cls, client: httpx.Client) -> Served:
        """What the workers say of themselves in /metrics: the same of all in a cluster."""
        text = client.get("/metrics").raise_for_status().text
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == "stanchion:worker_info":
                    said = sample.labels
                    drafts, vocabulary = int(said["draft_tokens"]), int(said["vocabulary"])
                    return cls(said["model"], said["revision"], drafts, vocabulary)
        raise SystemExit("no worker is there")


@dataclass
class Answer:
    prompt: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)  # drafts accepted in each


def ask(client: httpx.Client, text: str, drafts: int, asked: argparse.Namespace) -> Answer:
    body = {
        "prompt": text,
        "max_tokens": asked.tokens,
        "temperature": asked.temperature,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_spec": True},
        "logprobs": 0,
        "return_token_ids": True,
    }
    answer, seen = Answer(), (0, 0.0)
    with client.stream("POST", "/v1/completions", json=body) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                seen = _take(answer, json.loads(line[6:]), seen, drafts)
    return answer


def _take(
    answer: Answer, event: dict[str, Any], seen: tuple[int, float], drafts: int
) -> tuple[int, float]:
    """`seen`: verify steps, and drafts accepted in them."""
    if "error" in event:
        raise SystemExit(f"the server said: {event['error']['message']}")
    answer.prompt = event.get("prompt_token_ids") or answer.prompt
    for choice in event["choices"]:
        answer.tokens += choice.get("token_ids") or ()
        answer.logprobs += (choice.get("logprobs") or {}).get("token_logprobs", ())
    if "spec_verify_steps" not in event:
        return seen
    steps = event["spec_verify_steps"]
    accepted = event["spec_accept_prefix"] * steps
    if steps == seen[0] + 1:
        answer.steps.append(min(drafts, round(accepted - seen[1])))
    return steps, accepted


def cold(client: httpx.Client, answer: Answer) -> list[float]:
    """Scores of the answer's tokens when all of it is computed anew."""
    body = {
        "prompt": [*answer.prompt, *answer.tokens],
        "max_tokens": 1,
        "temperature": 0.0,
        "prompt_logprobs": 0,
        "cache_salt": uuid4().hex,
    }
    reply = client.post("/v1/completions", json=body).raise_for_status().json()
    scores = reply["choices"][0]["prompt_logprobs"][len(answer.prompt) :]
    return [one[str(token)]["logprob"] for one, token in zip(scores, answer.tokens, strict=True)]


def prompts(files: Sequence[str], count: int) -> list[str]:
    texts = [Path(one).read_text(errors="replace") for one in files]
    cuts = [text[at : at + CHARACTERS] for text in texts for at in range(0, len(text), CHARACTERS)]
    if not cuts:
        raise SystemExit("the files are empty")
    every = max(1, len(cuts) // count)
    return cuts[::every][:count]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", help="text of the kind that is served")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--out", required=True, help="the file of baselines")
    parser.add_argument("--answers", type=int, default=300)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--together", type=int, default=2)
    asked = parser.parse_args()
    texts = prompts(asked.files, asked.answers)
    with (
        httpx.Client(base_url=asked.url, timeout=600.0, trust_env=False) as client,
        ThreadPoolExecutor(asked.together) as threads,
    ):
        served = Served.of(client)
        answers = list(threads.map(lambda text: ask(client, text, served.drafts, asked), texts))
        scores = list(threads.map(lambda one: cold(client, one), answers))
    write_down(asked.out, served, answers, scores)


def write_down(
    file: str, served: Served, answers: Sequence[Answer], scores: Sequence[list[float]]
) -> None:
    ranks = [0] * RANKS
    for one in answers:
        known = set(one.prompt)
        for token in one.tokens:
            if token not in known:
                ranks[rank(token, served.vocabulary)] += 1
    steps = [one.steps for one in answers]
    named = (served.model, served.revision)
    learnt = learn(*named, served.drafts, "any", steps, ranks, served.vocabulary)
    gaps = [[gap(a, b) for a, b in zip(one.logprobs, now)] for one, now in zip(answers, scores)]
    scale = calibrate(gaps)
    clean = Clean(
        model=served.model,
        revision=served.revision,
        drift=scale.drift,
        threshold=scale.threshold,
        runs=scale.runs,
    )
    out = Path(file)
    before: Baselines = read(out.read_bytes(), file) if out.exists() else NO_BASELINES
    kept = [one for one in before.baselines if (one.model, one.revision) != named]
    apart = [one for one in before.clean if (one.model, one.revision) != named]
    out.write_bytes(write([*kept, learnt], [*apart, clean]))
    print(
        f"{len(answers)} answers, {sum(map(len, steps))} verify steps: {learnt.low:.3f} to ", end=""
    )
    print(f"{learnt.high:.3f} drafts accepted a step; {scale}")


if __name__ == "__main__":
    main()
