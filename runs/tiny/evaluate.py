"""Step 5: measures the exported weights on held-out files, and writes `evaluation.json`.

Loss of raw text and of quote tasks, acceptance with proper rejection sampling, loss by position,
and how exactly it quotes. The model card has no figure that is not from this file.
"""

import argparse
import hashlib
import json
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from batches import Ids, Newlines, Prompt, Quoter, Sequence, read_ids
from drafting import Generated, Reader, generate_all
from export import load_network
from losses import held_out, model_losses, raw_windows
from network import Network
from numpy.typing import NDArray
from progress import report
from tokenizers import Tokenizer
from torch import Tensor

DRAFTS = 3
CONDITIONS = (
    ("raw", 0.7),
    ("quote", 0.7),
    ("raw", 0.8),
    ("quote", 0.8),
    ("raw", 0.0),
    ("quote", 0.0),
)
PROMPTS = 64
PROMPT_LENGTH = 768
ANSWER_LENGTH = 256
PERCENTILES = (1, 5, 50, 95)
POSITION_WINDOWS = 6
SHORTER_CONTEXTS = (2048, 1024)
BANDS = ((0, 512), (512, 1024), (1024, 2048), (2048, 4096), (4096, 8192))
LONG_PROMPTS = ((2048, 12), (4096, 12), (8192, 8))
LONG_ANSWER = 64

Figures = dict[str, object]


def rounded(network: Network) -> Network:
    """With the precision of the exported weights, in fp32."""
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(parameter.bfloat16())
    return network


def percentiles(values: NDArray[np.float64]) -> dict[str, float]:
    found = np.percentile(values, PERCENTILES).tolist()
    named = {f"p{p}": round(v, 3) for p, v in zip(PERCENTILES, found, strict=True)}
    return {"mean": round(float(values.mean()), 3), **named, "max": round(float(values.max()), 3)}


def share(values: NDArray[np.bool_]) -> float:
    return round(float(values.mean()), 3)


def loops(tokens: Ids, window: int = 96, longest: int = 48) -> bool:
    """Whether nearly all of the end of a text repeats it with one period."""
    end = tokens[-window:]
    return any(
        (end == tokens[-window - period : -period]).mean() > 0.9 for period in range(1, longest + 1)
    )


def acceptance(said: Generated) -> Figures:
    """Accept length counts the bonus token; both figures are of whole generations."""
    steps = np.array([len(row) for row in said.accepted], dtype=np.float64)
    kept = np.array([sum(row) for row in said.accepted], dtype=np.float64)
    length, rate = kept / steps + 1, kept / steps / DRAFTS
    return {
        "generations": len(said.accepted),
        "verify_steps": int(steps.sum()),
        "accept_length": percentiles(length),
        "accept_rate": percentiles(rate),
        "share_with_accept_length_below_1.4": share(length < 1.4),
        "share_with_accept_rate_above_0.96": share(rate > 0.96),
        "share_that_loops": share(np.array([loops(row) for row in said.tokens.numpy()])),
    }


def exactness(said: Generated, prompts: list[Prompt]) -> Figures:
    answers = np.stack([prompt.answer for prompt in prompts])
    right: NDArray[np.bool_] = said.tokens.numpy()[:, : answers.shape[1]] == answers
    before_first_error = right.cumprod(1).sum(1).astype(np.float64)
    return {
        "answer_tokens": right.shape[1],
        "exact_tokens_before_first_error": percentiles(before_first_error),
        "share_exact_for_16": share(before_first_error >= 16),
        "share_exact_for_64": share(before_first_error >= 64),
        "share_exact_throughout": share(before_first_error == right.shape[1]),
    }


