"""A prompt with other words, token for token as long, page by page as shared.

How: the chat template is rendered three times: with what was said; with marks in the places of all
texts; and with marks and with other names. The first two tell where each text lies in the prompt,
the third is what stays. Each text then gets surrogates that bring the next text to the very token
at which it was. They are cut where pages are, and each is a function of the tokens that it stands
for, so prompts share pages exactly as before. At the end the whole is rendered and encoded once
more: what does not come out exactly is not exported with words.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise, zip_longest
from typing import Any

import msgspec
import numpy as np
from msgspec import structs

from stanchion.core.errors import RequestRejected
from stanchion.core.recording import Content, Recorded
from stanchion.gateway.body import ChatBody, CompletionBody
from stanchion.gateway.openai import chat_text
from stanchion.gateway.tokens import Vocabulary
from stanchion.lab.anonymise.body import plain, replaced, shared, typed
from stanchion.lab.anonymise.key import Key
from stanchion.lab.anonymise.tokenised import Ids, Tokenised, begins
from stanchion.lab.anonymise.words import Begins, NotPlaced, Words

OPEN, SHUT = "\ue000", "\ue001"
MARK = re.compile(f"{OPEN}([0-9]+){SHUT}".encode())
Body = ChatBody | CompletionBody


@dataclass
class _Marks:
    """Puts a mark in each text's place. Names: as they are, or others."""

    words: Words
    tenant: str
    rename: bool
    texts: list[str] = field(default_factory=list)
    lines: list[bool] = field(default_factory=list)

    def text(self, said: str) -> str:
        before, core = edges(said)
        return before + self._mark(core, lines=True) if core else said

    def line(self, said: str) -> str:
        return self._mark(said, lines=False) if said else said

    def _mark(self, said: str, lines: bool) -> str:
        self.texts.append(said)
        self.lines.append(lines)
        return f"{OPEN}{len(self.texts) - 1}{SHUT}"

    def name(self, said: str) -> str:
        return self.words.name(self.tenant, said) if self.rename else said

    def number(self, said: int | float) -> int | float:
        return other_number(self.words.key, self.tenant, said) if self.rename else said

    def secret(self, said: str) -> str:
        return self.words.key.name(f"{self.tenant}\0{said}")


@dataclass
class _Fill:
    """Puts the surrogates there, in the same order."""

    words: Words
    tenant: str
    surrogates: Iterator[str]

    def text(self, said: str) -> str:
        before, core = edges(said)
        return f"{before}{next(self.surrogates)}" if core else said

    def line(self, said: str) -> str:
        return next(self.surrogates) if said else said

    def name(self, said: str) -> str:
        return self.words.name(self.tenant, said)

    def number(self, said: int | float) -> int | float:
        return other_number(self.words.key, self.tenant, said)

    def secret(self, said: str) -> str:
        return self.words.key.name(f"{self.tenant}\0{said}")


def edges(said: str) -> tuple[str, str]:
    """The space before, and what is said. Space before is layout: it stays, since it may be one
    token with what the template puts there. Space behind is text: more may follow elsewhere. Inside
    JSON all is text: there space is written with letters."""
    core = said.lstrip() if said.strip() else ""
    return said[: len(said) - len(core)], core


def other_number(key: Key, tenant: str, said: int | float) -> int | float:
    """Of as many digits. 0 and 1 say no more than a switch does."""
    if said in (0, 1):
        return said
    made = key.digits(tenant, repr(said))
    try:
        return int(made) if isinstance(said, int) else float(made)
    except ValueError:  # not a number
        return 0


