"""A prompt with other words, token for token as long, page by page as shared.

How: the chat template is rendered three times: with what was said; with marks in the places of all
texts; and with marks and with other names. The first two tell where each text lies in the prompt,
the third is what stays. Each text then gets surrogates that bring the next text to the very token
at which it was. They are cut where pages are, and each is a function of the tokens that it stands
for, so prompts share pages exactly as before. At the end the whole is rendered and encoded once
more: what does not come out exactly is not exported with words.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
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
from stanchion.lab.anonymise.words import NotPlaced, Words

OPEN, SHUT = "\ue000", "\ue001"
MARK = re.compile(f"{OPEN}([0-9]+){SHUT}".encode())
Body = ChatBody | CompletionBody


@dataclass
class _Marks:
    """Puts a mark in each text's place. Names: as they are, or others."""

    words: Words
    rename: bool
    texts: list[str] = field(default_factory=list)
    lines: list[bool] = field(default_factory=list)

    def text(self, said: str, lines: bool = True) -> str:
        if not said:
            return said
        self.texts.append(said)
        self.lines.append(lines)
        return f"{OPEN}{len(self.texts) - 1}{SHUT}"

    def line(self, said: str) -> str:
        return self.text(said, lines=False)

    def name(self, said: str) -> str:
        return self.words.name(said) if self.rename else said

    def number(self, said: int | float) -> int | float:
        return other_number(self.words.key, said) if self.rename else said

    def secret(self, said: str) -> str:
        return self.words.key.name(said)


@dataclass
class _Fill:
    """Puts the surrogates there, in the same order."""

    words: Words
    surrogates: Iterator[str]

    def text(self, said: str) -> str:
        return next(self.surrogates) if said else said

    line = text

    def name(self, said: str) -> str:
        return self.words.name(said)

    def number(self, said: int | float) -> int | float:
        return other_number(self.words.key, said)

    def secret(self, said: str) -> str:
        return self.words.key.name(said)


def other_number(key: Key, said: int | float) -> int | float:
    """Of as many digits. 0 and 1 say no more than a switch does."""
    if said in (0, 1):
        return said
    made = key.digits(repr(said))
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
        return self._pages(one.tenant, ids, 0, len(ids), lines=True).decode()

    # ---- chats ------------------------------------------------------------------------------

    def _chat(self, one: Recorded, body: ChatBody) -> tuple[dict[str, Any], Ids]:
        original = chat_text(body, self.vocabulary)
        if OPEN in original:
            raise NotPlaced("marks of ours are in it")
        ids = self.tokenised.ids(original)
        offset = self.tokenised.prefix if body.add_special_tokens else 0
        if len(ids) + offset != one.input_tokens:
            raise NotPlaced("other tokens than recorded")
        marks, renamed = _Marks(self.words, False), _Marks(self.words, True)
        before = chat_text(replaced(body, marks), self.vocabulary)
        after = chat_text(replaced(body, renamed), self.vocabulary)
        leaves = _located(original.encode(), before.encode(), marks)
        skeleton = MARK.split(after.encode())
        if [int(place) for place in skeleton[1::2]] != [leaf.text for leaf in leaves]:
            raise NotPlaced("the template shows other texts for other names")
        made = self._fitted(one.tenant, ids, offset, leaves, skeleton[0::2], marks.texts)
        filled = replaced(body, _Fill(self.words, iter(made)))
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
        skeleton: Sequence[bytes],
        texts: Sequence[str],
    ) -> list[str]:
        """The surrogate of each text. One that the template shows twice is fitted where it is
        shown first."""
        places = begins(self.tokenised.sizes(ids))
        starts = [int(np.searchsorted(places, leaf.first)) for leaf in leaves] + [len(ids)]
        kept = [len(self.tokenised.ids(part.decode())) for part in skeleton]
        made: dict[int, str] = {}
        at = kept[0]
        for count, leaf in enumerate(leaves):
            rest = kept[count + 1]
            tokens = max(1, starts[count + 1] - rest - at)
            if leaf.text not in made:
                raw = self._pages(tenant, ids[at : at + tokens], at + offset, tokens, leaf.lines)
                made[leaf.text] = raw.decode()
            at += len(self.tokenised.ids(made[leaf.text])) + rest
        return [made.get(number, "x") for number in range(len(texts))]

    def _pages(self, tenant: str, ids: Ids, at: int, tokens: int, lines: bool) -> bytes:
        """A text of so many tokens from that place of the prompt on, cut where pages are."""
        parts: list[bytes] = []
        done = 0
        while done < tokens:
            size = min(tokens - done, self.page_tokens - (at + done) % self.page_tokens)
            first = not done
            piece = ids[done : done + size]
            parts.append(self.words.text(tenant, piece, size, first, lines))
            done += size
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
        put = _Marks(self.words, True)
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
        """Special tokens stay; what is between them is text."""
        parts, at = [], offset
        for special, part in self.tokenised.stretches(prompt):
            ids = self.tokenised.ids(part)
            lines = not special and _is_code(part)
            parts.append(
                part if special else self._pages(tenant, ids, at, len(ids), lines).decode()
            )
            at += len(ids)
        return "".join(parts)

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
            made = self.tokenised.ids(self._pages(tenant, run, first, len(run), True).decode())
            if len(made) != len(run):
                raise NotPlaced("its surrogate is of another length")
            parts.append(made)
        return np.concatenate(parts)


# ---- where texts lie ------------------------------------------------------------------------


@dataclass(frozen=True)
class _Leaf:
    """`text`: its number. `first`: its first byte. `lines`: its surrogate may have some."""

    text: int
    first: int
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
        leaves.append(_Leaf(number, at, marks.lines[number] and _is_code(said)))
        at += len(shown) + len(then)
    if at != len(original):
        raise NotPlaced("the template shows other words for other texts")
    return leaves


def _shown(original: bytes, at: int, said: str, then: bytes, last: bool) -> bytes:
    """How the template shows a text: as it is, stripped, or as JSON."""
    for form in _forms(said):
        raw = form.encode()
        end = at + len(raw)
        follows = original.startswith(raw, at) and original.startswith(then, end)
        if follows and (not last or end + len(then) == len(original)):
            return raw
    raise NotPlaced("the template shows a text in a way that is not known")


def _forms(said: str) -> Iterator[str]:
    yield said
    yield from (said.strip(), said.rstrip(), said.lstrip(), said.strip("\n"))
    yield msgspec.json.encode(said).decode()[1:-1]
    yield said.encode("unicode_escape").decode()


def _is_code(said: str) -> bool:
    """Several lines, or the signs of a program: its surrogate may then have lines too."""
    return said.count("\n") > 1 or bool(re.search(r"[{};]|def |=\s", said))


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
