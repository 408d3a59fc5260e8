"""A vocabulary that writes and reads GLM's markup: bytes, and the markers as special tokens or not.

The template is written in the manner of GLM-4.7's and GLM-5's: it opens the reasoning itself.
"""

from __future__ import annotations

from dataclasses import replace

from stanchion.gateway.markup import REASONING_MARKERS, TOOL_MARKERS
from stanchion.gateway.template import ChatTemplate
from stanchion.gateway.tokens import Vocabulary, byte_vocabulary

MARKERS = (*REASONING_MARKERS, *TOOL_MARKERS)
FIRST_MARKER = 261  # the first of the built-in vocabulary's reserved tokens
TEMPLATE = """
{%- if tools %}<|system|>{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif -%}
{%- for m in messages -%}
{%- if m.role == 'tool' -%}<|user|>[{{ m.tool_call_id }}]{{ m.content }}
{%- else -%}<|{{ m.role }}|>
{%- if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif -%}
{{ m.content }}
{%- for call in m.tool_calls or [] -%}
<tool_call>{{ call.function.name }}
{%- for key, value in call.function.arguments.items() -%}
<arg_key>{{ key }}</arg_key>
{{- '<arg_value>' + (value if value is string else value | tojson) + '</arg_value>' }}
{%- endfor -%}
</tool_call>
{%- endfor -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>
{{- '</think>' if enable_thinking is defined and not enable_thinking else '<think>' }}
{%- endif -%}
"""


def glm_vocabulary() -> Vocabulary:
    """Markers are plain text, a byte a token."""
    return replace(byte_vocabulary(), template=ChatTemplate(TEMPLATE, {}))


def glm_special() -> Vocabulary:
    """Markers are special tokens, as in GLM's own vocabularies and the embedded one."""
    plain = glm_vocabulary()
    pieces = list(plain.pieces)
    for number, marker in enumerate(MARKERS, start=FIRST_MARKER):
        pieces[number] = marker.encode()
    return replace(plain, pieces=tuple(pieces))


def as_tokens(text: str, special: bool) -> list[int]:
    """An answer's tokens: as `glm_special` or as `glm_vocabulary` would have them."""
    if not special:
        return list(text.encode())
    for number, marker in enumerate(MARKERS):
        text = text.replace(marker, chr(0xE000 + number))
    return [
        byte
        for character in text
        for byte in (
            [FIRST_MARKER + ord(character) - 0xE000]
            if 0xE000 <= ord(character) < 0xE000 + len(MARKERS)
            else character.encode()
        )
    ]
