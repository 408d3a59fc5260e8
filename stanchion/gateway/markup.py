"""GLM's markup, read off the text of an answer: reasoning, content, tool calls. Pure.

    <think>reasoning</think>content<tool_call>name
    <arg_key>key</arg_key>
    <arg_value>value</arg_value>
    </tool_call>

GLM-4.5 writes the line breaks, GLM-4.7 and GLM-5 do not; both are read. Reasoning is opened by the
answer's first word or by the end of the prompt, and ended by `</think>` alone.

Promises, for every way the text is cut:
* the parts, put together, are the same;
* an arguments text is valid JSON if and only if its call was closed: no half of a call can be
  taken for a whole one;
* nothing is dropped but whitespace beside a marker. A `<tool_call>` that no call follows is
  content. A call that breaks off, or goes on with what is no markup, is told as cut (`CallCut`,
  with all of its markup), and what follows is content.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import count, groupby

from stanchion.gateway.toolschema import STRING, Types, escaped, written

THINK, THOUGHT = "<think>", "</think>"
CALL, CALLED = "<tool_call>", "</tool_call>"
KEY, KEY_END = "<arg_key>", "</arg_key>"
VALUE, VALUE_END = "<arg_value>", "</arg_value>"
REASONING_MARKERS = (THINK, THOUGHT)
TOOL_MARKERS = (CALL, CALLED, KEY, KEY_END, VALUE, VALUE_END)

SPACE = " \t\r\n"
LAYOUT_MAX = 256  # of a run of whitespace, so much at its end may be layout; before that is text
_NAME = re.compile(r"[ \t\r\n]*([A-Za-z0-9_.:/-]{1,128})[ \t\r\n]*")


@dataclass(frozen=True)
class Reasoning:
    text: str


@dataclass(frozen=True)
class Content:
    text: str


@dataclass(frozen=True)
class CallOpened:
    index: int
    name: str


@dataclass(frozen=True)
class CallArguments:
    """The next characters of the arguments' JSON."""

    index: int
    text: str


@dataclass(frozen=True)
class CallClosed:
    index: int


@dataclass(frozen=True)
class CallCut:
    """It will never be whole. `raw`: its markup, from the marker on."""

    index: int
    raw: str


Part = Reasoning | Content | CallOpened | CallArguments | CallClosed | CallCut


def merged(parts: Iterable[Part]) -> tuple[Part, ...]:
    """Neighbours that continue each other, as one."""
    done: list[Part] = []
    for _, run in groupby(parts, _continuing()):
        first, *more = run
        if more and isinstance(first, Reasoning | Content | CallArguments):
            texts = [part.text for part in (first, *more) if isinstance(part, type(first))]
            done.append(replace(first, text="".join(texts)))
        else:
            done.append(first)
    return tuple(done)


def _continuing() -> Callable[[Part], object]:
    """A key that is the same for the texts of one kind, and different for everything else."""
    place = count()

    def key(part: Part) -> object:
        match part:
            case Reasoning() | Content():
                return type(part)
            case CallArguments():
                return part.index
            case _:
                return part, next(place)

    return key


@dataclass(frozen=True)
class Markup:
    """What is to be read. `thinking`: the prompt ended inside of reasoning; `thought`: right after
    it. `tools`: by name, the types of its arguments; None: no calls are read. After `calls_max`
    calls the answer is over."""

    reasoning: bool = False
    thinking: bool = False
    thought: bool = False
    tools: Mapping[str, Mapping[str, Types]] | None = None
    calls_max: int | None = None


@dataclass
class _Call:
    index: int
    types: Mapping[str, Types]
    raw: list[str] = field(default_factory=list)
    text: list[str] = field(default_factory=list)  # of the key or value that is being read
    key: str = ""
    arguments: int = 0


