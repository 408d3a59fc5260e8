"""A gateway's recorder, made of its settings; and what it is told of each request."""

from __future__ import annotations

from pathlib import Path

from stanchion.core.recording import Header
from stanchion.gateway.fleet import Fleet
from stanchion.gateway.openai import Ask
from stanchion.gateway.record.blocks import digest
from stanchion.gateway.record.course import APIS, Arrived
from stanchion.gateway.record.recorder import Recorder
from stanchion.gateway.record.segments import Marks
from stanchion.gateway.settings import GatewaySettings
from stanchion.gateway.tokens import Vocabulary
from stanchion.gateway.web import Call

SESSION = b"x-session-id"
BLOCK_TOKENS = 16  # of a hash, where the server does not say how large its pages are


def recorder(settings: GatewaySettings, vocabulary: Vocabulary, fleet: Fleet) -> Recorder | None:
    """None where nothing is to be recorded. Raise ConfigError where it cannot be."""
    if not settings.record:
        return None
    tokenizer = digest(*vocabulary.pieces)
    template = digest(vocabulary.template.source.encode()) if vocabulary.template else ""

    def header() -> Header | None:
        hello = fleet.hello
        if hello is None:
            return None
        return Header(
            source="stanchion",
            model=settings.served_model_name or hello.model,
            tokenizer=tokenizer,
            template=template,
            block_tokens=hello.page_tokens if hello.page_tokens > 1 else BLOCK_TOKENS,
            level="content" if settings.record_content else "none",
            failpoints=hello.failpoints,
        )

    return Recorder(
        Path(settings.record),
        settings.record_content,
        int(settings.record_max_gib * 2**30),
        Marks.of(vocabulary.pieces, vocabulary.special),
        header,
    )


def told(call: Call, ask: Ask, tenant: str) -> Arrived:
    return Arrived(
        request=call.name,
        session=call.headers.get(SESSION, b"").decode("latin-1"),
        tenant=tenant,
        salt=ask.salt,
        api=APIS[call.scope["path"]],
        model=ask.model,
        tokens=ask.prompts[0],
        tools=ask.tools,
        sampling=ask.sampling[0],
        stream=ask.stream,
        choices=ask.choices,
        raw=call.raw,
    )
