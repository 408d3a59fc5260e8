"""The grammar of a whole answer, around what the client asked for: reasoning, calls, content. Pure.

A model that reasons does so first, freely, and so do its words before a call; what has to follow a
schema are the content, and the calls in GLM's markup (`markup` reads the same). Where the markers
are special tokens they are written as such, and a text that spells one is no way around it.

* `tool_choice` by name or `required`: one call, or one and more, and no other content.
* `strict` tools: wherever the model calls one, its arguments follow the schema (`arguments`).
* `response_format` beside tools that may be called: calls, or content as asked for.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from stanchion.core.errors import RequestRejected
from stanchion.core.grammar import TooLarge, check
from stanchion.core.matching import GrammarFault
from stanchion.gateway.arguments import Checked, Literals, Plain, value_of
from stanchion.gateway.body import ChatBody, CompletionBody, Tool
from stanchion.gateway.conversation import forced, shown_tools
from stanchion.gateway.markup import (
    CALL,
    CALLED,
    KEY,
    KEY_END,
    THINK,
    THOUGHT,
    VALUE,
    VALUE_END,
    Markup,
)
from stanchion.gateway.structured import (
    ANY,
    GUIDED,
    Json,
    constraint,
    lark_part,
    literal,
)

if TYPE_CHECKING:
    from stanchion.gateway.tokens import Vocabulary

FREE_KEY = "[A-Za-z0-9_.-]+"


@dataclass(frozen=True)
class Asked:
    """Grammars that a client's own words came to, the first of them on top, and their field."""

    field: str
    grammars: tuple[Json, ...]


@dataclass(frozen=True)
class Grammar:
    """`text` is what a worker gets."""

    text: str
    asked: tuple[Asked, ...]

    def compile(self, check: Callable[[str], None]) -> None:
        """Raise RequestRejected for what does not compile. The client's parts are looked at one by
        one too: that tells which it is, and a part that no text follows would else be found when
        an answer comes to it."""
        for one in self.asked:
            try:
                first, *others = one.grammars
                check(_text([lark_part("start: @asked"), {"name": "asked", **first}, *others]))
            except GrammarFault as fault:
                raise RequestRejected(one.field, str(fault)) from None
        try:
            check(self.text)
        except GrammarFault as fault:
            raise RequestRejected(
                self.asked[0].field if self.asked else "tools", str(fault)
            ) from None


def _text(grammars: Sequence[Json]) -> str:
    return msgspec.json.encode({"grammars": grammars}).decode()


def _field(asked: Sequence[Asked]) -> str:
    return asked[0].field if asked else "tools"


def grammar_of(
    body: ChatBody | CompletionBody, markup: Markup | None, vocabulary: Vocabulary
) -> Grammar | None:
    """None where the answer is free. Raise RequestRejected for what cannot be followed."""
    wanted = constraint(body)
    tools = shown_tools(body) if isinstance(body, ChatBody) else ()
    must = forced(body) if isinstance(body, ChatBody) else None
    if must is None and wanted is None and not any(one.function.strict for one in tools):
        return None
    _check_ends(body, wanted.field if wanted is not None else "tools")
    words = _Words(vocabulary)
    once = body.parallel_tool_calls is False if isinstance(body, ChatBody) else False
    calls = words.calls(tools, must, once) if tools else ""
    opening = words.opening(markup)
    if must is not None:
        lark = f'start: {opening} ("\\n")? calls\n{calls}'
    elif wanted is None:
        lark = f"start: {opening} {words.amid(once)}\n{calls}"
    else:
        content = words.named("content", wanted.part)
        words.asked.append(Asked(wanted.field, (wanted.part,)))
        either = f'(("\\n")? calls | {content})' if calls else content
        lark = f"start: {opening} {either}\n{calls}"
    main = lark_part(lark + "\n".join(words.terminals))
    text = _text([main, *words.others])
    try:
        check(text)
    except TooLarge as error:
        raise RequestRejected(_field(words.asked), str(error)) from None
    return Grammar(text, tuple(words.asked))


def constrained(body: ChatBody | CompletionBody) -> bool:
    """May there be a grammar at all? Quickly."""
    said = [body.response_format, body.structured_outputs]
    said += [getattr(body, f"guided_{kind}") for kind in GUIDED]
    if any(one is not None for one in said):
        return True
    if not isinstance(body, ChatBody):
        return False
    return forced(body) is not None or any(one.function.strict for one in shown_tools(body))


def _check_ends(body: ChatBody | CompletionBody, field: str) -> None:
    for name in ("ignore_eos", "min_tokens"):
        if getattr(body, name):
            raise RequestRejected(name, f"not with {field}: such an answer ends where it has to")


