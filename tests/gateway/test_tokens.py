"""Vocabularies: the built-in one, and those read from a checkpoint's folder."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from stanchion.core.errors import ConfigError, RequestRejected
from stanchion.gateway.detok import decode
from stanchion.gateway.tokens import byte_vocabulary, load_vocabulary

TEXT = "def f(x):\n    return '안녕 汉字 👩‍👧 é'  # <|user|>\n"
TEMPLATE = (
    "[gMASK]<sop>{%- for m in messages %}<|{{ m.role }}|>\n{{ m.content }}"
    "{%- if m.reasoning_content is defined %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{%- if m.content == 'bad' %}{{ raise_exception('no bad words') }}{% endif %}"
    "{%- endfor %}{%- if add_generation_prompt %}<|assistant|>"
    "{{- '<think></think>' if enable_thinking is defined and not enable_thinking }}{% endif %}"
)


def _byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|end|>", "<|user|>", "<|assistant|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT * 4], trainer)
    return tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    _byte_level().save(str(folder / "tokenizer.json"))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 1]}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def test_a_byte_level_vocabulary_decodes_to_the_same_bytes(folder: Path):
    vocabulary = load_vocabulary(folder)
    tokens = vocabulary.encode(TEXT, special=False)
    assert decode(vocabulary.pieces, tokens) == TEXT
    assert decode(vocabulary.pieces, tokens, vocabulary.special) == TEXT.replace("<|user|>", "")
    assert (vocabulary.eos_ids, vocabulary.special) == ((0, 1), frozenset({0, 1, 2}))


def test_any_tokens_decode_as_the_tokenizer_itself_does(folder: Path):
    vocabulary = load_vocabulary(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    picks = random.Random(5)
    for _ in range(300):
        tokens = [picks.randrange(3, vocabulary.size) for _ in range(picks.randrange(12))]
        assert decode(vocabulary.pieces, tokens) == tokenizer.decode(tokens)


def test_a_byte_fallback_vocabulary_keeps_bytes_that_the_words_lack(tmp_path: Path):
    words = {"<unk>": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)}
    words |= {"▁": 257, "h": 258, "i": 259, "▁h": 260, "▁hi": 261}
    model = models.BPE(vocab=words, merges=[("▁", "h"), ("▁h", "i")], unk_token="<unk>",
                       byte_fallback=True, fuse_unk=True)  # fmt: skip
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    vocabulary = load_vocabulary(tmp_path)
    tokens = vocabulary.encode(" hi 안", special=False)
    assert decode(vocabulary.pieces, tokens) == " hi 안" == tokenizer.decode(tokens)


def test_a_chat_template_is_rendered_as_transformers_does(folder: Path):
    transformers = pytest.importorskip("transformers")
    reference = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), chat_template=TEMPLATE
    )
    vocabulary = load_vocabulary(folder)
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yes", "reasoning_content": "hm"},
        {"role": "user", "content": "안녕"},
    ]
    for settings in ({}, {"enable_thinking": False}, {"enable_thinking": True}):
        ours = vocabulary.render(messages, add_generation_prompt=True, **settings)
        theirs = reference.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False, **settings
        )
        assert ours == theirs


def test_a_template_that_refuses_is_the_clients_error(folder: Path):
    with pytest.raises(RequestRejected, match="no bad words"):
        load_vocabulary(folder).render([{"role": "user", "content": "bad"}])


def test_a_template_cannot_leave_the_sandbox(tmp_path: Path, folder: Path):
    (tmp_path / "tokenizer.json").write_text((folder / "tokenizer.json").read_text())
    hostile = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    (tmp_path / "chat_template.jinja").write_text(hostile)
    with pytest.raises(RequestRejected):
        load_vocabulary(tmp_path).render([])


def test_a_model_without_a_template_serves_completions_only(tmp_path: Path, folder: Path):
    (tmp_path / "tokenizer.json").write_text((folder / "tokenizer.json").read_text())
    (tmp_path / "config.json").write_text('{"eos_token_id": 2}')
    vocabulary = load_vocabulary(tmp_path)
    assert vocabulary.eos_ids == (2,)
    with pytest.raises(RequestRejected, match="no chat template"):
        vocabulary.render([{"role": "user", "content": "x"}])


def test_a_folder_without_a_tokenizer_or_a_broken_one_is_a_config_error(tmp_path: Path):
    with pytest.raises(ConfigError, match="no tokenizer"):
        load_vocabulary(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError):
        load_vocabulary(tmp_path)


def test_the_byte_vocabulary_is_the_one_that_the_hash_model_expects():
    vocabulary = byte_vocabulary()
    assert vocabulary.size == 272 and vocabulary.eos_ids == (256,)
    assert vocabulary.encode("é<|user|>", special=True) == [0xC3, 0xA9, 259]
    assert vocabulary.special == frozenset(range(256, 272))
    text = vocabulary.render(
        [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}],
        add_generation_prompt=True,
    )
    assert vocabulary.encode(text, special=False) == [258, 97, 259, 98, 260]
