"""Carries out a burn-in over HTTP: a quiet run, the storm, then every answer looked at again.

Whoever looks again asks little at once: the storm is over, and the server is to be at rest.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol
from uuid import uuid4

import msgspec

from stanchion.core.errors import ConfigError
from stanchion.core.recording import Content, Recorded, Times
from stanchion.gateway.monitor.witness import Confirmed, Scale, Unwitnessed, calibrate, gap
from stanchion.lab.burnin import (
    FILLER,
    Acceptance,
    Judged,
    Part,
    Storm,
    compare,
    judged,
    quiet,
    requests,
    unstable,
)
from stanchion.lab.replay_body import COMPLETIONS, Bodies, Extra
from stanchion.lab.replay_plan import Pace, Stage, plan
from stanchion.lab.replay_run import Client, Limits, Replay, Unreachable
from stanchion.lab.results import Result

TOGETHER = 2  # looked at again at once
SOLO_EVERY = 4  # greedy answers that nothing speaks against: one in so many is asked alone too
TIMEOUT_S = 600.0
Said = Callable[[str, int, int], None]  # what is done: a name, so many, of so many


class Server(Client, Protocol):
    async def get(self, path: str) -> Any:
        """The JSON of a reply. Raise ConfigError where there is none."""


@dataclass(frozen=True)
class Means:
    """What this server lets others see: token ids, its scores of a prompt, a cache apart."""

    model: str
    context_max: int | None
    scores: bool  # ids and log-probabilities of what it generates, and of a prompt
    salted: bool


@dataclass
class Found:
    """Of one burn-in. `left`: clients that did; `failed`: errors by what they said."""

    means: Means
    scale: Scale
    quiet: int
    asked: int = 0
    completed: int = 0
    left: int = 0
    fillers: int = 0
    failed: dict[str, int] = field(default_factory=dict)
    every: list[Judged] = field(default_factory=list)
    unstable: int = 0
    acceptance: Acceptance = field(default_factory=Acceptance)
    failpoints: frozenset[str] = frozenset()


class BurnIn:
    def __init__(self, client: Server, storm: Storm, text: str, said: Said) -> None:
        self._client = client
        self._storm = storm
        self._text = text
        self._said = said

    async def run(self, quiet_count: int) -> Found:
        """Raise ConfigError where the server cannot be asked."""
        means = await self._means()
        storm = self._storm.fitted(means.context_max)
        calm = await self._asked(means, quiet(storm, self._text, quiet_count), 1, "quiet run")
        answered = [one for one in calm if one.ending == "completed"]
        if not answered:
            raise ConfigError(f"the quiet run has no answer: {calm[0].error}")
        scale = await self._scale(means, answered)
        took = statistics.median(one.end - (one.send or one.due) for one in answered)
        found = Found(means, scale, len(answered))
        asked = requests(storm, self._text, took)
        results = await self._asked(means, asked, storm.concurrency, "storm")
        await self._judge(means, scale, results, found)
        return found

    # ---- asking -----------------------------------------------------------------------------

    async def _means(self) -> Means:
        listed = await self._client.get("/v1/models")
        try:
            first = listed["data"][0]
            model, longest = str(first["id"]), first.get("max_model_len")
        except (KeyError, IndexError, TypeError):
            raise ConfigError("/v1/models lists no model") from None
        bare = Means(model, longest, scores=False, salted=False)
        asked = quiet(self._storm.fitted(longest), self._text, 1)
        for means in (replace(bare, scores=True, salted=True), replace(bare, scores=True)):
            (result,) = await self._asked(means, asked, 1, "")
            scored = result.ending == "completed" and result.tokens and result.logprobs
            if scored and await self._cold(means, result) is not None:
                return means
        return bare

    async def _asked(
        self, means: Means, asked: Sequence[Recorded], concurrency: int, name: str
    ) -> list[Result]:
        results: list[Result] = []

        def tell(result: Result) -> None:
            results.append(result)
            if name:
                self._said(name, len(results), len(asked))

        extras: frozenset[Extra] = frozenset()
        if means.scores:
            extras = frozenset({"ids", "logprobs", "spec"})
        bodies = Bodies(means.model, extras=extras, salted=False)
        steps = plan(asked, "open", Pace((Stage(1.0),)))
        limits = Limits(concurrency, TIMEOUT_S)
        run = Replay(steps, bodies, self._client, limits, tell)
        run.prepare()
        await run.run(asyncio.get_running_loop().time())
        return results

    async def _json(self, path: str, body: dict[str, Any]) -> Any | None:
        """None where the server refuses, or is not there."""
        try:
            async with self._client.post(path, msgspec.json.encode(body)) as reply:
                raw = b"".join([chunk async for chunk in reply.chunks()])
                return msgspec.json.decode(raw) if reply.status == 200 else None
        except (Unreachable, msgspec.MsgspecError):
            return None

    async def _cold(self, means: Means, result: Result) -> list[float] | None:
        """Scores of an answer's tokens, computed again where nothing is cached."""
        sent = msgspec.json.decode(result.body)
        prompt = await self._prompt_ids(means, sent)
        if prompt is None:
            return None
        body = {
            "model": means.model,
            "prompt": [*prompt, *result.tokens],
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": 0,
        }
        body |= {"cache_salt": uuid4().hex} if means.salted else {}
        said = await self._json(COMPLETIONS, body)
        return None if said is None else _scores(said, len(prompt), result.tokens)

    async def _prompt_ids(self, means: Means, sent: dict[str, Any]) -> list[int] | None:
        body = {"model": means.model, "prompt": sent["prompt"], "add_special_tokens": True}
        said = await self._json("/tokenize", body)
        tokens = said.get("tokens") if isinstance(said, dict) else None
        return tokens if isinstance(tokens, list) and tokens else None

    async def _solo(self, means: Means, result: Result) -> Result:
        """The same request, when nobody else asks and nothing is cached for it."""
        body = msgspec.json.decode(result.body)
        body |= {"cache_salt": uuid4().hex} if means.salted else {}
        again = Recorded(
            request=result.request,
            session=result.session,
            api="completions",
            times=Times(arrival=0.0),
            input_tokens=0,
            stream=True,
            content=Content(body=body),
        )
        (solo,) = await self._asked(means, [again], 1, "")
        return solo

    # ---- looking ----------------------------------------------------------------------------

    async def _scale(self, means: Means, answered: Sequence[Result]) -> Scale:
        if not means.scores:
            return Scale()
        gaps = []
        for at, result in enumerate(answered):
            cold = await self._cold(means, result)
            self._said("its noise", at + 1, len(answered))
            if cold is not None:
                scores = [one for one in result.logprobs if one is not None]
                gaps.append([gap(was, now) for was, now in zip(scores, cold)])
        return calibrate(gaps) if gaps else Scale()

    async def _judge(
        self, means: Means, scale: Scale, results: Sequence[Result], found: Found
    ) -> None:
        whole: list[Result] = []
        for result in results:
            found.asked += 1
            found.failpoints |= {one for one in result.failpoints.split(",") if one}
            if result.session == FILLER:
                found.fillers += 1
            elif result.ending == "completed":
                whole.append(result)
            elif result.ending == "aborted":
                found.left += 1
            else:
                why = result.error or result.ending
                found.failed[why] = found.failed.get(why, 0) + 1
        found.completed = len(whole)
        waiting = iter(enumerate(whole))
        done = 0

        async def look() -> None:
            nonlocal done
            for at, result in waiting:
                found.every.append(await self._look(means, scale, at, result, found))
                done += 1
                self._said("looking again", done, len(whole))

        async with asyncio.TaskGroup() as group:
            for _ in range(TOGETHER):
                group.create_task(look())

    async def _look(
        self, means: Means, scale: Scale, at: int, result: Result, found: Found
    ) -> Judged:
        cold = await self._cold(means, result) if means.scores else None
        verdict = judged(result, cold, scale)
        if isinstance(verdict, Confirmed) and cold is not None:
            again = await self._cold(means, result)
            if again is None or unstable(cold, again, scale):
                found.unstable += 1
                verdict = Unwitnessed("two cold runs of it differ as much")
        greedy = msgspec.json.decode(result.body)["temperature"] == 0
        wanted = isinstance(verdict, Confirmed) or not means.scores or at % SOLO_EVERY == 0
        solo: Part | None = None
        parted: int | None = None
        if greedy and wanted:
            alone = await self._solo(means, result)
            if alone.ending == "completed":
                solo, parted = compare(result, alone, scale)
                found.acceptance.add(result, alone)
        return Judged(result, verdict, solo, parted)


def _scores(said: Any, prompt: int, tokens: Sequence[int]) -> list[float] | None:
    """Of `tokens`, behind so many others, from a reply in vLLM's shape; None where it is none."""
    try:
        scores = said["choices"][0]["prompt_logprobs"][prompt:]
        return [
            float(one[str(token)]["logprob"]) for one, token in zip(scores, tokens, strict=True)
        ]
    except (KeyError, IndexError, TypeError, ValueError):
        return None
