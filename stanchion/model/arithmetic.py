"""The products of the model in each compute dtype. Activations are float32 rows between them.

float32: compiled kernels, whose bits do not depend on the batch. bfloat16: weights and products in
bfloat16 through torch; norms, softmax, router and head weights of the indexer stay float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear as torch_linear
from torch.nn.functional import silu

from stanchion.device.kernels.experts import Experts, Routing, experts, route
from stanchion.device.kernels.linear import Floats, linear, linear_heads, pack, rms_norm


class Product(Protocol):
    def __call__(
        self,
        x: Floats,
        start: int = 0,
        gain: Floats | None = None,
        epsilon: float = 0.0,
        add: Floats | None = None,
    ) -> Floats:
        """add + norm(x[:, start:]) @ weight.T, as kernels/linear.py has it."""
        ...


class HeadProduct(Protocol):
    def __call__(self, x: Floats, start: int, stride: int, out: Floats) -> None:
        """out[:, h, :outputs] = x[:, start + h * stride :] @ weight[h].T for every head."""
        ...


class FeedForward(Protocol):
    def __call__(self, hidden: Floats, gain: Floats, epsilon: float) -> Floats:
        """hidden + the experts' answers to norm(hidden)."""
        ...


class Arithmetic(Protocol):
    def product(self, parts: Sequence[Tensor]) -> Product:
        """One product for several (outputs, inputs) weights; parts in float32 stay so."""
        ...

    def heads(self, weight: Tensor) -> HeadProduct:
        """(heads, outputs, inputs)."""
        ...

    def feed_forward(
        self, router: Tensor, bias: Tensor, gate_up: Tensor, down: Tensor, routing: Routing
    ) -> FeedForward:
        """gate_up (experts, 2 * inner, hidden); experts beyond the router's are always chosen."""
        ...


class Float32:
    def product(self, parts: Sequence[Tensor]) -> Product:
        packed = pack(torch.cat([part.float() for part in parts]))

        def run(
            x: Floats,
            start: int = 0,
            gain: Floats | None = None,
            epsilon: float = 0.0,
            add: Floats | None = None,
        ) -> Floats:
            return linear(x, packed, start, gain, epsilon, add)

        return run

    def heads(self, weight: Tensor) -> HeadProduct:
        packed = pack(weight.float())
        heads = len(weight)

        def run(x: Floats, start: int, stride: int, out: Floats) -> None:
            linear_heads(x, heads, start, stride, packed, out)

        return run

    def feed_forward(
        self, router: Tensor, bias: Tensor, gate_up: Tensor, down: Tensor, routing: Routing
    ) -> FeedForward:
        always = len(gate_up) - len(bias)
        packed = Experts(
            pack(router.float()),
            bias.float().contiguous().numpy(),
            pack(gate_up.float()),
            pack(down.float()),
            routing,
            always,
        )

        def run(hidden: Floats, gain: Floats, epsilon: float) -> Floats:
            return experts(hidden, gain, epsilon, packed)

        return run


class BFloat16:
    def product(self, parts: Sequence[Tensor]) -> Product:
        inputs = parts[0].shape[1]
        kept = [part.contiguous() for part in parts]

        def run(
            x: Floats,
            start: int = 0,
            gain: Floats | None = None,
            epsilon: float = 0.0,
            add: Floats | None = None,
        ) -> Floats:
            rows = np.ascontiguousarray(x[:, start : start + inputs])
            given = torch.from_numpy(rows if gain is None else rms_norm(rows, gain, epsilon))
            out = torch.cat([torch_linear(given.to(one.dtype), one).float() for one in kept], 1)
            answer: Floats = out.numpy()
            return answer if add is None else add + answer

        return run

    def heads(self, weight: Tensor) -> HeadProduct:
        heads, outputs, inputs = weight.shape
        turned = weight.bfloat16().transpose(1, 2).contiguous()  # (heads, inputs, outputs)

        def run(x: Floats, start: int, stride: int, out: Floats) -> None:
            rows = torch.from_numpy(x[:, start : start + (heads - 1) * stride + inputs])
            parts = rows.unfold(1, inputs, stride).transpose(0, 1)  # (heads, rows, inputs)
            done = torch.bmm(parts.bfloat16(), turned).float()  # (heads, rows, outputs)
            out[:, :, :outputs] = done.transpose(0, 1).numpy()

        return run

    def feed_forward(
        self, router: Tensor, bias: Tensor, gate_up: Tensor, down: Tensor, routing: Routing
    ) -> FeedForward:
        always = len(gate_up) - len(bias)
        scoring = Float32().product([router]) if len(bias) else None
        biases: Floats = bias.float().contiguous().numpy()
        gate_up, down = gate_up.bfloat16(), down.bfloat16()

        def run(hidden: Floats, gain: Floats, epsilon: float) -> Floats:
            normed = rms_norm(hidden, gain, epsilon)  # (rows, hidden)
            rows = torch.from_numpy(normed).bfloat16()
            out = torch.zeros(hidden.shape)  # float32 sum of the answers
            if scoring is not None:
                picks, weights = route(scoring(normed), biases, routing)  # (rows, chosen)
                for expert in np.unique(picks).tolist():
                    at, turn = np.nonzero(picks == expert)
                    answer = _answer(rows[at], gate_up[expert], down[expert])
                    out[at] += answer * torch.from_numpy(weights[at, turn])[:, None]
            for expert in range(len(biases), len(biases) + always):
                out += _answer(rows, gate_up[expert], down[expert])
            total: Floats = hidden + out.numpy()
            return total

        return run


def _answer(rows: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """One expert: (rows, hidden) -> float32 (rows, hidden)."""
    gate, up = torch_linear(rows, gate_up).chunk(2, -1)
    return torch_linear(silu(gate) * up, down).float()
