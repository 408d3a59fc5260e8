"""A checkpoint's generation_config.json fills in what a request leaves out, and nothing else."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from stanchion.cli.settings import model_folder
from stanchion.core.errors import ConfigError
from stanchion.gateway.body import CompletionBody
from stanchion.gateway.openai import Limits, _sampling
from stanchion.gateway.tokens import load_vocabulary

LIMITS = Limits("m", 1000, 1000, 2048, (0,), 64, 10_000, 100)


def folder(at: Path, config: dict[str, object]) -> Path:
    shutil.copy(model_folder("tiny") / "tokenizer.json", at / "tokenizer.json")
    (at / "generation_config.json").write_text(json.dumps(config))
    return at


def test_what_a_request_leaves_out_is_the_checkpoints(tmp_path: Path) -> None:
    said = {"temperature": 0.7, "top_p": 0.95, "top_k": 40, "eos_token_id": [0, 3], "other": 1}
    vocabulary = load_vocabulary(folder(tmp_path, said))
    assert vocabulary.eos_ids == (0, 3)
    plain = _sampling(CompletionBody(prompt="x"), 1, vocabulary.defaults, LIMITS)
    assert (plain.temperature, plain.top_p, plain.top_k) == (0.7, 0.95, 40)
    own = CompletionBody(prompt="x", temperature=0.0, top_k=-1)
    given = _sampling(own, 1, vocabulary.defaults, LIMITS)
    assert (given.temperature, given.top_p, given.top_k) == (0.0, 0.95, None)


def test_defaults_out_of_bounds_are_refused_at_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="temperature"):
        load_vocabulary(folder(tmp_path, {"temperature": 7}))
