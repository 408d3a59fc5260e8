import itertools

import msgspec
import pytest

from stanchion.core.acceptance import accept_length, accept_prefix, accept_rate
from stanchion.core.config import Config, check, describe, load
from stanchion.core.errors import ConfigError
from stanchion.core.messages import Spec, Start, decode_to_worker, encode
from stanchion.core.outcome import (
    Cancelled,
    Completed,
    Outcome,
    OutputSuspect,
    Overloaded,
    PeerLost,
    Rejected,
    worse,
)
from stanchion.core.request import Sampling

OUTCOMES: list[Outcome] = [
    Completed("stop"), Cancelled("client"), Rejected("n", "too many"), Overloaded("full", 1.0),
    PeerLost("gone"), OutputSuspect("NaN"),
]  # fmt: skip


def test_the_worst_outcome_wins_in_either_order() -> None:
    for first, second in itertools.product(range(6), repeat=2):
        assert worse(OUTCOMES[first], OUTCOMES[second]) == OUTCOMES[max(first, second)]


def test_later_layers_of_settings_win() -> None:
    config = load(Config(), '[model]\npath = "hashed"\n[kv]\nmemory_gib = 8\n', ["kv.memory_gib=9"])
    assert (config.model.path, config.kv.memory_gib, config.kv.page_tokens) == ("hashed", 9.0, 16)


@pytest.mark.parametrize(
    "text, sets, message",
    [
        (
            "[kv]\nmemory_gb = 8",
            [],
            "no setting kv.memory_gb; there are: check, disk_cache, host_cache_gib, memory_gib, ",
        ),
        ("", ["kv.page_tokens=many"], "kv.page_tokens wants a int, not 'many'"),
        ("", ["kv=3"], "kv is a table of settings, not '3'"),
        ("", ["kv.page_tokens"], "--set wants name=value"),
        ("[kv", [], "not TOML"),
        ("[kv]\npage_tokens = true", [], "kv.page_tokens wants a int, not True"),
    ],
)
def test_a_wrong_setting_is_named(text: str, sets: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(Config(), text, sets)


@pytest.mark.parametrize(
    "setting", ["engine.draft_tokens=6", "kv.memory_gib=nan", "gateway.port=-1", "model.dtype=int8"]
)
def test_a_setting_out_of_bounds_is_named(setting: str) -> None:
    with pytest.raises(ConfigError, match=setting.split("=")[0]):
        check(load(Config(), "", [setting]))


def test_every_setting_has_a_help_line() -> None:
    assert ("kv.page_tokens", 16, "tokens in a page") in describe(Config())
    check(Config())


def test_acceptance_follows_sglang_and_is_absent_without_drafts() -> None:
    spec = Spec(verify_steps=4, tokens=10, proposed=12, accepted=6)
    assert (accept_length(spec), accept_rate(spec), accept_prefix(spec)) == (2.5, 0.5, 1.5)
    none = Spec(verify_steps=0, tokens=0, proposed=0, accepted=0)
    assert (accept_length(none), accept_rate(none), accept_prefix(none)) == (None, None, None)


@pytest.mark.parametrize(
    "field, value",
    [
        ("temperature", 2.1), ("temperature", -1), ("top_p", 0), ("top_k", 0), ("min_p", 1.5),
        ("max_tokens", -1), ("logprobs", 21), ("seed", 2**63), ("repetition_penalty", 0),
        ("presence_penalty", "1"), ("stop_ids", [-1]), ("draft_tokens", 6),
    ],
)  # fmt: skip
def test_a_message_out_of_bounds_does_not_parse(field: str, value: object) -> None:
    start = Start(request="r", tokens=[1], sampling=Sampling(max_tokens=1))
    assert decode_to_worker(encode(start)) == start
    said = msgspec.to_builtins(start)
    said["sampling"][field] = value
    with pytest.raises(msgspec.ValidationError, match=field):
        decode_to_worker(msgspec.msgpack.encode(said))
