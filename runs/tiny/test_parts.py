"""The parts of the recipe that can be wrong without a loss showing it. `pytest runs/tiny`"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import torch
import torch.nn.functional as F
from batches import Newlines, Quoter, stretched_positions
from check import shaken
from corpus import Source, distinct
from drafting import Reader, generate, verdict
from network import NO_LABEL, HeadLoss, Look, shifted, turn_of
from shape import ASSISTANT, END, USER, Shape
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from tune import Chains

SPARSE = Look(sparse=True, taught=None)


def small_tokenizer(texts: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def source_text() -> str:
    parts = [f"def name_{n}(x):\n    y = x + {n}\n\n    return y * {n}\n\n\n" for n in range(60)]
    return "".join(parts)


def test_near_copies_are_dropped_and_others_kept() -> None:
    text = source_text()
    near = text.replace("name_7", "title_7")
    other = "\n".join(f"value_{n} = {n * n}" for n in range(300))
    files = [Source(name, body) for name, body in (("a", text), ("b", near), ("c", other))]
    kept, copies, near_copies = distinct([*files, Source("d", text)])
    assert [file.path for file in kept] == ["a", "c"]
    assert (copies, near_copies) == (1, 1)


def test_a_quote_answers_with_the_lines_of_its_part() -> None:
    tokenizer = small_tokenizer([source_text()])
    ids = np.array(tokenizer.encode(source_text()).ids)
    quoter = Quoter(Newlines(tokenizer))
    for seed in range(30):
        prompt = quoter.prompt(ids, 200, 60, np.random.default_rng(seed))
        assert len(prompt.tokens) == 200
        text = tokenizer.decode(prompt.tokens.tolist(), skip_special_tokens=False)
        part, _, question = text.rpartition("<|user|>")
        line = question.removeprefix("\n").removesuffix("<|assistant|>\n")
        answer = tokenizer.decode(prompt.answer.tolist())
        assert answer.startswith(line)
        assert answer in part


def test_labels_ask_for_text_and_the_end_but_never_for_a_role() -> None:
    tokenizer = small_tokenizer([source_text()])
    ids = np.array(tokenizer.encode(source_text()).ids)
    quoter = Quoter(Newlines(tokenizer))
    for seed in range(30):
        sequence = quoter.sequence(ids, 300, np.random.default_rng(seed))
        assert not np.isin(sequence.labels, (USER, ASSISTANT)).any()
        differs = np.flatnonzero(sequence.labels[:-1] != sequence.tokens[1:])
        assert np.isin(sequence.labels[differs], (NO_LABEL, END)).all()
        # Where the part is in the user's message, the question follows it without a role.
        joined = 1 if sequence.tokens[0] == USER else 0
        assert np.isin(sequence.tokens[differs[joined:] + 1], (USER, ASSISTANT)).all()


def test_stretched_positions_grow_and_stay_in_the_span() -> None:
    for seed in range(50):
        positions = stretched_positions(100, 1000, np.random.default_rng(seed))
        assert (np.diff(positions) >= 1).all()
        assert positions[0] == 0
        assert positions[-1] < 1000


def test_the_head_loss_has_the_slopes_of_cross_entropy() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(12, 8, requires_grad=True), torch.randn(30, 8, requires_grad=True)
    labels = torch.randint(0, 30, (12,))
    labels[3] = NO_LABEL
    own: Tensor = HeadLoss.apply(x, weight, labels)  # type: ignore[no-untyped-call]
    plain = F.cross_entropy(x @ weight.T, labels, ignore_index=NO_LABEL)
    torch.testing.assert_close(own, plain)
    ours = torch.autograd.grad(own, (x, weight))
    theirs = torch.autograd.grad(plain, (x, weight))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)


@torch.no_grad()
def test_the_cache_gives_what_the_training_text_gives() -> None:
    torch.manual_seed(2)
    network = shaken(Shape())
    tokens = torch.randint(16, 2048, (2, 300))
    turn = turn_of(torch.arange(300)[None], network.shape)
    hidden, _ = network.hidden(tokens, turn, SPARSE)
    drafted, _ = network.draft(network.embed(tokens), shifted(hidden), turn, SPARSE)
    reader = Reader(network)
    cache = reader.empty_cache(2, 300)
    before = reader.prefill(tokens[:, :-1], cache)
    at = torch.full((2, 1), 299)
    state = reader.drafted(tokens[:, -1:], before[:, None], at, cache)
    torch.testing.assert_close(before, hidden[:, -2], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(state[:, 0], drafted[:, -1], atol=1e-4, rtol=1e-4)
    last = reader.target(tokens[:, -1:], at, cache)
    torch.testing.assert_close(last[:, 0], hidden[:, -1], atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_unrolled_chains_are_what_drafting_does() -> None:
    torch.manual_seed(3)
    network = shaken(Shape())
    draft, length = network.draft, 200
    tokens = torch.randint(16, 2048, (1, length + 3))
    at = torch.arange(length + 3)[None]
    hidden, _ = network.hidden(tokens, turn_of(at, network.shape), SPARSE)
    reader = Reader(network)
    cache = reader.empty_cache(1, length + 3)
    before = reader.prefill(tokens[:, : length - 1], cache)[:, None]
    state, chains = shifted(hidden[:, :length]), None
    for step in range(3):
        here = slice(step, length + step)
        turn = turn_of(at[:, here], network.shape)
        joined = draft.join(network.embed(tokens[:, here]), state)
        normed = draft.layer.input_layernorm(joined)
        if chains is None:
            out, _ = draft.layer.self_attn(normed, turn, SPARSE)
            chains = Chains(draft.layer.self_attn, normed, turn)
        else:
            out = chains.attend(normed, turn)
        x = joined + out
        state = draft.head_norm(x + draft.layer.mlp(draft.layer.post_attention_layernorm(x)))
        slot = at[:, length - 1 + step, None]
        before = reader.drafted(tokens[:, length - 1 + step, None], before, slot, cache)
        torch.testing.assert_close(state[:, -1:], before, atol=1e-4, rtol=1e-4)


def test_rejection_sampling_keeps_the_distribution_of_the_model() -> None:
    torch.manual_seed(4)
    generator = torch.Generator().manual_seed(5)
    rows = 200_000
    p = torch.softmax(2 * torch.randn(1, 2, 6), -1).expand(rows, -1, -1)
    q = torch.softmax(2 * torch.randn(1, 1, 6), -1).expand(rows, -1, -1)
    drafts = torch.multinomial(q[:, 0], 1, generator=generator)
    kept, after = verdict(p, q, drafts, generator)
    first = torch.where(kept == 1, drafts[:, 0], after)
    share = torch.bincount(first, minlength=6) / rows
    torch.testing.assert_close(share, p[0, 0], atol=5e-3, rtol=0)
    torch.testing.assert_close(
        kept.float().mean(), torch.minimum(p[0, 0], q[0, 0]).sum(), atol=5e-3, rtol=0
    )
    bonus = torch.bincount(after[kept == 1], minlength=6) / (kept == 1).sum()
    torch.testing.assert_close(bonus, p[0, 1], atol=1e-2, rtol=0)


def test_greedy_drafting_says_what_greedy_reading_says() -> None:
    torch.manual_seed(6)
    network = shaken(Shape())
    prompts = torch.randint(16, 2048, (2, 140))
    said = generate(Reader(network), prompts, 12, 3, 0.0, seed=0)
    tokens = torch.cat((prompts, said.tokens), 1)
    with torch.no_grad():
        turn = turn_of(torch.arange(tokens.shape[1])[None], network.shape)
        hidden, _ = network.hidden(tokens, turn, SPARSE)
        logits = network.lm_head(hidden)[:, 139:-1]
        logits[..., :16] = float("-inf")
    assert torch.equal(logits.argmax(-1), said.tokens)