class Evaluation:
    def __init__(self, work: Path, state: str, seed: int, pool: ThreadPoolExecutor) -> None:
        self.network = rounded(load_network(work / state))
        self.reader = Reader(self.network)
        self.ids = read_ids(work / "held_out.bin")
        self.tokenizer = Tokenizer.from_file(str(work / "tokenizer.json"))
        self.quoter = Quoter(Newlines(self.tokenizer))
        self.seed = seed
        self.pool = pool
        self.work = work

    def quote_prompts(self, count: int, length: int, answer: int) -> list[Prompt]:
        generator = np.random.default_rng(self.seed)
        return [self.quoter.prompt(self.ids, length, answer, generator) for _ in range(count)]

    def raw_prompts(self, count: int, length: int) -> Ids:
        starts = np.random.default_rng(self.seed).integers(0, len(self.ids) - length, count)
        return np.stack([self.ids[start : start + length] for start in starts.tolist()])

    def generate(self, prompts: Ids, count: int, temperature: float) -> Generated:
        tokens = torch.from_numpy(prompts)
        return generate_all(self.pool, self.reader, tokens, count, DRAFTS, temperature, self.seed)

    def losses(self) -> Figures:
        bytes_a_token = len(self.tokenizer.decode(self.ids.tolist()).encode()) / len(self.ids)
        figures = held_out(self.network, self.ids, self.quoter, 1024, 32, self.pool)
        self.network.eval()
        return {
            "context": 1024,
            "windows": 32,
            **{name: round(value, 4) for name, value in asdict(figures).items()},
            "raw_bits_a_byte": round(figures.raw / math.log(2) / bytes_a_token, 4),
        }

    def losses_of(self, windows: list[Sequence]) -> Tensor:
        return torch.stack(list(self.pool.map(partial(model_losses, self.network), windows)))

    def by_position(self) -> Figures:
        """By band of windows of 8,192; and the last 512 tokens with less context before them."""
        windows = raw_windows(self.ids, 8192, POSITION_WINDOWS)
        losses = self.losses_of(windows)
        bands = {f"{low}-{high}": float(losses[:, low:high].mean()) for low, high in BANDS}
        ends = {"8192": float(losses[:, -512:].mean())}
        for context in SHORTER_CONTEXTS:
            cut = [
                Sequence(w.tokens[-context:], w.labels[-context:], w.answers[-context:])
                for w in windows
            ]
            ends[str(context)] = float(self.losses_of(cut)[:, -512:].mean())
        return {
            "windows": len(windows),
            "by_band": {name: round(value, 4) for name, value in bands.items()},
            "last_512_tokens_by_context": {n: round(value, 4) for n, value in ends.items()},
        }

    def prompts(self) -> tuple[dict[str, Ids], list[Prompt]]:
        quotes = self.quote_prompts(PROMPTS, PROMPT_LENGTH, ANSWER_LENGTH)
        raw = self.raw_prompts(PROMPTS, PROMPT_LENGTH)
        return {"raw": raw, "quote": np.stack([prompt.tokens for prompt in quotes])}, quotes

    def accepted(self, kind: str, temperature: float) -> Figures:
        kinds, quotes = self.prompts()
        said = self.generate(kinds[kind], ANSWER_LENGTH, temperature)
        figures = acceptance(said)
        if kind == "quote":
            figures["quoting"] = exactness(said, quotes)
        self.show(kind, temperature, kinds[kind], said)
        return figures

    def show(self, kind: str, temperature: float, prompts: Ids, said: Generated) -> None:
        """Two of the texts, for the eye."""
        with open(self.work / "texts.txt", "a", encoding="utf-8") as file:
            for row in (0, 1):
                prompt = self.tokenizer.decode(prompts[row][-80:].tolist(), False)
                text = self.tokenizer.decode(said.tokens[row].tolist())
                file.write(f"=== {kind}, {temperature:g}\n{prompt}\n>>>\n{text}\n\n")

    def long_quotes(self, length: int, count: int) -> Figures:
        """Quoting from far back, greedily: whether long contexts are used and not only borne."""
        quotes = self.quote_prompts(count, length, LONG_ANSWER)
        said = self.generate(np.stack([q.tokens for q in quotes]), LONG_ANSWER, 0.0)
        return {"prompts": count, **exactness(said, quotes)}


class Record:
    """`evaluation.json`, written after every measurement, so that a run can go on where it ended.

    Measurements of other weights than those that are exported now are thrown away.
    """

    def __init__(self, directory: Path, settings: Figures) -> None:
        self.path = directory / "evaluation.json"
        digest = hashlib.sha256((directory / "model.safetensors").read_bytes()).hexdigest()
        self.figures: dict[str, Any] = {"weights_sha256": digest, **settings, "measured": {}}
        if self.path.exists():
            before = json.loads(self.path.read_text(encoding="utf-8"))
            if before["weights_sha256"] == digest:
                self.figures["measured"] = before["measured"]

    def measure(self, part: str, name: str, measurement: Callable[[], Figures]) -> None:
        known = self.figures["measured"].setdefault(part, {})
        if name in known:
            return
        started = time.monotonic()
        known[name] = measurement()
        report(f"evaluate: {part}, {name}, {time.monotonic() - started:.0f} s: {known[name]}")
        text = json.dumps(self.figures, indent=1) + "\n"
        self.path.write_text(text, encoding="utf-8")


def measure_all(evaluation: Evaluation, record: Record) -> None:
    record.measure("loss", "held out", evaluation.losses)
    for kind, temperature in CONDITIONS:
        name = f"{kind}, {temperature:g}"
        record.measure("acceptance", name, partial(evaluation.accepted, kind, temperature))
    record.measure("loss", "by position", evaluation.by_position)
    for length, count in LONG_PROMPTS:
        record.measure("long quotes", str(length), partial(evaluation.long_quotes, length, count))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=Path(".tiny"))
    parser.add_argument("--state", default="tune.pt", help="file in the working directory")
    parser.add_argument("--out", type=Path, default=Path("stanchion/model/tiny"))
    parser.add_argument("--seed", type=int, default=22)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(1)
    pool = ThreadPoolExecutor(options.threads, initializer=torch.set_num_threads, initargs=(1,))
    state = torch.load(options.work / options.state, weights_only=False)
    settings: Figures = {
        "seed": options.seed,
        "torch": torch.__version__,
        "computed_in": "fp32, from the exported bf16 weights",
        "training": state.get("training", {}),
        "drafts": DRAFTS,
        "prompt_tokens": PROMPT_LENGTH,
        "generated_tokens": ANSWER_LENGTH,
        "acceptance_rule": "drafts sampled from q, kept with min(1, p/q); no special tokens",
    }
    with torch.no_grad():
        evaluation = Evaluation(options.work, options.state, options.seed, pool)
        measure_all(evaluation, Record(options.out, settings))


if __name__ == "__main__":
    main()
