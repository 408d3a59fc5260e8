"""Attacks on an export, as somebody would make them who has nothing but the export. Pure.

Dictionary: likely names and texts, hashed in the ways that people hash, looked up in the export.
Linkage: what two exports of one recording have in common. Lengths and times: how many requests
share theirs with nobody, which no hash hides.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice

from stanchion.core.recording import Recorded
from stanchion.gateway.record.blocks import link, root

Scheme = Callable[[bytes], bytes]
BARE = root(b"", "", "")
LEAST_DIGITS = 12  # of a hash: shorter ones are hit by chance
HEX = re.compile("(?:[0-9a-f]{2})+")
BATCH = 20_000
# As full digests; an export may show any beginning of one.
SCHEMES: dict[str, Scheme] = {
    "md5": lambda said: hashlib.md5(said, usedforsecurity=False).digest(),
    "sha1": lambda said: hashlib.sha1(said, usedforsecurity=False).digest(),
    "sha256": lambda said: hashlib.sha256(said).digest(),
    "blake2b of 8 bytes": lambda said: hashlib.blake2b(said, digest_size=8).digest(),
    "blake2b": lambda said: hashlib.blake2b(said).digest(),
    "our chain without a key": lambda said: link(BARE, said),
}
COMMON = (
    "You are a helpful assistant.", "You are Claude Code, Anthropic's official CLI for Claude.",
    "Permission is hereby granted, free of charge, to any person obtaining a copy",
    "Licensed under the Apache License, Version 2.0 (the \"License\");",
    "This program is free software: you can redistribute it and/or modify", "hello", "hi", "admin",
    "default", "root", "test", "user", "alice", "bob", "tenant", "session", "main", "agent_001",
)  # fmt: skip
DOMAINS = ("gmail.com", "example.com", "outlook.com", "company.com")


def names_of(one: Recorded) -> Iterator[str]:
    yield from filter(None, (one.request, one.session, one.parent, one.agent, one.tenant))


def hashes_of(one: Recorded) -> Iterator[str]:
    yield from one.blocks
    if one.tail is not None:
        yield one.tail


def shown(requests: Iterable[Recorded]) -> set[str]:
    """All pseudonyms and hashes."""
    return {name for one in requests for name in chain(names_of(one), hashes_of(one))}


# ---- dictionary -----------------------------------------------------------------------------


def likely(count: int, texts: Iterable[bytes] = ()) -> Iterator[bytes]:
    """So many guesses: `texts`, common words, numbers of up to twelve digits, e-mail addresses."""
    return islice(chain(texts, (word.encode() for word in COMMON), _numbers_and_mails()), count)


def _numbers_and_mails() -> Iterator[bytes]:
    number = 0
    while True:
        yield b"%d" % number
        yield b"%012d" % (100_000_000_000 + number)
        yield f"user{number}@{DOMAINS[number % len(DOMAINS)]}".encode()
        number += 1


@dataclass(frozen=True)
class Dictionary:
    guesses: int
    hits: int
    schemes: tuple[str, ...]  # by which something was hit


def dictionary(
    targets: set[str], guesses: Iterable[bytes], schemes: dict[str, Scheme] = SCHEMES
) -> Dictionary:
    """Hits are guesses whose hash, by any scheme, begins with a target."""
    plain = {target.encode() for target in targets}
    raw: dict[int, set[bytes]] = {}
    for target in targets:
        if len(target) >= LEAST_DIGITS and HEX.fullmatch(target):
            raw.setdefault(len(target) // 2, set()).add(bytes.fromhex(target))
    count, hit, by = 0, set[bytes](), dict[str, None]()
    guesses = iter(guesses)
    while some := list(islice(guesses, BATCH)):
        count += len(some)
        if found := plain.intersection(some):
            hit |= found
            by["no hash at all"] = None
        for name, scheme in schemes.items():
            digests = [scheme(guess) for guess in some]
            for size, known in raw.items():
                cut = [digest[:size] for digest in digests]
                if not known.isdisjoint(cut):
                    hit.update(guess for guess, one in zip(some, cut, strict=True) if one in known)
                    by[name] = None
    return Dictionary(count, len(hit), tuple(by))


# ---- linkage --------------------------------------------------------------------------------


def linked(first: Iterable[Recorded], second: Iterable[Recorded]) -> int:
    """Names and hashes that are in both."""
    return len(shown(first) & shown(second))


# ---- lengths and times ----------------------------------------------------------------------


@dataclass(frozen=True)
class Anonymity:
    """Of (prompt length, arrival) in such steps: the smallest group, and who is alone in his."""

    token_step: int
    second_step: float
    smallest: int
    alone: int
    requests: int


def anonymity(requests: Sequence[Recorded], token_step: int, second_step: float) -> Anonymity:
    groups = Counter(
        (one.input_tokens // token_step, int(one.times.arrival // second_step)) for one in requests
    )
    alone = sum(1 for count in groups.values() if count == 1)
    return Anonymity(token_step, second_step, min(groups.values(), default=0), alone, len(requests))