@dataclass
class Surrogates:
    """`why` counts the records that were exported without words."""

    vocabulary: Vocabulary
    tokenised: Tokenised
    words: Words
    page_tokens: int
    why: Counter[str] = field(default_factory=Counter)
    tokens: int = 0

    def fresh(self) -> Surrogates:
        """With the same key, and nothing of what was met before."""
        words = self.words
        empty = Words(words.key, words.tokenised, words.code, words.prose, words.identifiers)
        return Surrogates(self.vocabulary, self.tokenised, empty, self.page_tokens)

    def content(self, one: Recorded) -> tuple[Content, Ids] | None:
        """Its content with other words, and the prompt's tokens; None if it cannot be had."""
        assert one.content is not None
        try:
            return self._content(one, one.content)
        except (NotPlaced, RequestRejected) as error:
            word = error.field if isinstance(error, RequestRejected) else str(error)
            self.why[re.sub(r"[^a-z ]", "", word)[:40]] += 1
            return None

    def _content(self, one: Recorded, said: Content) -> tuple[Content, Ids]:
        body = typed(one.api, said.body)
        if isinstance(body, CompletionBody):
            made, ids = self._completion(one, body)
        else:
            made, ids = self._chat(one, body)
        self.tokens += len(ids)
        content = Content(
            body=made | {"model": one.model} if one.model else made,
            text=self._output(one, said.text),
            reasoning=self._output(one, said.reasoning),
            calls=tuple(self._output(one, call) for call in said.calls),
        )
        return content, ids

    def _output(self, one: Recorded, text: str) -> str:
        """Of as many tokens. No prompt holds it, so it is at no place."""
        ids = self.tokenised.ids(text)
        said = _Said(ids, 0, 0, len(ids), len(ids))
        return self._pages(one.tenant, said, 0, "bare", True).decode()

    # ---- chats ------------------------------------------------------------------------------

    def _chat(self, one: Recorded, body: ChatBody) -> tuple[dict[str, Any], Ids]:
        original = chat_text(body, self.vocabulary)
        if OPEN in original:
            raise NotPlaced("marks of ours are in it")
        ids = self.tokenised.ids(original)
        offset = self.tokenised.prefix if body.add_special_tokens else 0
        if len(ids) + offset != one.input_tokens:
            raise NotPlaced("other tokens than recorded")
        marks, renamed = (_Marks(self.words, one.tenant, rename) for rename in (False, True))
        before = chat_text(replaced(body, marks), self.vocabulary)
        after = chat_text(replaced(body, renamed), self.vocabulary)
        leaves = _located(original.encode(), before.encode(), marks)
        skeleton = [part.decode() for part in MARK.split(after.encode())]
        if [int(place) for place in skeleton[1::2]] != [leaf.text for leaf in leaves]:
            raise NotPlaced("the template shows other texts for other names")
        made = self._fitted(one.tenant, ids, offset, leaves, skeleton[0::2])
        texts = [made.get(number, "x") for number in range(len(marks.texts))]
        filled = replaced(body, _Fill(self.words, one.tenant, iter(texts)))
        again = self.tokenised.ids(chat_text(filled, self.vocabulary))
        if len(again) != len(ids):
            raise NotPlaced("its surrogate is of another length")
        return _dumped(filled), again

    def _fitted(
        self,
        tenant: str,
        ids: Ids,
        offset: int,
        leaves: Sequence[_Leaf],
        skeleton: Sequence[str],
    ) -> dict[int, str]:
        """The surrogate of each text, by number. One that is shown twice is fitted where it is
        shown first."""
        places = begins(self.tokenised.sizes(ids))[:-1]
        spaced = [self._spaced(part) for part in skeleton[:-1]]
        firsts = [leaf.first - space for leaf, space in zip(leaves, spaced, strict=True)]
        starts = [int(np.searchsorted(places, first)) for first in firsts] + [len(ids)]
        kept = [self._size(skeleton, place) for place in range(len(skeleton))]
        made: dict[int, str] = {}
        at = kept[0]
        for count, leaf in enumerate(leaves):
            rest = kept[count + 1]
            tokens = max(1, starts[count + 1] - rest - at)
            if leaf.text not in made:
                # Tokens that hold some of the text and some of what is beside it count too.
                over = int(np.searchsorted(places, leaf.first, "right")) - 1
                until = int(np.searchsorted(places, leaf.last))
                said = _Said(ids, min(at, over), at, at + tokens, max(at + tokens, until))
                begin: Begins = "spaced" if spaced[count] else "bare"
                made[leaf.text] = self._pages(tenant, said, offset, begin, leaf.lines).decode()
            joined = " " * spaced[count] + made[leaf.text]
            at += len(self.tokenised.ids(joined)) + rest
        return made

    def _spaced(self, before: str) -> bool:
        """Does a word behind it make one token with the space at its end?"""
        return before.endswith(" ") and self._joins_space

    @cached_property
    def _joins_space(self) -> bool:
        return len(self.tokenised.ids("b a")) == 2

    def _size(self, skeleton: Sequence[str], place: int) -> int:
        """The tokens of a part that stays, between words."""
        left = "a" if place else ""
        right = "a" if place < len(skeleton) - 1 else ""
        return len(self.tokenised.ids(left + skeleton[place] + right)) - len(left) - len(right)

    def _pages(self, tenant: str, said: _Said, offset: int, begin: Begins, lines: bool) -> bytes:
        """A text in place of these tokens, cut where pages are."""
        parts: list[bytes] = []
        at = said.first
        while at < said.last:
            page = at + self.page_tokens - (at + offset) % self.page_tokens
            end = min(said.last, page)
            first = said.over if at == said.first else at
            last = min(said.until, page) if end == said.last else end
            piece = said.ids[first:last]
            how: Begins = begin if at == said.first else "amid"
            broken = lines and b"\n" in self.tokenised.text(piece)
            parts.append(self.words.text(tenant, piece, end - at, how, broken))
            at = end
        return b"".join(parts)

    # ---- completions ------------------------------------------------------------------------

    def _completion(self, one: Recorded, body: CompletionBody) -> tuple[dict[str, Any], Ids]:
        prompts: list[Any]
        if isinstance(body.prompt, str) or (body.prompt and isinstance(body.prompt[0], int)):
            prompts = [body.prompt]
        else:
            prompts = list(body.prompt)
        offset = self.tokenised.prefix if body.add_special_tokens is not False else 0
        made = [self._prompt(one.tenant, prompt, offset) for prompt in prompts]
        shown, ids = made[0]
        if len(ids) + (offset if isinstance(prompts[0], str) else 0) != one.input_tokens:
            raise NotPlaced("other tokens than recorded")
        put = _Marks(self.words, one.tenant, True)
        kept = CompletionBody(
            prompt=shown if len(made) == 1 else [text for text, _ in made],
            logprobs=body.logprobs,
            echo=body.echo,
            **shared(body, put),
        )
        return plain(kept), ids

    def _prompt(self, tenant: str, prompt: Any, offset: int) -> tuple[Any, Ids]:
        if isinstance(prompt, str):
            text = self._text_prompt(tenant, prompt, offset)
            ids = self.tokenised.ids(text)
            if len(ids) != len(self.tokenised.ids(prompt)):
                raise NotPlaced("its surrogate is of another length")
            return text, ids
        ids = self._id_prompt(tenant, np.asarray(prompt, dtype=np.int32))
        return ids.tolist(), ids

    def _text_prompt(self, tenant: str, prompt: str, offset: int) -> str:
        """Special tokens, and space behind them, stay; what is between them is text."""
        skeleton, leaves, at = [""], list[_Leaf](), 0
        for special, part in self.tokenised.stretches(prompt):
            before, core = (part, "") if special else edges(part)
            skeleton[-1] += before
            if core:
                first = at + len(before.encode())
                last = first + len(core.encode())
                leaves.append(_Leaf(len(leaves), first, last, True))
                skeleton.append("")
            at += len(part.encode())
        ids = self.tokenised.ids(prompt)
        made = self._fitted(tenant, ids, offset, leaves, skeleton)
        texts = [made[number] for number in range(len(leaves))]
        return "".join(part for pair in zip_longest(skeleton, texts, fillvalue="") for part in pair)

    def _id_prompt(self, tenant: str, ids: Ids) -> Ids:
        """As ids: each run between special tokens becomes as many tokens of other text."""
        special = np.isin(ids, list(self.tokenised.special))
        cuts = [0, *(np.flatnonzero(np.diff(special)) + 1).tolist(), len(ids)]
        parts: list[Ids] = []
        for first, last in pairwise(cuts):
            run = ids[first:last]
            if special[first]:
                parts.append(run)
                continue
            said = _Said(ids, first, first, last, last)
            made = self.tokenised.ids(self._pages(tenant, said, 0, "bare", True).decode())
            if len(made) != len(run):
                raise NotPlaced("its surrogate is of another length")
            parts.append(made)
        return np.concatenate(parts)