@dataclass
class _Layout:
    """GLM's markers in one Lark text, as the vocabulary has them."""

    special: dict[str, int]
    terminals: list[str] = field(default_factory=list)

    def word(self, marker: str) -> str:
        number = self.special.get(marker)
        return literal(marker) if number is None else f"<[{number}]>"

    def free(self, name: str, marker: str, *regexes: str) -> str:
        """A terminal without the marker in it, which every regex matches."""
        without = f"~/{ANY}{_escaped(marker)}{ANY}/"
        every = " & ".join(f"/{one}/" for one in regexes or (ANY,))
        self.terminals.append(f"{name}: {every} & {without}")
        return name

    def until(self, name: str, marker: str, *regexes: str) -> str:
        """A text that every regex matches, up to the marker, and the marker."""
        free = self.free(name.upper(), marker, *regexes)
        if marker in self.special:
            return f"{free} {self.word(marker)}"
        self.terminals.append(f"{name}[lazy]: {free} {literal(marker)}")
        return name


def _escaped(marker: str) -> str:
    return re.escape(marker).replace("/", r"\/")


class _Words(_Layout):
    def __init__(self, vocabulary: Vocabulary) -> None:
        named = {vocabulary.pieces[one]: one for one in vocabulary.special}
        markers = (THINK, THOUGHT, CALL, CALLED, KEY, KEY_END, VALUE, VALUE_END)
        super().__init__({one: named[one.encode()] for one in markers if one.encode() in named})
        self.asked: list[Asked] = []
        self.others: list[Json] = []

    def named(self, name: str, part: Json) -> str:
        self.others.append({"name": name, **part})
        return f"@{name}"

    def opening(self, markup: Markup | None) -> str:
        """The reasoning, as far as it is the answer's and not the prompt's."""
        if markup is None or not markup.reasoning or markup.thought:
            return ""
        thought = f'{self.until("thought", THOUGHT)} ("\\n"){{0,2}}'
        return thought if markup.thinking else f"({self.word(THINK)} {thought})?"

    def amid(self, once: bool) -> str:
        """Text, and calls in it wherever the model begins one."""
        call = f"{self.until('before', CALL)} called"
        return f"({call}){'?' if once else '*'} {self.free('TAIL', CALL)}"

    def calls(self, tools: Sequence[Tool], must: str | None, once: bool) -> str:
        """Rules `calls`, and `called`: a call from behind its first marker on."""
        able = [(place, one) for place, one in enumerate(tools) if must in (None, "", _name(one))]
        names = [self._tool(place, one) for place, one in able]
        more = "" if once or must else '(("\\n")? call)*'
        rules = [f"calls: call {more}", f"call: {self.word(CALL)} called"]
        rules.append(f"called: {' | '.join(names)}")
        return "\n".join(rules) + "\n"

    def _tool(self, place: int, tool: Tool) -> str:
        """One tool's calls as a grammar of their own."""
        layout, inner = _Layout(self.special), len(self.others)
        name = f"tool_{place}"
        where = f"tools[{place}].function.parameters"
        if tool.function.strict:
            inside = self._strict(layout, name, where, tool.function.parameters or {})
        else:
            inside = _free(layout, tool.function.parameters)
        start = f"start: {literal(_name(tool))} nl {inside} {layout.word(CALLED)}"
        part = lark_part("\n".join([start, 'nl: ("\\n")?', *layout.terminals]))
        if tool.function.strict:
            self.asked.append(Asked(where, (part, *self.others[inner:])))
        return self.named(name, part)

    def _strict(self, layout: _Layout, name: str, where: str, schema: Any) -> str:
        said = []
        for place, (key, value) in enumerate(value_of(where, schema).items()):
            match value.text:
                case Literals(texts):
                    written = f"({' | '.join(map(literal, texts))}) {layout.word(VALUE_END)}"
                case Plain(regexes):
                    written = layout.until(f"v{place}", VALUE_END, *regexes)
                case Checked(part):
                    self.asked.append(Asked(f"{where}.properties.{key}", (part,)))
                    inner = self.named(f"{name}_{place}", part)
                    written = f"{inner} {layout.word(VALUE_END)}"
            one = _argument(layout, literal(key), written)
            said.append(one if value.required else f"({one})?")
        return " ".join(said)


def _argument(layout: _Layout, key: str, value: str) -> str:
    """`value` goes on to its end marker."""
    return f"{layout.word(KEY)} {key} {layout.word(KEY_END)} nl {layout.word(VALUE)} {value} nl"


def _free(layout: _Layout, parameters: Any) -> str:
    """Arguments of any kind and number, by the names that are declared, if any are."""
    declared = parameters.get("properties") if isinstance(parameters, dict) else None
    keys = f"/{FREE_KEY}/"
    if isinstance(declared, dict) and declared:
        keys = f"({' | '.join(literal(name) for name in declared if name) or keys})"
    return f"({_argument(layout, keys, layout.until('value', VALUE_END))})*"


def _name(tool: Tool) -> str:
    return tool.function.name
