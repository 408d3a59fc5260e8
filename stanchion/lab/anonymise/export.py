"""One export: read, anonymise, write, look at it as an attacker would, and say what was found.

The key is the caller's, for this export alone; nothing here writes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import structs

from stanchion.core.errors import ConfigError
from stanchion.core.recording import Level, Recorded
from stanchion.gateway.body import ChatBody
from stanchion.gateway.openai import chat_text
from stanchion.gateway.record.blocks import chain, digest, root
from stanchion.gateway.tokens import Vocabulary
from stanchion.lab.anonymise import canary
from stanchion.lab.anonymise.body import typed
from stanchion.lab.anonymise.fields import Shield
from stanchion.lab.anonymise.key import Key
from stanchion.lab.anonymise.masks import DetectSecrets, Masks, Patterns
from stanchion.lab.anonymise.pool import CHARACTERS, library, names, pool
from stanchion.lab.anonymise.privacy import anonymity, dictionary, likely, linked, shown
from stanchion.lab.anonymise.report import Attacks, Canaries, Kept, Report
from stanchion.lab.anonymise.surrogate import Surrogates
from stanchion.lab.anonymise.tokenised import Tokenised
from stanchion.lab.anonymise.words import Words
from stanchion.lab.formats import own
from stanchion.lab.formats.trace import Trace
from stanchion.lab.structure import page_hits, sharing, structure

Wanted = Literal["hashes", "surrogate", "secrets"]
LINKED_REQUESTS = 1000
SECRET_ROUNDS = 10
CANARY_BODIES = 4


@dataclass(frozen=True)
class Settings:
    level: Wanted
    time_step_s: float = 0.0
    guesses: int = 1_000_000
    pool_characters: int = CHARACTERS

    def check(self) -> None:
        if not 0 <= self.time_step_s <= 86_400:
            raise ConfigError("--time-step must be from 0 to 86400 seconds")
        if not 0 <= self.guesses <= 10**8:
            raise ConfigError("--guesses must be from 0 to 100000000")


def anonymise(
    trace: Trace, out: Path, settings: Settings, key: Key, other: Key, vocabulary: Vocabulary | None
) -> Report:
    """`other` is a second export's key, to see what the two would have in common. `vocabulary`
    is wanted by `surrogate` alone. Raise ConfigError, or TraceError."""
    settings.check()
    made = export(settings, key, trace, vocabulary)
    before = structure(trace)
    own.write(out, Shield(key).header(trace.header, _level(settings, trace)), made.records(trace))
    found = own.read(out)
    shield = Shield(other, settings.time_step_s)
    linked_count = linked(
        islice(found, LINKED_REQUESTS),
        (shield.record(one) for one in islice(trace, LINKED_REQUESTS)),
    )
    requests = list(found)
    attacks = Attacks(
        dictionary=dictionary(shown(requests), likely(settings.guesses)),
        linked=linked_count,
        exact=anonymity(requests, 1, 1.0),
        coarse=anonymity(requests, 64, 60.0),
    )
    differences = before.differences(structure(requests))
    if settings.time_step_s:
        differences = [one for one in differences if one not in ("arrivals", "gaps")]
    kept = made.kept(structure(requests).page_hits, before.page_hits, differences)
    return Report(
        settings.level, len(requests), settings.time_step_s, kept, made.canaries(), attacks
    )


def _level(settings: Settings, trace: Trace) -> Level:
    """What is in it: with no content to replace there are hashes."""
    if settings.level == "surrogate" and trace.header.level != "content":
        return "hashes"
    return settings.level


# ---- levels ---------------------------------------------------------------------------------


def export(settings: Settings, key: Key, trace: Trace, vocabulary: Vocabulary | None) -> Export:
    """Raise ConfigError where the level cannot be had of this trace."""
    shield = Shield(key, settings.time_step_s)
    if settings.level == "hashes":
        return Export(shield)
    if trace.header.level != "content":
        raise ConfigError(
            f"--level {settings.level} wants content, and this recording has none (its level is "
            f"{trace.header.level}): record with --record-content, or take --level hashes"
        )
    if settings.level == "secrets":
        return Masked(shield, Masks(key, (Patterns(), DetectSecrets())))
    if vocabulary is None:
        raise ConfigError("--level surrogate wants --model: the tokenizer and template it was for")
    _check_vocabulary(trace, vocabulary)
    tokenised = Tokenised(vocabulary)
    text = library(settings.pool_characters)
    words = Words(
        key, tokenised, pool(tokenised, text, True), pool(tokenised, text, False),
        names(tokenised, text),
    )  # fmt: skip
    page_tokens = trace.header.block_tokens
    return Replaced(shield, Surrogates(vocabulary, tokenised, words, page_tokens or 16))


def _check_vocabulary(trace: Trace, vocabulary: Vocabulary) -> None:
    header = trace.header
    ours = digest(*vocabulary.pieces)
    if header.tokenizer and header.tokenizer != ours:
        raise ConfigError("--model: its tokenizer is not the one of this recording")
    template = digest(vocabulary.template.source.encode()) if vocabulary.template else ""
    if header.template and header.template != template:
        raise ConfigError("--model: its chat template is not the one of this recording")


@dataclass
class Export:
    """The level `hashes`; others add content."""

    shield: Shield

    def records(self, trace: Trace) -> Iterator[Recorded]:
        return (self.record(one) for one in trace)

    def record(self, one: Recorded) -> Recorded:
        return self.shield.record(one)

    def kept(self, after: int, before: int, differences: Sequence[str]) -> Kept:
        return Kept(tuple(differences), before, after)

    def canaries(self) -> Canaries:
        plant = canary.planting()
        bodies = [canary.chat(plant, tools=True), canary.completion(plant)] * CANARY_BODIES
        told = [canary.record(plant, "chat", body, 100, 16) for body in bodies]
        return self._caught([self.record(one) for one in told], sum(map(_planted, told)))

    def _caught(self, made: Sequence[Recorded], planted: int) -> Canaries:
        written = [msgspec.json.encode(one) for one in made]
        return Canaries(planted, len(set(canary.leaked(written))))


def _planted(one: Recorded) -> int:
    return len(set(canary.leaked([msgspec.json.encode(one)])))


@dataclass
class Masked(Export):
    masks: Masks

    def record(self, one: Recorded) -> Recorded:
        return self.masks.record(one, self.shield)

    def kept(self, after: int, before: int, differences: Sequence[str]) -> Kept:
        return Kept(tuple(differences), before, after, masked=dict(self.masks.masked))

    def canaries(self) -> Canaries:
        """Secrets of known kinds: here a share of them may come out."""
        told = canary.secrets(self.shield.key, SECRET_ROUNDS)
        masks = Masks(self.shield.key, self.masks.detectors)
        text = "\n".join(f"line {at}: x = {one}" for at, one in enumerate(told))
        made = masks.text(text)
        return Canaries(len(told), sum(1 for one in told if one in made))


@dataclass
class Replaced(Export):
    """`prompts`: blocks of each prompt that has words, before and after."""

    surrogates: Surrogates
    before: list[tuple[str, ...]] = field(default_factory=list)
    after: list[tuple[str, ...]] = field(default_factory=list)

    def record(self, one: Recorded) -> Recorded:
        bare = self.shield.record(one)
        if one.content is None or (made := self.surrogates.content(one)) is None:
            return bare
        content, ids = made
        if one.blocks:
            salt = str(content.body.get("cache_salt") or "")
            first = root(b"", one.tenant, salt)
            after = chain(first, ids.tobytes(), self.surrogates.page_tokens)
            self.before.append(one.blocks)
            self.after.append(after.blocks)
        api = "chat" if one.api == "messages" else one.api  # what its body is now
        return structs.replace(bare, api=api, content=content)

    def kept(self, after: int, before: int, differences: Sequence[str]) -> Kept:
        """What differs between the pages of the prompts as they were, and with other words."""
        found = [*differences]
        if sharing(self.before) != sharing(self.after):
            found.append("sharing of the surrogates")
        return Kept(
            tuple(found),
            sum(page_hits(self.before)),
            sum(page_hits(self.after)),
            without_words=dict(self.surrogates.why),
            shared_words=self.surrogates.words.shared,
            tokens=self.surrogates.tokens,
        )

    def canaries(self) -> Canaries:
        vocabulary, tokenised = self.surrogates.vocabulary, self.surrogates.tokenised
        plant = canary.planting()
        told: list[Recorded] = []
        prompt = canary.completion(plant)
        tokens = len(tokenised.ids(str(prompt["prompt"]))) + tokenised.prefix
        told.append(canary.record(plant, "completions", prompt, tokens, None))
        if vocabulary.template is not None:
            for _ in range(CANARY_BODIES):
                body = canary.chat(plant, tools=vocabulary.template.mentions("tools"))
                said = typed("chat", body)
                assert isinstance(said, ChatBody)
                tokens = len(tokenised.ids(chat_text(said, vocabulary)))
                told.append(canary.record(plant, "chat", body, tokens, None))
        fresh = Replaced(self.shield, self.surrogates.fresh())
        made = [fresh.record(one) for one in told]
        found = self._caught(made, sum(map(_planted, told)))
        return replace(found, records=len(made), with_words=sum(1 for one in made if one.content))
