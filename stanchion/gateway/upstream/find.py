"""What kind of server is there, and what it serves: asked, not guessed from an address.

`/v1/models` says who owns a model: vLLM and SGLang say so there. Where it does not, `/version` is
vLLM's route and `/get_server_info` SGLang's. Whatever has neither is a server with OpenAI's API.
"""

from __future__ import annotations

from msgspec import Struct

from stanchion.core.messages import PROMPT_TOKENS_MAX
from stanchion.gateway.upstream.client import Server
from stanchion.gateway.upstream.place import KINDS, Place
from stanchion.gateway.upstream.wire import Asked, Found, Kind, Wrong, decoded

FACTS_BYTES = 2**22
NAME_MAX = 512


class Misfit(Exception):
    """It is there, and cannot be used: the settings are wrong."""


class _Model(Struct):
    id: str
    owned_by: str | None = None
    max_model_len: int | None = None


class _Models(Struct):
    data: list[_Model]


class _Info(Struct):
    disaggregation_bootstrap_port: int | None = None
    speculative_num_draft_tokens: int | None = None
    version: str | None = None


async def find(server: Server, place: Place, wanted: str, text: bool) -> Found:
    """Raise Wrong if it is not there, Misfit if it is not what was wanted."""
    models = decoded(await _get(server, "/v1/models"), _Models).data
    served = [one for one in models if not wanted or one.id == wanted]
    if not served:
        names = ", ".join(one.id[:NAME_MAX] for one in models) or "none"
        raise Misfit(f"it does not serve the model {wanted!r}; it serves: {names}")
    model = served[0]
    kind = _kind(place.kind, text) or await _asked(server, model)
    if kind == "openai" and not text:
        raise Misfit(
            "it is neither vLLM nor SGLang, so it takes text and no token ids: leave --tokenizer "
            f"out, or say what it is ({', '.join(f'{one}:URL' for one in KINDS)})"
        )
    context = model.max_model_len or PROMPT_TOKENS_MAX
    info = _Info() if kind != "sglang" else await _info(server) or _Info()
    return Found(
        kind=kind,
        model=model.id[:NAME_MAX],
        context_max=PROMPT_TOKENS_MAX if text else min(max(1, context), PROMPT_TOKENS_MAX),
        bootstrap_port=info.disaggregation_bootstrap_port,
        draft_tokens=max(0, (info.speculative_num_draft_tokens or 1) - 1),
    )


def _kind(said: Kind | None, text: bool) -> Kind | None:
    """What needs no asking. Every kind takes text over OpenAI's API."""
    if text and said in ("vllm", "sglang"):
        raise Misfit(f"as {said} it takes token ids: give --tokenizer FOLDER of its model")
    return "openai" if text else said


async def _asked(server: Server, model: _Model) -> Kind:
    match model.owned_by:
        case "vllm" | "sglang" as kind:
            return kind
    if await _says(server, "/version"):
        return "vllm"
    return "sglang" if await _info(server) is not None else "openai"


async def _says(server: Server, path: str) -> bool:
    try:
        return decoded(await _get(server, path), _Info).version is not None
    except Wrong:
        return False


async def _info(server: Server) -> _Info | None:
    for path in ("/get_server_info", "/server_info"):
        try:
            return decoded(await _get(server, path), _Info)
        except Wrong:
            continue
    return None


async def _get(server: Server, path: str) -> bytes:
    return await server.whole(Asked(path), FACTS_BYTES, server.patience.look_s)


async def aborts(server: Server) -> bool:
    """Has this vLLM a route for it? It is off unless the server was told otherwise."""
    asked = Asked("/inference/v1/abort_requests", {"request_ids": []})
    try:
        await server.whole(asked, FACTS_BYTES, server.patience.look_s)
    except Wrong:
        return False
    return True
