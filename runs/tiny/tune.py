"""Step 3: tunes the draft layer alone, for the way it is used: several steps on its own output.

The layer is unrolled over `STEPS` draft steps, each with the post-norm output of the step before
as its hidden state, and learns the model's own distribution (soft targets) at each. Most of the
texts are samples of the model itself, since those are what it drafts for when served.
Reads `train.pt`, writes `samples.npy` (kept for `--resume`) and `tune.pt`.
"""

import argparse
import time
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from batches import Ids, Sampler
from drafting import Reader, generate_all
from export import load_network
from network import Attention, Look, Network, Turn, index_scores, shifted, turn_of
from numpy.typing import NDArray
from progress import Meter, meter, report
from torch import Tensor

STEPS = 3
STEP_WEIGHTS = (1.0, 0.8, 0.6)
# Of both distributions; close to where the model is served.
TEMPERATURE = 0.8
LENGTH = 512
ROWS = 4
SAMPLES_SHARE = 0.6
SAMPLE_TEMPERATURES = (0.7, 0.8, 1.0, 0.5)
SAMPLE_PROMPTS = 48
SAMPLE_PROMPT_LENGTH = 300
SAMPLE_LENGTH = 260
TAUGHT_QUERIES = 64


@dataclass(frozen=True)
class Slot:
    """One draft step of all chains: what its keys, values and index keys are. [B, ..., T, D]"""

    k: Tensor
    v: Tensor
    index_k: Tensor


def chain_scores(q: Tensor, weights: Tensor, k: Tensor) -> Tensor:
    """Index scores where every query has one key of its own. [B, T]"""
    dots = torch.relu((q * k.unsqueeze(2)).sum(-1)).float()  # [B, T, H]
    return (dots * weights).sum(-1)


def chain_choice(first: Tensor, own: Tensor, causal: Tensor, topk: int) -> Tensor:
    """What a chain may see of the first slots [B, T, T] and of its own later ones [B, T, n]."""
    scores = torch.cat((first.masked_fill(~causal, float("-inf")), own), -1)
    there = torch.cat((causal.expand_as(first), torch.ones_like(own, dtype=torch.bool)), -1)
    top = scores.topk(min(topk, scores.shape[-1]), -1, sorted=False).indices
    return torch.zeros_like(there).scatter_(2, top, True) & there


class Chains:
    """Draft chains that begin at every position of a text at once.

    Chain p sees the first slots 0..p, which have the model's hidden states, and its own later
    slots, which have the draft layer's. Just so a server's draft cache looks at that moment.
    """

    def __init__(self, attention: Attention, x: Tensor, turn: Turn) -> None:
        self.attention = attention
        self.length = x.shape[1]
        self.first = self.slot(x, turn)
        self.later: list[Slot] = []

    def slot(self, x: Tensor, turn: Turn) -> Slot:
        k, v = self.attention.expand(self.attention.kv_latent(x, turn))
        with torch.no_grad():
            index_k = self.attention.indexer.keys(x, turn)
        return Slot(k, v, index_k)

    @torch.no_grad()
    def seen(self, x: Tensor, q_latent: Tensor, turn: Turn) -> Tensor:
        q, weights = self.attention.indexer.queries(x, q_latent, turn)
        first = index_scores(q, weights, self.first.index_k)
        own = [chain_scores(q, weights, slot.index_k) for slot in self.later]
        causal = torch.ones(self.length, self.length, dtype=torch.bool).tril()
        topk = self.attention.shape.index_topk
        return chain_choice(first, torch.stack(own, -1), causal, topk)

    def attend(self, x: Tensor, turn: Turn) -> Tensor:
        """One more step of all chains. `turn` is of its positions, p + the number of the step."""
        attention = self.attention
        self.later.append(self.slot(x, turn))
        q_latent = attention.q_latent(x)
        q = attention.queries(q_latent, turn).transpose(1, 2)  # [B, H, T, D]
        own = [(q * slot.k).sum(-1) for slot in self.later]
        scores = torch.cat((q @ self.first.k.transpose(2, 3), torch.stack(own, -1)), -1)
        seen = self.seen(x, q_latent, turn).unsqueeze(1)
        scores = (scores.float() * attention.scale).masked_fill(~seen, float("-inf"))
        p = scores.softmax(-1).to(q.dtype)
        out = p[..., : self.length] @ self.first.v
        for number, slot in enumerate(self.later):
            out = out + p[..., self.length + number, None] * slot.v
        result: Tensor = attention.o_proj(out.transpose(1, 2).flatten(2))
        return result


