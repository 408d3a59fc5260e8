"""Content that stays, with secrets and personal data masked: the same one, always by the same mask.

Secrets are found by detect-secrets' patterns (keys and tokens of many services, private keys,
passwords beside their name, quoted strings of high entropy); e-mail addresses, telephone numbers
and IP addresses by patterns of ours. A mask has the shape of what it covers. Patterns miss what
nobody thought of: this level is for those who may read the content anyway.
"""

from __future__ import annotations

import re
from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from msgspec import structs

from stanchion.core.errors import ConfigError
from stanchion.core.recording import Content, Recorded
from stanchion.lab.anonymise.fields import Shield
from stanchion.lab.anonymise.key import Key

REMEMBERED = 20_000
NAMES = frozenset({"user", "user_id", "safety_identifier", "prompt_cache_key", "cache_salt"})
OCTET = r"(?:25[0-5]|2[0-4]\d|1?\d?\d)"
PERSONAL: dict[str, re.Pattern[str]] = {
    "private key": re.compile(
        r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL
    ),
    "token": re.compile(
        r"\b(?:sk|pk|rk|hf|npm|pypi|gh[oprsu]|github_pat|glpat|AIza)[-_]?[A-Za-z0-9_-]{28,200}\b"
    ),
    "e-mail": re.compile(r"\b[A-Za-z0-9._%+-]{1,64}@[A-Za-z0-9.-]{1,190}\.[A-Za-z]{2,24}\b"),
    "telephone": re.compile(r"(?<![\w.])(?:\+\d{1,3}[ -]?)(?:\(?\d{1,4}\)?[ -]?){2,5}\d{2,4}\b"),
    "telephone, written with dashes": re.compile(r"(?<![\w.-])\(?\d{3}\)?[ -]\d{3}-\d{4}\b"),
    "IPv4": re.compile(rf"(?<![\d.])(?:{OCTET}\.){{3}}{OCTET}(?![\d.])"),
    "IPv6": re.compile(r"(?<![\w:])(?:[0-9A-Fa-f]{1,4}:){4,7}[0-9A-Fa-f]{1,4}(?![\w:])"),
}  # fmt: skip
# Nine tenths of all lines name no secret, and looking for one beside its name is what takes time.
NAMED = re.compile("key|pass|pwd|secret|contrase|token|auth|credential", re.IGNORECASE)
LOCAL = re.compile(r"^(?:127\.|0\.0\.0\.0$|10\.|192\.168\.|255\.)")
LOWER, UPPER = "abcdefghijklmnopqrstuvwxyz", "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


class Detector(Protocol):
    def found(self, text: str) -> Iterator[tuple[str, str]]:
        """(what it is, the very characters) of each secret in the text."""


class Patterns:
    """Ours alone: what is personal."""

    def found(self, text: str) -> Iterator[tuple[str, str]]:
        for kind, pattern in PERSONAL.items():
            for place in pattern.finditer(text):
                if kind != "IPv4" or not LOCAL.match(place.group()):
                    yield kind, place.group()


class DetectSecrets:
    """Raise ConfigError where the package is not there."""

    def __init__(self) -> None:
        try:
            from detect_secrets.core.plugins.util import get_mapping_from_secret_type_to_class
            from detect_secrets.plugins.base import RegexBasedDetector
            from detect_secrets.plugins.high_entropy_strings import HighEntropyStringsPlugin
            from detect_secrets.plugins.ip_public import IPPublicDetector
        except ImportError:
            raise ConfigError(
                "the level `secrets` wants detect-secrets: pip install 'stanchion[lab]'"
            ) from None
        self._patterns: list[tuple[str, re.Pattern[str]]] = []
        self._entropy: list[Any] = []
        self._others: list[Any] = []
        found: dict[str, Any] = get_mapping_from_secret_type_to_class()
        for kind, plugin in found.items():
            if issubclass(plugin, IPPublicDetector):
                continue  # ours finds them too, and spares local ones
            if issubclass(plugin, RegexBasedDetector):
                self._patterns += [(kind, pattern) for pattern in plugin().denylist]
            elif issubclass(plugin, HighEntropyStringsPlugin):
                self._entropy.append(plugin())
            else:
                self._others.append(plugin())

    def found(self, text: str) -> Iterator[tuple[str, str]]:
        for kind, pattern in self._patterns:
            for place in pattern.finditer(text):
                yield kind, place.group()
        for line in text.splitlines():
            for plugin in self._entropy:
                for one in plugin.analyze_string(line):
                    if plugin.calculate_shannon_entropy(one) > plugin.entropy_limit:
                        yield plugin.secret_type, one
            for plugin in self._others if NAMED.search(line) else ():
                yield from ((plugin.secret_type, one) for one in plugin.analyze_string(line))


@dataclass
class Masks:
    """`masked` counts by kind."""

    key: Key
    detectors: tuple[Detector, ...]
    masked: Counter[str] = field(default_factory=Counter)
    _known: OrderedDict[str, str] = field(default_factory=OrderedDict)

    def text(self, said: str) -> str:
        if (known := self._known.get(said)) is not None:
            self._known.move_to_end(said)
            return known
        found: dict[str, str] = {}
        for detector in self.detectors:
            for kind, secret in detector.found(said):
                found.setdefault(secret, kind)
        made = said
        for secret in sorted(filter(None, found), key=len, reverse=True):
            if secret in made:
                self.masked[found[secret]] += 1
                made = made.replace(secret, self.mask(secret))
        self._known[said] = made
        if len(self._known) > REMEMBERED:
            self._known.popitem(last=False)
        return made

    def mask(self, secret: str) -> str:
        """Letters for letters, digits for digits; the rest, and so the shape, stays."""
        drawn = b""
        for part in range(len(secret) // 32 + 1):
            drawn += self.key.draw("mask", secret.encode(), str(part).encode())
        return "".join(map(_other, secret, drawn))

    def value(self, said: Any) -> Any:
        """JSON with every string of it, keys too."""
        match said:
            case dict():
                return {self.text(name): self._named(name, one) for name, one in said.items()}
            case list():
                return [self.value(one) for one in said]
            case str():
                return self.text(said)
            case _:
                return said

    def _named(self, name: str, said: Any) -> Any:
        if name in NAMES and isinstance(said, str):
            return self.key.name(said)
        return self.value(said)

    def record(self, one: Recorded, shield: Shield) -> Recorded:
        """Ids and log-probabilities of an answer that was masked are left out: they say it too."""
        shown = structs.replace(shield.record(one), sampling=one.sampling)
        if one.content is None:
            return shown
        said = one.content
        text, reasoning = self.text(said.text), self.text(said.reasoning)
        calls = tuple(map(self.text, said.calls))
        same = (text, reasoning, calls) == (said.text, said.reasoning, said.calls)
        content = Content(
            body=self.value(said.body),
            text=text,
            reasoning=reasoning,
            calls=calls,
            tokens=said.tokens if same else (),
            logprobs=said.logprobs if same else (),
        )
        return structs.replace(shown, content=content)


def _other(character: str, drawn: int) -> str:
    if character in LOWER:
        return LOWER[drawn % 26]
    if character in UPPER:
        return UPPER[drawn % 26]
    return str(drawn % 10) if character.isdecimal() else character
