"""Step 2: trains the network, in a budget of minutes.

The schedule is a function of the share of the budget that has passed, so a slower machine takes
fewer steps and ends in time. Dense attention first, then sparse attention with the indexer taught
all along; sequences grow, and in the sparse part half of them are stretched to far positions.
Writes `train.pt` (all that `--resume` needs) and `train.jsonl` (the loss curve).
"""

import argparse
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from batches import Batch, Sampler, read_ids
from losses import held_out
from network import Look, Network, initialize
from optimizer import Optimizer, Rates
from progress import Meter, meter, report
from shape import Shape
from torch import Tensor

TAUGHT_QUERIES = 64
DRAFT_WEIGHT = 0.3
BALANCE_RATE = 0.01
STEPS_BETWEEN_LINES = 25


@dataclass(frozen=True)
class Phase:
    until: float  # share of the budget
    length: int
    rows: int
    sparse: bool
    span: int  # positions reach up to here

    @property
    def piece_rows(self) -> int:
        """Rows of a batch that one thread takes at a time: the larger the less overhead."""
        return max(1, (4096 if self.length <= 512 else 2048) // self.length)


PHASES = (
    Phase(0.28, 256, 32, False, 256),
    Phase(0.64, 512, 16, False, 512),
    Phase(0.87, 1024, 8, True, 4096),
    Phase(0.95, 2048, 4, True, 8192),
    Phase(1.00, 4096, 2, True, 12288),
)


def phase_at(share: float) -> Phase:
    return next((phase for phase in PHASES if share < phase.until), PHASES[-1])


def rate_at(share: float, step: int) -> float:
    """Warm-up over 20 steps, level to 40 % of the budget, then a line down to 2 %."""
    return min(1.0, (step + 1) / 20) * min(1.0, max(0.02, (1 - share) / 0.6))


@dataclass(frozen=True)
class Measured:
    slopes: dict[str, Tensor]
    language: float
    draft: float
    indexer: float


class Trainer:
    def __init__(self, work: Path, seed: int, threads: int) -> None:
        torch.manual_seed(seed)
        self.work = work
        self.shape = Shape()
        self.network = Network(self.shape)
        initialize(self.network)
        self.optimizer = Optimizer(self.network, Rates())
        self.network.to_bfloat16()
        self.optimizer.live = dict(self.network.named_parameters())
        self.sampler = Sampler(work, quote_share=0.35, seed=seed)
        self.held_out = read_ids(work / "held_out.bin")
        self.pool = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))
        self.tokens = 0
        self.seconds = 0.0

    def measure(self, batch: Batch, look: Look) -> Measured:
        losses = self.network.losses(batch.tokens, batch.labels, batch.positions, look)
        total = losses.language + DRAFT_WEIGHT * losses.draft + losses.indexer
        names = list(self.optimizer.live)
        parameters = list(self.optimizer.live.values())
        slopes = torch.autograd.grad(total, parameters, allow_unused=True)
        found = {n: s for n, s in zip(names, slopes, strict=True) if s is not None}
        return Measured(
            found,
            float(losses.language.detach()),
            float(losses.draft.detach()),
            float(losses.indexer.detach()),
        )

    def look(self, phase: Phase) -> Look:
        taught = self.sampler.generator.integers(0, phase.length, size=TAUGHT_QUERIES)
        return Look(phase.sparse, torch.from_numpy(np.sort(taught)))

    def step(self, phase: Phase, rate: float) -> tuple[float, float, float]:
        batch = self.sampler.batch(phase.rows, phase.length, phase.span)
        look = self.look(phase)
        pieces = batch.split(phase.piece_rows)
        results = list(self.pool.map(lambda piece: self.measure(piece, look), pieces))
        slopes = {
            name: torch.stack([result.slopes[name] for result in results]).float().mean(0)
            for name in results[0].slopes
        }
        self.optimizer.step(slopes, rate, self.pool)
        self.balance(rate)
        self.tokens += batch.tokens.numel()
        means = [(result.language, result.draft, result.indexer) for result in results]
        language, draft, indexer = np.mean(means, axis=0).tolist()
        return language, draft, indexer

    def balance(self, rate: float) -> None:
        """Experts with less than their share become easier to choose, the others harder."""
        for moe in self.network.moes():
            load = torch.stack(moe.loads).sum(0).float()
            moe.loads.clear()
            moe.bias += BALANCE_RATE * rate * torch.sign(load.mean() - load)

    def save(self) -> None:
        """Whole or not at all: a run that is killed while it saves can still be resumed."""
        state = {
            "shape": asdict(self.shape),
            "optimizer": self.optimizer.state(),
            "biases": [moe.bias for moe in self.network.moes()],
            "generator": self.sampler.generator.bit_generator.state,
            "tokens": self.tokens,
            "seconds": self.seconds,
        }
        part = self.work / "train.pt.part"
        torch.save(state, part)
        os.replace(part, self.work / "train.pt")

    def restore(self) -> None:
        state = torch.load(self.work / "train.pt", weights_only=False)
        self.optimizer.restore(state["optimizer"])
        for moe, bias in zip(self.network.moes(), state["biases"], strict=True):
            moe.bias.copy_(bias)
        self.sampler.generator.bit_generator.state = state["generator"]
        self.tokens, self.seconds = state["tokens"], state["seconds"]

    def log(self, kind: str, values: dict[str, float]) -> None:
        place = {
            "kind": kind,
            "step": self.optimizer.steps,
            "minutes": round(self.seconds / 60, 2),
            "tokens": self.tokens,
        }
        rounded = {name: round(value, 4) for name, value in values.items()}
        with open(self.work / "train.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(place | rounded) + "\n")

    def evaluate(self, show: Meter, count: int) -> None:
        losses = held_out(self.network, self.held_out, self.sampler.quoter, 1024, count, self.pool)
        show.note(f"held out, step {self.optimizer.steps}: {losses.line()}")
        self.log("held_out", asdict(losses))

    def run(self, minutes: float, minutes_between_saves: float) -> None:
        started = time.monotonic() - self.seconds
        next_save = self.seconds + 60 * minutes_between_saves
        recent: list[tuple[float, float, float]] = []
        with meter("train") as show:
            while (share := self.seconds / 60 / minutes) < 1:
                phase = phase_at(share)
                recent.append(self.step(phase, rate_at(share, self.optimizer.steps)))
                self.seconds = time.monotonic() - started
                if self.optimizer.steps % STEPS_BETWEEN_LINES == 0:
                    self.tell(show, share, phase, recent)
                    recent = []
                if self.seconds > next_save:
                    self.evaluate(show, 6)
                    self.save()
                    next_save = self.seconds + 60 * minutes_between_saves
            self.save()
            self.evaluate(show, 6)

    def tell(
        self, show: Meter, share: float, phase: Phase, recent: list[tuple[float, float, float]]
    ) -> None:
        language, draft, indexer = np.mean(recent, axis=0).tolist()
        speed = self.tokens / self.seconds
        show.show(
            share,
            f"step {self.optimizer.steps} {phase.length}{' sparse' if phase.sparse else ''} "
            f"loss {language:.3f} draft {draft:.3f} indexer {indexer:.3f} "
            f"{self.tokens / 1e6:.2f} M tokens, {speed:.0f}/s",
            log=True,
        )
        self.log("train", {"language": language, "draft": draft, "indexer": indexer})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=Path(".tiny"))
    parser.add_argument("--minutes", type=float, default=80.0)
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--minutes-between-saves", type=float, default=6.0)
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    trainer = Trainer(options.work, options.seed, options.threads)
    size = sum(parameter.numel() for parameter in trainer.network.parameters())
    report(f"train: {size / 1e6:.2f} M parameters, {options.minutes} minutes")
    if options.resume and (options.work / "train.pt").exists():
        trainer.restore()
        report(f"train: goes on at step {trainer.optimizer.steps}")
    trainer.run(options.minutes, options.minutes_between_saves)
    report(f"train: {trainer.optimizer.steps} steps, {trainer.tokens / 1e6:.2f} M tokens")


if __name__ == "__main__":
    main()
