"""Muon for the matrices, Adam for all else, on fp32 masters of a bf16 network.

Knows parameters by name and shape only. Both halves are split over the caller's threads.
"""

from collections import defaultdict
from concurrent.futures import Executor
from dataclasses import dataclass

import torch
from torch import Tensor, nn


def fits_muon(name: str, parameter: Tensor) -> bool:
    """Matrices inside the network. Embedding, head, router and indexer have no use for it."""
    others = ("embed" in name, "lm_head" in name, "indexer" in name, name.endswith("mlp.gate"))
    return parameter.ndim >= 2 and not any(others)


@dataclass(frozen=True)
class Rates:
    muon: float = 0.02
    muon_decay: float = 0.05
    adam: float = 4e-3
    embedding_factor: float = 5.0
    indexer_factor: float = 0.5

    def of_adam(self, name: str) -> float:
        if "embed" in name:
            return self.adam * self.embedding_factor
        return self.adam * (self.indexer_factor if "indexer" in name else 1.0)


def orthogonal(matrices: Tensor, steps: int = 5) -> Tensor:
    """The nearest orthogonal matrices, roughly, by Newton-Schulz steps. [N, rows, columns]"""
    x = matrices.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.float().norm(dim=(-2, -1), keepdim=True).to(x.dtype) + 1e-7)
    for _ in range(steps):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * (a @ a)) @ x
    out: Tensor = (x.mT if tall else x).float()
    return out


class Optimizer:
    def __init__(self, network: nn.Module, rates: Rates) -> None:
        self.rates = rates
        self.live = dict(network.named_parameters())
        self.master = {name: p.detach().float().clone() for name, p in self.live.items()}
        self.first = {name: torch.zeros_like(p) for name, p in self.master.items()}
        self.second: dict[str, Tensor] = {}
        self.groups: dict[tuple[int, ...], list[str]] = defaultdict(list)
        for name, p in self.master.items():
            if fits_muon(name, p):
                self.groups[tuple(p.shape[-2:])].append(name)
            else:
                self.second[name] = torch.zeros_like(p)
        self.steps = 0

    @torch.no_grad()
    def step(self, slopes: dict[str, Tensor], factor: float, pool: Executor) -> None:
        """One step; `factor` scales all rates. Parameters without a slope stay as they are."""
        self.steps += 1
        jobs = [pool.submit(self._adam, slopes, factor)]
        jobs += [pool.submit(self._muon, names, slopes, factor) for names in self.groups.values()]
        for job in jobs:
            job.result()

    @torch.no_grad()
    def _adam(self, slopes: dict[str, Tensor], factor: float) -> None:
        for name, second in self.second.items():
            if name not in slopes:
                continue
            slope, first = slopes[name].float(), self.first[name]
            first.lerp_(slope, 0.1)
            second.lerp_(slope * slope, 0.05)
            mean = first / (1 - 0.9**self.steps)
            spread = (second / (1 - 0.95**self.steps)).sqrt() + 1e-10
            rate = self.rates.of_adam(name) * factor
            self.live[name].copy_(self.master[name].addcdiv_(mean, spread, value=-rate))

    @torch.no_grad()
    def _muon(self, names: list[str], slopes: dict[str, Tensor], factor: float) -> None:
        names = [name for name in names if name in slopes]
        if not names:
            return
        rows, columns = self.master[names[0]].shape[-2:]
        updates = []
        for name in names:
            slope = slopes[name].float()
            momentum = self.first[name].lerp_(slope, 0.05)
            updates.append(slope.lerp(momentum, 0.95).view(-1, rows, columns))
        turned = orthogonal(torch.cat(updates))
        rate = self.rates.muon * factor
        scale = max(1.0, rows / columns) ** 0.5
        start = 0
        for name, own in zip(names, updates, strict=True):
            update = turned[start : start + len(own)]  # one matrix, or one for each expert
            start += len(own)
            master = self.master[name].mul_(1 - rate * self.rates.muon_decay)
            self.live[name].copy_(master.add_(update.view_as(master), alpha=-rate * scale))

    def state(self) -> dict[str, object]:
        return {
            "master": self.master,
            "first": self.first,
            "second": self.second,
            "steps": self.steps,
        }

    @torch.no_grad()
    def restore(self, state: dict[str, object]) -> None:
        for own, name in ((self.master, "master"), (self.first, "first"), (self.second, "second")):
            saved = state[name]
            assert isinstance(saved, dict)
            for key, value in saved.items():
                own[key].copy_(value)
        steps = state["steps"]
        assert isinstance(steps, int)
        self.steps = steps
        for name, parameter in self.live.items():
            parameter.copy_(self.master[name])
