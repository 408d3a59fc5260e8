"""The settings of tiers: what does not parse names itself, and says what it must be."""

from __future__ import annotations

import pytest

from stanchion.core.config import Config, check, disk_cache, load, removed_door, slow_load
from stanchion.core.errors import ConfigError

WRONG = {
    "kv.disk_cache=/data": "PATH:GIB",
    "kv.disk_cache=/data:0": "PATH:GIB",
    "kv.disk_cache=/data:1e-12": "at least 0.001",
    "kv.disk_cache=:4": "PATH:GIB",
    "kv.disk_cache=/data:nan": "PATH:GIB",
    "kv.disk_cache=/data:inf": "PATH:GIB",
    "kv.host_cache_gib=-1": "from 0.0",
    "kv.write_policy=often": "through, selective, back",
    "kv.prefetch=never": "wait, best_effort, timeout",
    "lab.slow_load=1/index": "LAYER/DOOR:MS",
    "lab.slow_load=1/latent:5": "LAYER/DOOR",
    "lab.slow_load=1/index:-5": "LAYER/DOOR:MS",
    "lab.slow_load=1/index:nan": "LAYER/DOOR:MS",
    "lab.removed_door=index": "LAYER/DOOR",
}


@pytest.mark.parametrize("setting", WRONG)
def test_what_is_wrong_is_named(setting: str) -> None:
    sets = [setting] if "host" in setting else ["kv.host_cache_gib=1", setting]
    with pytest.raises(ConfigError, match=WRONG[setting]) as error:
        check(load(Config(), "", sets))
    assert setting.partition("=")[0] in str(error.value) or "/DOOR" in str(error.value)


def test_a_disk_is_behind_a_host() -> None:
    with pytest.raises(ConfigError, match="host_cache_gib"):
        check(load(Config(), "", ["kv.disk_cache=/data:4"]))
    check(load(Config(), "", ["kv.disk_cache=/data:4", "kv.host_cache_gib=1"]))


def test_what_parses_means_what_it_says() -> None:
    assert disk_cache("/data/a:b:1.5") == ("/data/a:b", 3 << 29)
    assert disk_cache("") is None and removed_door("") is None
    assert removed_door("3/index") == (3, "index")
    assert slow_load("*:1, 2/attend:30") == {None: 1.0, (2, "attend"): 30.0}
