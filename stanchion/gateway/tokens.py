"""Text to ids and ids to bytes: a model's vocabulary, its chat template, its end tokens.

The gateway tokenises once; ids travel. `load_vocabulary` reads a checkpoint's `tokenizer.json`
(byte-level BPE, or byte-fallback as SentencePiece exports it), `byte_vocabulary` is built in.
A vocabulary is immutable and its methods may run on any thread: long texts should, since they
take about a second a megabyte. This module reads files; it knows no requests.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import jinja2
import msgspec
from tokenizers import Tokenizer

from stanchion.core.errors import ConfigError, RequestRejected
from stanchion.core.request import Sampling
from stanchion.gateway.template import ChatTemplate

SMALL_TEXT_CHARACTERS = 4096  # up to here encoding takes no longer than a thread switch is worth


class Encoder(Protocol):
    def __call__(self, text: str, special: bool) -> list[int]: ...


@dataclass(frozen=True)
class Vocabulary:
    """`pieces[id]` are the bytes of a token; `special` are the ids that a decode skips."""

    pieces: tuple[bytes, ...] = field(repr=False)
    special: frozenset[int]
    eos_ids: tuple[int, ...]
    encoder: Encoder = field(repr=False)
    template: ChatTemplate | None = None
    defaults: Mapping[str, float] = field(default_factory=dict)  # the checkpoint's own sampling

    @property
    def size(self) -> int:
        return len(self.pieces)

    @cached_property
    def piece_bytes_max(self) -> int:
        return max(map(len, self.pieces))

    def encode(self, text: str, special: bool) -> list[int]:
        """`special` adds what the tokenizer itself puts around a text (a begin token, say)."""
        return self.encoder(text, special)

    def render(self, messages: Sequence[Mapping[str, Any]], **settings: Any) -> str:
        if self.template is None:
            raise RequestRejected("messages", "this model has no chat template; use completions")
        return self.template.render(messages, **settings)


# ---- the built-in one -----------------------------------------------------------------------

DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
BYTE_SPECIALS = ("<|endoftext|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>")
BYTE_VOCABULARY_SIZE = 272
_PLAIN_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_vocabulary() -> Vocabulary:
    """Ids 0 to 255 are bytes, then special tokens: for the hash model, which needs no training."""
    reserved = range(256 + len(BYTE_SPECIALS), BYTE_VOCABULARY_SIZE)
    specials = (*BYTE_SPECIALS, *(f"<|reserved_{number}|>" for number in reserved))
    ids = {name: number for number, name in enumerate(specials, start=256)}
    cut = re.compile("(" + "|".join(map(re.escape, specials)) + ")")

    def encode(text: str, special: bool) -> list[int]:
        tokens: list[int] = []
        for part in cut.split(text):
            known = ids.get(part)
            tokens.extend(part.encode() if known is None else (known,))
        return tokens

    return Vocabulary(
        pieces=(*(bytes([byte]) for byte in range(256)), *(name.encode() for name in specials)),
        special=frozenset(ids.values()),
        eos_ids=(ids["<|endoftext|>"],),
        encoder=encode,
        template=ChatTemplate(_PLAIN_TEMPLATE, {}),
    )


# ---- a checkpoint's -------------------------------------------------------------------------


def load_vocabulary(folder: str | Path) -> Vocabulary:
    folder = Path(folder)
    text = _text(folder / "tokenizer.json")
    if text is None:
        raise ConfigError(f"{folder} has no tokenizer.json")
    described = _json(text, folder / "tokenizer.json")
    added = {int(token["id"]): token for token in described.get("added_tokens", ())}
    config = _read(folder / "tokenizer_config.json")
    return Vocabulary(
        pieces=_pieces(described, added),
        special=frozenset(number for number, token in added.items() if token.get("special")),
        eos_ids=_eos_ids(folder, config, added),
        encoder=_encoder(Tokenizer.from_str(text)),
        template=_template(folder, config),
        defaults=_defaults(folder),
    )


def _encoder(tokenizer: Tokenizer) -> Encoder:
    def encode(text: str, special: bool) -> list[int]:
        # The batch form lets other threads run meanwhile; `encode` holds the interpreter.
        (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=special)
        return list(encoding.ids)

    return encode


def _pieces(described: dict[str, Any], added: dict[int, Any]) -> tuple[bytes, ...]:
    decoders = _decoder_types(described.get("decoder") or {})
    if "ByteLevel" in decoders:
        to_bytes = _byte_level(_alphabet())
    elif "ByteFallback" in decoders or "Metaspace" in decoders:
        to_bytes = _byte_fallback
    else:
        raise ConfigError(f"tokenizer.json: no byte-exact decoder for {sorted(decoders)}")
    words = described["model"]["vocab"]
    named = (
        words.items()
        if isinstance(words, dict)
        else ((word[0], number) for number, word in enumerate(words))
    )
    pieces = {number: to_bytes(word) for word, number in named}
    pieces.update((number, token["content"].encode()) for number, token in added.items())
    return tuple(pieces.get(number, b"") for number in range(max(pieces) + 1))


def _decoder_types(decoder: dict[str, Any]) -> set[str]:
    inner = (_decoder_types(part) for part in decoder.get("decoders", ()))
    return {str(decoder.get("type"))}.union(*inner)


def _alphabet() -> dict[str, int]:
    """The printable characters by which byte-level BPE writes the 256 bytes (GPT-2's table)."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = (byte for byte in range(256) if byte not in shown)
    table = {chr(byte): byte for byte in shown}
    table.update((chr(256 + place), byte) for place, byte in enumerate(hidden))
    return table


def _byte_level(alphabet: dict[str, int]) -> Any:
    def to_bytes(word: str) -> bytes:
        try:
            return bytes(alphabet[character] for character in word)
        except KeyError:
            return word.encode()  # a word added outside the alphabet stands for itself

    return to_bytes


_HEX_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_fallback(word: str) -> bytes:
    if found := _HEX_BYTE.fullmatch(word):
        return bytes([int(found.group(1), 16)])
    return word.replace("▁", " ").encode()


def _eos_ids(folder: Path, config: dict[str, Any], added: dict[int, Any]) -> tuple[int, ...]:
    for name in ("generation_config.json", "config.json"):
        found = _read(folder / name).get("eos_token_id")
        if found is not None:
            return tuple(found) if isinstance(found, list) else (int(found),)
    name = _content(config.get("eos_token"))
    return tuple(number for number, token in added.items() if token["content"] == name)


def _defaults(folder: Path) -> dict[str, float]:
    """What generation_config.json says for fields that a request leaves out, as vLLM does."""
    said = _read(folder / "generation_config.json")
    found = {name: said[name] for name in DEFAULTS if said.get(name) is not None}
    if found.get("top_k") in (0, -1):  # Hugging Face's and vLLM's words for "all"
        del found["top_k"]
    try:
        msgspec.convert({"max_tokens": 0, **found}, Sampling)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{folder}/generation_config.json: {error}") from None
    return found


def _template(folder: Path, config: dict[str, Any]) -> ChatTemplate | None:
    source = _text(folder / "chat_template.jinja") or config.get("chat_template")
    if isinstance(source, list):  # several named templates: the default one
        source = next((one["template"] for one in source if one["name"] == "default"), None)
    if not source:
        return None
    names = ("bos_token", "eos_token", "pad_token", "unk_token")
    try:
        return ChatTemplate(source, {name: _content(config.get(name)) for name in names})
    except jinja2.TemplateError as error:
        raise ConfigError(f"{folder}: the chat template does not compile: {error}") from None


def _content(token: Any) -> str:
    return str(token.get("content", "") if isinstance(token, dict) else token or "")


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None


def _read(path: Path) -> dict[str, Any]:
    text = _text(path)
    return {} if text is None else _json(text, path)


def _json(text: str, path: Path) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: not a JSON object")
    return found
