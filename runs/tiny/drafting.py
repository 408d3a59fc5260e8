"""Generation with drafts, in batches: latent cache, absorbed attention, rejection sampling.

Promises samples of exactly the model's distribution, whatever the draft layer says: drafts are
sampled from q, kept with probability min(1, p / q), and the first one refused is replaced by a
sample of the rest, max(0, p - q). Special tokens are never sampled, so that every text has the
length asked for. Rows that have enough leave the batch.
"""

from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from network import Draft, Layer, Network, Turn, index_scores, rotate_heads, shifted, turn_of
from shape import SPECIAL_TOKENS
from torch import Tensor

PREFILL_CHUNK = 256
PIECE_TOKENS = 24576  # of prompts, for one thread at a time


@dataclass
class Cache:
    """Rows of all layers, the draft layer's last: latents [L + 1, B, T, C] and index keys."""

    latent: Tensor
    keys: Tensor

    def of_rows(self, rows: Tensor) -> "Cache":
        return Cache(self.latent[:, rows], self.keys[:, rows])


@dataclass(frozen=True)
class Generated:
    tokens: Tensor  # [B, count]
    accepted: list[list[int]]  # drafts kept, for every row and step


class Reader:
    """A network that reads and writes a cache."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.shape = network.shape
        self.draft: Draft = network.draft
        self.layers: list[Layer] = [*network.layers, network.draft.layer]
        nope = self.shape.qk_nope_head_dim
        wide = (self.shape.num_attention_heads, -1, self.shape.kv_lora_rank)
        ups = [layer.self_attn.kv_b_proj.weight.view(wide) for layer in self.layers]
        self.k_up = [up[:, :nope] for up in ups]  # [H, nope, C]
        self.v_up = [up[:, nope:] for up in ups]  # [H, V, C]

    def empty_cache(self, rows: int, length: int) -> Cache:
        layers = len(self.layers)
        width = self.shape.kv_lora_rank + self.shape.qk_rope_head_dim
        return Cache(
            torch.zeros(layers, rows, length, width),
            torch.zeros(layers, rows, length, self.shape.index_head_dim),
        )

    def seen(self, index: int, x: Tensor, q_latent: Tensor, at: Tensor, cache: Cache) -> Tensor:
        """Which of the cached keys each query may look at. [B, Q, T]"""
        length = int(at.max()) + 1
        causal = torch.arange(length) <= at[..., None]
        topk = self.shape.index_topk
        if length <= topk:
            return causal
        indexer = self.layers[index].self_attn.indexer
        q, weights = indexer.queries(x, q_latent, turn_of(at, self.shape))
        scores = index_scores(q, weights, cache.keys[index, :, :length])
        top = scores.masked_fill_(~causal, float("-inf")).topk(topk, -1, sorted=False).indices
        return torch.zeros_like(causal).scatter_(2, top, True) & causal

    def attend(self, index: int, x: Tensor, at: Tensor, cache: Cache, turn: Turn) -> Tensor:
        attention = self.layers[index].self_attn
        shape, rows = self.shape, torch.arange(x.shape[0])[:, None]
        cache.latent[index, rows, at] = attention.kv_latent(x, turn)
        cache.keys[index, rows, at] = attention.indexer.keys(x, turn)
        q_latent = attention.q_latent(x)
        q = attention.q_b_proj(q_latent).view(*x.shape[:2], shape.num_attention_heads, -1)
        q_nope, q_rope = q[..., : shape.qk_nope_head_dim], q[..., shape.qk_nope_head_dim :]
        absorbed = torch.einsum("bqhd,hdc->bqhc", q_nope, self.k_up[index])
        q = torch.cat((absorbed, rotate_heads(q_rope, turn)), -1)  # [B, Q, H, C + R]
        seen = self.seen(index, x, q_latent, at, cache)
        latent = cache.latent[index, :, : seen.shape[2]]  # [B, T, C + R]
        scores = torch.bmm(q.flatten(1, 2), latent.transpose(1, 2)) * attention.scale
        scores = scores.view(*q.shape[:3], -1).masked_fill_(~seen.unsqueeze(2), float("-inf"))
        mixed = torch.bmm(scores.softmax(-1).flatten(1, 2), latent[..., : shape.kv_lora_rank])
        mixed = mixed.view(*q.shape[:3], -1)  # [B, Q, H, C]
        out = torch.einsum("bqhc,hvc->bqhv", mixed, self.v_up[index])
        result: Tensor = attention.o_proj(out.flatten(2))
        return result

    def layer(self, index: int, x: Tensor, at: Tensor, cache: Cache, turn: Turn) -> Tensor:
        layer = self.layers[index]
        x = x + self.attend(index, layer.input_layernorm(x), at, cache, turn)
        out: Tensor = x + layer.mlp(layer.post_attention_layernorm(x))
        return out

    def target(self, tokens: Tensor, at: Tensor, cache: Cache) -> Tensor:
        """Hidden states after the final norm. `tokens` and positions `at`: [B, Q]"""
        turn = turn_of(at, self.shape)
        x = self.network.embed(tokens)
        for index in range(self.shape.num_hidden_layers):
            x = self.layer(index, x, at, cache, turn)
        hidden: Tensor = self.network.norm(x)
        return hidden

    def drafted(self, tokens: Tensor, hidden: Tensor, at: Tensor, cache: Cache) -> Tensor:
        x = self.draft.join(self.network.embed(tokens), hidden)
        x = self.layer(len(self.layers) - 1, x, at, cache, turn_of(at, self.shape))
        out: Tensor = self.draft.head_norm(x)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.network.lm_head(hidden)
        return out

    def prefill(self, tokens: Tensor, cache: Cache) -> Tensor:
        """Fills the caches from all of `tokens` [B, P]; gives the last hidden state [B, D]."""
        rows, length = tokens.shape
        last = torch.zeros(rows, 1, self.shape.hidden_size)
        for start in range(0, length, PREFILL_CHUNK):
            end = min(length, start + PREFILL_CHUNK)
            at = torch.arange(start, end).expand(rows, -1)
            hidden = self.target(tokens[:, start:end], at, cache)
            before = shifted(hidden)
            before[:, :1] = last
            self.drafted(tokens[:, start:end], before, at, cache)
            last = hidden[:, -1:]
        return last[:, 0]


def distribution(logits: Tensor, temperature: float) -> Tensor:
    logits = logits.clone()
    logits[..., : len(SPECIAL_TOKENS)] = float("-inf")
    if temperature == 0:
        return F.one_hot(logits.argmax(-1), logits.shape[-1]).float()
    return (logits / temperature).softmax(-1)


def sample(p: Tensor, generator: torch.Generator) -> Tensor:
    return torch.multinomial(p, 1, generator=generator)[:, 0]


def verdict(
    p: Tensor, q: Tensor, drafts: Tensor, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """How many drafts are kept [B], and the token after them [B]. p: [B, K + 1, V], q: [B, K, V]"""
    rows, count = drafts.shape
    chance = torch.rand(rows, count, generator=generator)
    p_draft = p[:, :count].gather(2, drafts[..., None])[..., 0]
    q_draft = q.gather(2, drafts[..., None])[..., 0]
    kept = (chance * q_draft < p_draft).long().cumprod(1).sum(1)  # [B]
    everyone = torch.arange(rows)
    p_last = p[everyone, kept]
    # All kept: nothing was refused, so the next token is a plain sample of p.
    q_last = F.pad(q, (0, 0, 0, 1))[everyone, kept]
    rest = (p_last - q_last).clamp_min(0)
    total = rest.sum(-1, keepdim=True)
    return kept, sample(torch.where(total > 1e-9, rest, p_last), generator)


class Generation:
    """One batch under way. `lengths` counts the tokens of each row that are known."""

    def __init__(self, reader: Reader, prompts: Tensor, count: int, drafts: int) -> None:
        rows, length = prompts.shape
        self.reader, self.prompt, self.count, self.drafts = reader, length, count, drafts
        self.cache = reader.empty_cache(rows, length + count + 2 * drafts + 4)
        self.tokens = torch.zeros(rows, self.cache.latent.shape[2], dtype=torch.long)
        self.tokens[:, :length] = prompts
        self.lengths = torch.full((rows,), length)
        self.names = torch.arange(rows)
        before = reader.prefill(prompts[:, :-1], self.cache)
        at = (self.lengths - 1)[:, None]
        self.state = reader.drafted(prompts[:, -1:], before[:, None], at, self.cache)[:, 0]
        self.done = torch.zeros(rows, count, dtype=torch.long)
        self.accepted: list[list[int]] = [[] for _ in range(rows)]

    def propose(self, temperature: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        drafts, qs, state = [], [], self.state
        for number in range(self.drafts):
            q = distribution(self.reader.logits(state), temperature)
            token = sample(q, generator)
            drafts.append(token)
            qs.append(q)
            if number < self.drafts - 1:
                at = (self.lengths + number)[:, None]
                state = self.reader.drafted(token[:, None], state[:, None], at, self.cache)[:, 0]
        return torch.stack(drafts, 1), torch.stack(qs, 1)

    def step(self, temperature: float, generator: torch.Generator) -> None:
        rows, steps = torch.arange(len(self.names)), torch.arange(self.drafts + 1)
        drafts, q = self.propose(temperature, generator)
        last = self.tokens[rows, self.lengths - 1]
        checked = torch.cat((last[:, None], drafts), 1)
        hidden = self.reader.target(checked, (self.lengths - 1)[:, None] + steps, self.cache)
        p = distribution(self.reader.logits(hidden), temperature)
        kept, after = verdict(p, q, drafts, generator)
        new = torch.cat((drafts, after[:, None]), 1)
        new[rows, kept] = after
        slots = self.lengths[:, None] + steps
        self.tokens[rows[:, None], slots] = new  # what lies beyond the kept ones is written over
        states = self.reader.drafted(new, hidden, slots, self.cache)
        self.state = states[rows, kept]
        self.lengths = self.lengths + kept + 1
        for name, number in zip(self.names.tolist(), kept.tolist(), strict=True):
            self.accepted[name].append(number)
        self.leave()

    def leave(self) -> None:
        over = self.lengths - self.prompt >= self.count
        if not over.any():
            return
        said = self.tokens[:, self.prompt : self.prompt + self.count]
        self.done[self.names[over]] = said[over]
        stay = (~over).nonzero()[:, 0]
        self.cache = self.cache.of_rows(stay)
        self.names, self.lengths = self.names[stay], self.lengths[stay]
        self.tokens, self.state = self.tokens[stay], self.state[stay]


@torch.no_grad()
def generate(
    reader: Reader, prompts: Tensor, count: int, drafts: int, temperature: float, seed: int
) -> Generated:
    generator = torch.Generator().manual_seed(seed)
    generation = Generation(reader, prompts, count, drafts)
    while len(generation.names):
        generation.step(temperature, generator)
    return Generated(generation.done, generation.accepted)


def generate_all(
    pool: Executor,
    reader: Reader,
    prompts: Tensor,
    count: int,
    drafts: int,
    temperature: float,
    seed: int,
) -> Generated:
    """The same in pieces of a few rows, over the pool's threads."""
    half = (len(prompts) + 1) // 2  # two threads at least shall have work
    rows = max(1, min(half, PIECE_TOKENS // prompts.shape[1]))
    jobs = [
        pool.submit(
            generate,
            reader,
            prompts[start : start + rows],
            count,
            drafts,
            temperature,
            seed + start,
        )
        for start in range(0, len(prompts), rows)
    ]
    parts: Sequence[Generated] = [job.result() for job in jobs]
    accepted = [row for part in parts for row in part.accepted]
    return Generated(torch.cat([part.tokens for part in parts]), accepted)