@dataclass(frozen=True)
class _Said:
    """The tokens `first` to `last` of a prompt; those from `over` to `until` hold some of it."""

    ids: Ids
    over: int
    first: int
    last: int
    until: int


# ---- where texts lie ------------------------------------------------------------------------


@dataclass(frozen=True)
class _Leaf:
    """`text`: its number. `first`, `last`: its bytes. `lines`: its surrogate may have some."""

    text: int
    first: int
    last: int
    lines: bool


def _located(original: bytes, marked: bytes, marks: _Marks) -> list[_Leaf]:
    parts = MARK.split(marked)
    if not original.startswith(parts[0]):
        raise NotPlaced("the template shows other words for other texts")
    at = len(parts[0])
    leaves: list[_Leaf] = []
    for place in range(1, len(parts), 2):
        number, then = int(parts[place]), parts[place + 1]
        said = marks.texts[number]
        shown = _shown(original, at, said, then, last=place + 2 >= len(parts))
        lines = marks.lines[number]
        leaves.append(_Leaf(number, at, at + len(shown), lines))
        at += len(shown) + len(then)
    if at != len(original):
        raise NotPlaced("the template shows other words for other texts")
    return leaves


def _shown(original: bytes, at: int, said: str, then: bytes, last: bool) -> bytes:
    """How the template shows a text: as it is, stripped, or as JSON of one kind or the other."""
    escaped = json.dumps(said)[1:-1], json.dumps(said, ensure_ascii=False)[1:-1]
    for form in (said, said.rstrip(), *escaped):
        raw = form.encode()
        end = at + len(raw)
        follows = original.startswith(raw, at) and original.startswith(then, end)
        if follows and (not last or end + len(then) == len(original)):
            return raw
    raise NotPlaced("the template shows a text in a way that is not known")


def _dumped(body: ChatBody) -> dict[str, Any]:
    """As a client sends it: the arguments of calls are texts."""
    messages = []
    for message in body.messages:
        calls = message.tool_calls
        made = calls and [
            structs.replace(
                one,
                function=structs.replace(
                    one.function, arguments=msgspec.json.encode(one.function.arguments).decode()
                ),
            )
            for one in calls
        ]
        messages.append(structs.replace(message, tool_calls=made))
    found = plain(structs.replace(body, messages=messages))
    found["messages"] = [
        {name: value for name, value in one.items() if value is not None}
        for one in found["messages"]
    ]
    return found
