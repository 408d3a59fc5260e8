"""Compares the training text with transformers: same weights, same logits, to 1e-3 in fp32.

Run before training: a difference found later would cost the whole training.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from export import load_network, write_weights
from losses import LOOK
from network import Network, initialize, turn_of
from progress import report
from shape import Shape
from torch import Tensor
from transformers import GlmMoeDsaForCausalLM

TOLERANCE = 1e-3


def shaken(shape: Shape) -> Network:
    """A fresh network whose norms and biases are not the trivial ones."""
    network = Network(shape)
    initialize(network)
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
        network.lm_head.weight.mul_(20)
        for moe in network.moes():
            moe.bias.copy_(0.1 * torch.randn_like(moe.bias))
    return network.eval()


@torch.no_grad()
def logits_of(network: Network, tokens: Tensor) -> Tensor:
    turn = turn_of(torch.arange(tokens.shape[1])[None], network.shape)
    hidden, _ = network.hidden(tokens, turn, LOOK)
    logits: Tensor = network.lm_head(hidden)
    return logits


@torch.no_grad()
def difference(network: Network, tokens: Tensor) -> float:
    with tempfile.TemporaryDirectory() as directory:
        write_weights(network, Path(directory), half=False)
        other = GlmMoeDsaForCausalLM.from_pretrained(directory, dtype=torch.float32)
    expected = other(tokens).logits  # from_pretrained leaves a model in its eval mode
    return float((logits_of(network, tokens) - expected).abs().max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--state", type=Path, help="a saved state; without it, random weights")
    options = parser.parse_args()
    torch.manual_seed(1)
    torch.set_num_threads(1)
    network = load_network(options.state) if options.state else shaken(Shape())
    worst = difference(network, torch.randint(16, 2048, (2, 400)))
    report(f"check: logits differ by at most {worst:.1e}")
    assert worst < TOLERANCE


if __name__ == "__main__":
    main()