class Tuner:
    def __init__(self, network: Network, sampler: Sampler, samples: Ids, pool: Executor) -> None:
        self.network, self.sampler, self.samples, self.pool = network, sampler, samples, pool
        network.requires_grad_(False)
        network.draft.requires_grad_(True)
        self.live = {f"draft.{name}": p for name, p in network.draft.named_parameters()}
        self.master = {name: p.detach().float().clone() for name, p in self.live.items()}
        self.first = {name: torch.zeros_like(p) for name, p in self.master.items()}
        self.second = {name: torch.zeros_like(p) for name, p in self.master.items()}
        self.steps = 0

    def log_p(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.network.lm_head(hidden)
        return (logits.float() / TEMPERATURE).log_softmax(-1)

    def distance(self, goal: Tensor, out: Tensor) -> tuple[Tensor, float]:
        """KL to the goal, and the share of drafts that rejection sampling would keep."""
        guess = self.log_p(out)
        loss: Tensor = (goal.exp() * (goal - guess)).sum(-1).mean()
        with torch.no_grad():
            kept = float(torch.minimum(goal.exp(), guess.exp()).sum(-1).mean())
        return loss, kept

    def unrolled(self, tokens: Tensor, look: Look) -> tuple[Tensor, list[float]]:
        """The loss of all steps on `tokens` [B, T + STEPS], and what would be kept at each."""
        network, draft, length = self.network, self.network.draft, LENGTH
        layer = draft.layer
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        with torch.no_grad():
            plain = Look(sparse=True, taught=None)
            hidden, _ = network.hidden(tokens, turn_of(positions, network.shape), plain)
            goals = self.log_p(hidden)
            embedded = network.embed(tokens)
        total, kept, state = torch.zeros(()), [], shifted(hidden[:, :length])
        chains: Chains | None = None
        for step, weight in enumerate(STEP_WEIGHTS):
            turn = turn_of(positions[:, step : length + step], network.shape)
            joined = draft.join(embedded[:, step : length + step], state)
            normed = layer.input_layernorm(joined)
            if chains is None:
                out, taught = layer.self_attn(normed, turn, look)
                total = total + taught
                chains = Chains(layer.self_attn, normed, turn)
            else:
                out = chains.attend(normed, turn)
            x = joined + out
            state = draft.head_norm(x + layer.mlp(layer.post_attention_layernorm(x)))
            loss, share = self.distance(goals[:, step : length + step], state)
            total = total + weight * loss
            kept.append(share)
        return total, kept

    def measure(self, tokens: Tensor, look: Look) -> tuple[dict[str, Tensor], list[float]]:
        total, kept = self.unrolled(tokens, look)
        slopes = torch.autograd.grad(total, list(self.live.values()), allow_unused=True)
        found = {n: s for n, s in zip(self.live, slopes, strict=True) if s is not None}
        return found, kept

    def row(self) -> Ids:
        size, generator = LENGTH + STEPS, self.sampler.generator
        if generator.random() < SAMPLES_SHARE:
            text = self.samples[int(generator.integers(len(self.samples)))]
            start = int(generator.integers(0, len(text) - size + 1))
            row: Ids = text[start : start + size]
            return row
        return self.sampler.sequence(size).tokens

    def step(self, rate: float) -> list[float]:
        tokens = torch.from_numpy(np.stack([self.row() for _ in range(ROWS)]))
        taught = self.sampler.generator.integers(0, LENGTH, size=TAUGHT_QUERIES)
        look = Look(sparse=True, taught=torch.from_numpy(np.sort(taught)))
        half = ROWS // 2
        pieces = (tokens[:half], tokens[half:])
        results = list(self.pool.map(lambda piece: self.measure(piece, look), pieces))
        self.steps += 1
        for name in self.live:
            slopes = [found[name].float() for found, _ in results if name in found]
            if slopes:
                self.update(name, torch.stack(slopes).mean(0), rate)
        shares: list[float] = np.mean([kept for _, kept in results], axis=0).tolist()
        return shares

    @torch.no_grad()
    def update(self, name: str, slope: Tensor, rate: float) -> None:
        first = self.first[name].lerp_(slope, 0.1) / (1 - 0.9**self.steps)
        second = self.second[name].lerp_(slope * slope, 0.02) / (1 - 0.98**self.steps)
        self.master[name].addcdiv_(first, second.sqrt() + 1e-9, value=-rate)
        self.live[name].copy_(self.master[name])

    def run(self, minutes: float) -> None:
        started, recent = time.monotonic(), []
        with meter("tune") as show:
            while (share := (time.monotonic() - started) / 60 / minutes) < 1:
                warm = min(1.0, (self.steps + 1) / 20)
                recent.append(self.step(1.5e-3 * warm * min(1.0, max(0.02, (1 - share) / 0.7))))
                if self.steps % 25 == 0:
                    self.tell(show, share, recent)
                    recent = []

    def tell(self, show: Meter, share: float, recent: list[list[float]]) -> None:
        kept = " ".join(f"{value:.3f}" for value in np.mean(recent, axis=0).tolist())
        show.show(share, f"step {self.steps} kept of each draft {kept}", log=True)


def sample_prompts(sampler: Sampler, count: int) -> Tensor:
    """Prompts from the training texts, a third of them to quote."""
    rows = []
    for number in range(count):
        ids, length = sampler.ids(), SAMPLE_PROMPT_LENGTH
        if number % 3 == 0:
            rows.append(sampler.quoter.prompt(ids, length, 150, sampler.generator).tokens)
        else:
            start = int(sampler.generator.integers(0, len(ids) - length))
            rows.append(ids[start : start + length])
    return torch.from_numpy(np.stack(rows))


def own_samples(network: Network, sampler: Sampler, pool: Executor) -> NDArray[np.uint16]:
    reader, texts = Reader(network), []
    for seed, temperature in enumerate(SAMPLE_TEMPERATURES):
        prompts = sample_prompts(sampler, SAMPLE_PROMPTS)
        said = generate_all(pool, reader, prompts, SAMPLE_LENGTH, STEPS, temperature, 100 * seed)
        texts.append(torch.cat((prompts, said.tokens), 1).numpy().astype(np.uint16))
        report(f"tune: {len(prompts)} samples at temperature {temperature}")
    return np.concatenate(texts)


def training_facts(work: Path) -> dict[str, float]:
    state = torch.load(work / "train.pt", weights_only=False)
    return {
        "train_steps": state["optimizer"]["steps"],
        "train_tokens": state["tokens"],
        "train_minutes": round(state["seconds"] / 60, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=Path(".tiny"))
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--seed", type=int, default=21)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--resume", action="store_true", help="with the samples that are there")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    pool = ThreadPoolExecutor(options.threads, initializer=torch.set_num_threads, initargs=(1,))
    network = load_network(options.work / "train.pt")
    sampler = Sampler(options.work, quote_share=0.35, seed=options.seed)
    kept = options.work / "samples.npy"
    if not (options.resume and kept.exists()):
        np.save(kept, own_samples(network, sampler, pool))
    masters = {name: p.detach().clone() for name, p in network.named_parameters()}
    network.to_bfloat16()
    tuner = Tuner(network, sampler, np.load(kept).astype(np.int64), pool)
    tuner.run(options.minutes)
    state = {
        "shape": asdict(network.shape),
        "master": masters | tuner.master,
        "biases": [moe.bias for moe in network.moes()],
        "training": training_facts(options.work)
        | {
            "tune_steps": tuner.steps,
            "tune_minutes": options.minutes,
        },
    }
    torch.save(state, options.work / "tune.pt")


if __name__ == "__main__":
    main()