class MarkupFold:
    def __init__(self, markup: Markup) -> None:
        self._markup = markup
        self._rest = ""  # not decided yet
        self._space = ""  # said by the answer, unless a marker follows
        self._fresh = markup.thinking or markup.thought  # right after a marker: space is layout
        self._call = _Call(0, {})
        self._parts: list[Part] = []
        self._read: Callable[[], bool] = self._content
        if markup.thinking:
            self._read = self._reasoning
        elif markup.reasoning and not markup.thought:
            self._read = self._begin
        self.opened = 0
        self.closed = 0
        self.over = False  # `calls_max` was reached

    @property
    def complete(self) -> bool:
        """Calls were made, all of them whole."""
        return self.opened == self.closed > 0

    def push(self, text: str) -> tuple[Part, ...]:
        self._rest += text
        while not self.over and self._read():
            pass
        return self._taken()

    def finish(self) -> tuple[Part, ...]:
        """The text ended: nothing undecided can be a marker any more."""
        if self.over:
            return ()
        kind: type[Reasoning | Content] = Content
        if self._read in (self._between, self._in_key, self._before_value, self._in_value):
            self._cut_off()
        elif self._read == self._name:
            self._say(Content, CALL + self._rest)
        else:
            kind = Reasoning if self._read == self._reasoning else Content
            self._say(kind, self._rest)
        if self._space:
            self._parts.append(kind(self._space))
        self._rest, self._space, self.over = "", "", True
        return self._taken()

    def _taken(self) -> tuple[Part, ...]:
        parts, self._parts = self._parts, []
        return merged(parts)

    # ---- readers: each consumes of `_rest`; False where it needs more ------------------------

    def _begin(self) -> bool:
        text = self._rest.lstrip(SPACE)
        if len(self._rest) - len(text) <= LAYOUT_MAX:
            if text.startswith(THINK):
                self._rest, self._fresh, self._read = text[len(THINK) :], True, self._reasoning
                return True
            if THINK.startswith(text):
                return False
        self._read = self._content
        return True

    def _reasoning(self) -> bool:
        before, found, self._rest = _cut(self._rest, THOUGHT)
        self._say(Reasoning, before)
        if found:
            self._space, self._fresh, self._read = "", True, self._content
        return found

    def _content(self) -> bool:
        if self._markup.tools is None:
            self._say(Content, self._rest)
            self._rest = ""
            return False
        before, found, self._rest = _cut(self._rest, CALL)
        self._say(Content, before)
        if found:
            self._read = self._name
        return found

    def _name(self) -> bool:
        found = _NAME.match(self._rest)
        after = self._rest[found.end() :] if found else self._rest.lstrip(SPACE)
        before = len(self._rest) - len(after)
        if before > LAYOUT_MAX:
            return self._no_call()
        if found and after.startswith((KEY, CALLED)):
            return self._open(found.group(1), before)
        undecided = KEY.startswith(after) or CALLED.startswith(after) if found else not after
        return False if undecided else self._no_call()

    def _between(self) -> bool:
        self._skip_layout()
        if self._rest.startswith(KEY):
            self._take(len(KEY))
            self._read = self._in_key
            return True
        if self._rest.startswith(CALLED):
            return self._close()
        if KEY.startswith(self._rest) or CALLED.startswith(self._rest):
            return False
        return self._break()

    def _in_key(self) -> bool:
        if not self._collect(KEY_END):
            return False
        call = self._call
        call.key, call.text = "".join(call.text).strip(SPACE), []
        self._argue(f"{self._joint()}{written(call.key, STRING)}: ")
        call.arguments += 1
        self._read = self._before_value
        return True

    def _before_value(self) -> bool:
        self._skip_layout()
        if self._rest.startswith(VALUE):
            self._take(len(VALUE))
            if self._plain():
                self._argue('"')
            self._read = self._in_value
            return True
        return False if VALUE.startswith(self._rest) else self._break()

    def _in_value(self) -> bool:
        found = self._collect(VALUE_END)
        call = self._call
        if self._plain():
            self._argue(escaped("".join(call.text)) + ('"' if found else ""))
            call.text = []
        elif found:
            self._argue(written("".join(call.text), self._types()))
            call.text = []
        if found:
            self._read = self._between
        return found

    # ---- a call -----------------------------------------------------------------------------

    def _open(self, name: str, consumed: int) -> bool:
        assert self._markup.tools is not None
        self._call = _Call(self.opened, self._markup.tools.get(name, {}), [CALL])
        self._take(consumed)
        self._parts.append(CallOpened(self.opened, name))
        self._space, self._fresh, self._read = "", False, self._between
        self.opened += 1
        return True

    def _no_call(self) -> bool:
        self._say(Content, CALL)
        self._read = self._content
        return True

    def _close(self) -> bool:
        self._take(len(CALLED))
        self._argue("}" if self._call.arguments else "{}")
        self._parts.append(CallClosed(self._call.index))
        self.closed += 1
        self._fresh, self._read = True, self._content
        self.over = self.closed == self._markup.calls_max
        return True

    def _break(self) -> bool:
        self._parts.append(CallCut(self._call.index, "".join(self._call.raw)))
        self._read = self._content
        return True

    def _cut_off(self) -> None:
        """What was not decided is told too, as a string that nothing ends."""
        call = self._call
        undecided = "".join(call.text) + self._rest
        if self._read == self._in_value:
            self._argue(("" if self._plain() else '"') + escaped(undecided))
        elif self._read == self._in_key:
            self._argue(f'{self._joint()}"{escaped(undecided)}')
        self._take(len(self._rest))
        self._parts.append(CallCut(call.index, "".join(call.raw)))

    def _types(self) -> Types:
        return self._call.types.get(self._call.key, frozenset())

    def _plain(self) -> bool:
        return self._types() == STRING

    def _joint(self) -> str:
        return ", " if self._call.arguments else "{"

    def _argue(self, text: str) -> None:
        if text:
            self._parts.append(CallArguments(self._call.index, text))

    # ---- text -------------------------------------------------------------------------------

    def _say(self, kind: type[Reasoning | Content], text: str) -> None:
        if self._fresh:
            text = text.lstrip(SPACE)
            self._fresh = not text
        text = self._space + text
        layout = min(len(text) - len(text.rstrip(SPACE)), LAYOUT_MAX)
        said, self._space = text[: len(text) - layout], text[len(text) - layout :]
        if said:
            self._parts.append(kind(said))

    def _collect(self, marker: str) -> bool:
        before, found, _ = _cut(self._rest, marker)
        self._call.text.append(before)
        self._take(len(before) + (len(marker) if found else 0))
        return found

    def _skip_layout(self) -> None:
        self._take(len(self._rest) - len(self._rest.lstrip(SPACE)))

    def _take(self, length: int) -> None:
        self._call.raw.append(self._rest[:length])
        self._rest = self._rest[length:]


def _cut(text: str, marker: str) -> tuple[str, bool, str]:
    """What comes before the marker, whether it is there, and what is after it: where it is not
    there, the end of the text that may still become it."""
    before, found, after = text.partition(marker)
    if found:
        return before, True, after
    for size in range(min(len(text), len(marker) - 1), 0, -1):
        if marker.startswith(text[-size:]):
            return text[:-size], False, text[-size:]
    return text, False, ""
