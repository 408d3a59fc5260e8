"""Step 4: writes the network as a Hugging Face directory, with names as in GLM-5 checkpoints.

The draft layer is written as the layer after the last one, without copies of the embedding and the
head, which it shares.
"""

import argparse
import json
import shutil
from pathlib import Path

import torch
from network import Network
from progress import report
from safetensors.torch import save_file
from shape import SPECIAL_TOKENS, Shape, hf_config
from tokenizers import Tokenizer
from torch import Tensor

SIZE_MOST = 12_000_000

CHAT_TEMPLATE = """\
{%- if tools -%}
{{ '<|system|>\\n# Tools\\n\\nYou may call these functions:\\n\\n<tools>\\n' }}
{%- for tool in tools -%}
{{ tool | tojson + '\\n' }}
{%- endfor -%}
{{ '</tools>' }}
{%- endif -%}
{%- for message in messages -%}
{%- set said = namespace(text='') -%}
{%- if message.content is string -%}
{%- set said.text = message.content -%}
{%- elif message.content -%}
{%- for part in message.content if part.type == 'text' -%}
{%- set said.text = said.text + part.text -%}
{%- endfor -%}
{%- endif -%}
{%- if message.role == 'tool' -%}
{{ '<|observation|>\\n<tool_response>\\n' + said.text + '\\n</tool_response>' }}
{%- else -%}
{{ '<|' + message.role + '|>\\n' + said.text }}
{%- for call in message.tool_calls or [] -%}
{%- set function = call.function or call -%}
{{ '\\n' if said.text or not loop.first }}
{{- '<tool_call>' + function.name + '\\n' }}
{%- if function.arguments is mapping -%}
{%- for name, value in function.arguments.items() -%}
{%- set text = value if value is string else value | tojson -%}
{{ '<arg_key>' + name + '</arg_key>\\n<arg_value>' + text + '</arg_value>\\n' }}
{%- endfor -%}
{%- endif -%}
{{ '</tool_call>' }}
{%- endfor -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|assistant|>\\n' }}
{%- endif -%}
"""


def hf_name(name: str, draft_index: int) -> str:
    """The checkpoint's name of a parameter that is not packed."""
    if name == "lm_head.weight":
        return name
    draft = f"model.layers.{draft_index}."
    renames = (
        ("embed.", "model.embed_tokens."),
        ("layers.", "model.layers."),
        ("norm.", "model.norm."),
        ("draft.layer.", draft),
        ("draft.head_norm.", draft + "shared_head.norm."),
        ("draft.", draft),
    )
    old, new = next(pair for pair in renames if name.startswith(pair[0]))
    name = new + name.removeprefix(old)
    name = name.replace("mlp.shared.", "mlp.shared_experts.")
    if name.endswith("mlp.gate"):
        name += ".weight"
    return name.replace("mlp.bias", "mlp.gate.e_score_correction_bias")


def hf_weights(network: Network) -> dict[str, Tensor]:
    """All weights by their checkpoint names, in the type they have."""
    weights: dict[str, Tensor] = {}
    for name, value in network.state_dict().items():
        out = hf_name(name, network.shape.num_hidden_layers)
        if out.endswith("mlp.gate_up"):
            for expert, packed in enumerate(value):
                gate, up = packed.chunk(2)
                prefix = out.removesuffix("gate_up") + f"experts.{expert}."
                weights[prefix + "gate_proj.weight"] = gate
                weights[prefix + "up_proj.weight"] = up
        elif out.endswith("mlp.down"):
            for expert, packed in enumerate(value):
                prefix = out.removesuffix("down") + f"experts.{expert}."
                weights[prefix + "down_proj.weight"] = packed
        else:
            weights[out] = value
    return {name: value.detach().contiguous().clone() for name, value in weights.items()}


def load_network(path: Path) -> Network:
    """A network in fp32 from the masters of `train.pt` or `tune.pt`."""
    state = torch.load(path, weights_only=False)
    network = Network(Shape(**state["shape"]))
    masters = state["optimizer"]["master"] if "optimizer" in state else state["master"]
    network.load_state_dict(masters, strict=False)
    for moe, bias in zip(network.moes(), state["biases"], strict=True):
        moe.bias.copy_(bias)
    network.eval()
    return network


def as_bfloat16(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: value if name.endswith("e_score_correction_bias") else value.bfloat16()
        for name, value in weights.items()
    }


def write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def write_weights(network: Network, directory: Path, half: bool) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    weights = hf_weights(network)
    weights = as_bfloat16(weights) if half else weights
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    write_json(directory / "config.json", hf_config(network.shape))


def write_texts(directory: Path, tokenizer_path: Path, shape: Shape) -> None:
    shutil.copyfile(tokenizer_path, directory / "tokenizer.json")
    tokenizer = Tokenizer.from_file(str(tokenizer_path))
    end, pad = SPECIAL_TOKENS[:2]
    added = {
        str(index): {
            "content": token,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": True,
        }
        for index, token in enumerate(SPECIAL_TOKENS)
    }
    assert all(tokenizer.token_to_id(t) == index for index, t in enumerate(SPECIAL_TOKENS))
    write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "added_tokens_decoder": added,
            "additional_special_tokens": list(SPECIAL_TOKENS[2:]),
            "clean_up_tokenization_spaces": False,
            "eos_token": end,
            "pad_token": pad,
            "model_max_length": shape.max_position_embeddings,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    write_json(
        directory / "generation_config.json",
        {
            "do_sample": True,
            "temperature": 0.7,
            "top_p": 1.0,
            "eos_token_id": 0,
            "pad_token_id": 1,
        },
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=Path(".tiny"))
    parser.add_argument("--state", default="tune.pt", help="file in the working directory")
    parser.add_argument("--out", type=Path, default=Path("stanchion/model/tiny"))
    options = parser.parse_args()
    network = load_network(options.work / options.state)
    write_weights(network, options.out, half=True)
    write_texts(options.out, options.work / "tokenizer.json", network.shape)
    for path in options.out.iterdir():
        path.chmod(0o644)  # the weights are written for their owner alone
    size = sum(path.stat().st_size for path in options.out.iterdir())
    assert size <= SIZE_MOST, f"{size} bytes are too many"
    report(f"export: {size / 1e6:.2f} MB in {options.out}")


if __name__ == "__main__":
    main()
