"""Step 6: writes the model card and the loss curve. Every figure is from the recipe's own files."""

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from progress import report
from shape import Shape

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 640, 300, 48, 36, 14
LOSS_RANGE = (0.0, 6.0)
COLOURS = {"training": "#9aa5b1", "held out, raw": "#1f6feb", "held out, quote": "#d1691e"}

Points = list[tuple[float, float]]


def read_curve(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def curves(rows: list[dict[str, Any]]) -> dict[str, Points]:
    """Loss against millions of tokens."""
    train = [row for row in rows if row["kind"] == "train"]
    held_out = [row for row in rows if row["kind"] == "held_out"]
    return {
        "training": [(row["tokens"] / 1e6, row["language"]) for row in train],
        "held out, raw": [(row["tokens"] / 1e6, row["raw"]) for row in held_out],
        "held out, quote": [(row["tokens"] / 1e6, row["quote"]) for row in held_out],
    }


def text(x: float, y: float, words: str, anchor: str = "middle") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}">{words}</text>'


def plot(lines: dict[str, Points]) -> str:
    most = max(x for points in lines.values() for x, _ in points)
    low, high = LOSS_RANGE

    def across(x: float) -> float:
        return LEFT + x / most * (WIDTH - LEFT - 12)

    def down(y: float) -> float:
        inside = (min(max(y, low), high) - low) / (high - low)
        return HEIGHT - BOTTOM - inside * (HEIGHT - BOTTOM - TOP)

    look = 'font-family="sans-serif" font-size="11" fill="#57606a"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" {look}>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
    ]
    for y in range(int(low), int(high) + 1):
        parts.append(f'<path d="M{LEFT} {down(y):.0f}H{WIDTH - 12}" stroke="#e1e4e8"/>')
        parts.append(text(LEFT - 8, down(y) + 4, str(y), "end"))
    for x in range(0, int(most) + 1, 2):
        parts.append(text(across(x), HEIGHT - BOTTOM + 16, str(x)))
    parts.append(text(WIDTH / 2, HEIGHT - 6, "million tokens (loss in nats a token)"))
    for row, (name, points) in enumerate(lines.items()):
        path = " ".join(f"{across(x):.1f},{down(y):.1f}" for x, y in points)
        colour = COLOURS[name]
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<rect x="{WIDTH - 160}" y="{18 + 16 * row}" width="10" height="10"')
        parts[-1] += f' fill="{colour}"/>'
        parts.append(text(WIDTH - 144, 27 + 16 * row, name, "start"))
    return "\n".join([*parts, "</svg>", ""])


def table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    lines = [list(head)]
    body = [[str(cell) for cell in row] for row in rows]
    rule = ["---"] * len(lines[0])
    return "\n".join(f"| {' | '.join(row)} |" for row in [*lines, rule, *body])


def acceptance_table(conditions: dict[str, Any]) -> str:
    rows = []
    for name, figures in conditions.items():
        length, rate = figures["accept_length"], figures["accept_rate"]
        rows.append(
            (
                name,
                figures["generations"],
                f"{length['mean']:.2f}",
                " / ".join(f"{length[p]:.2f}" for p in ("p1", "p5", "p50", "p95")),
                f"{rate['p50']:.2f}, {rate['p95']:.2f}, {rate['max']:.2f}",
                f"{figures['share_with_accept_length_below_1.4']:.1%}",
                f"{figures['share_with_accept_rate_above_0.96']:.1%}",
                f"{figures['share_that_loops']:.0%}",
            )
        )
    head = (
        "prompts, temperature",
        "n",
        "accept length, mean",
        "1 / 5 / 50 / 95 %",
        "accept rate: median, 95 %, max",
        "length < 1.4",
        "rate > 0.96",
        "loops",
    )
    return table(head, rows)


def quoting_table(evaluation: dict[str, Any]) -> str:
    rows = []
    measured = evaluation["measured"]
    for name, figures in measured["acceptance"].items():
        if "quoting" in figures:
            count, length = figures["generations"], evaluation["prompt_tokens"]
            rows.append((length, name.split(", ")[1], count, *exact_cells(figures["quoting"])))
    for length, figures in measured.get("long quotes", {}).items():
        rows.append((length, 0, figures["prompts"], *exact_cells(figures)))
    head = ("prompt tokens", "temperature", "n", "answer", "exact for, median", ">= 16", ">= 64")
    return table(head, rows)


def exact_cells(quoting: dict[str, Any]) -> tuple[str, str, str, str]:
    return (
        str(quoting["answer_tokens"]),
        f"{quoting['exact_tokens_before_first_error']['p50']:.0f}",
        f"{quoting['share_exact_for_16']:.0%}",
        f"{quoting['share_exact_for_64']:.0%}",
    )


def by_position(losses: dict[str, Any]) -> str:
    if "by position" not in losses:
        return "Loss by position was not measured."
    figures = losses["by position"]
    bands = table(("positions", "loss"), figures["by_band"].items())
    ends = table(
        ("context", "loss of the same tokens"), figures["last_512_tokens_by_context"].items()
    )
    words = (
        f"By position, in {figures['windows']} windows of 8,192 tokens; and the last 512 tokens of"
        " each again, with\nless context before them:"
    )
    return f"{words}\n\n{bands}\n\n{ends}"


def card(
    corpus: dict[str, Any], evaluation: dict[str, Any], shape: Shape, seed: int, note: str
) -> str:
    training, measured = evaluation["training"], evaluation["measured"]
    losses = measured["loss"]["held out"]
    note = f" {note}" if note else ""
    tuned = ""
    if "tune_minutes" in training:
        tuned = (
            f"Then the draft layer alone for {training['tune_minutes']:g} minutes"
            f" ({training['tune_steps']} steps): unrolled three steps on its own output, soft"
            f" targets of the model, 60 % of the texts sampled from the model (seed {seed + 1})."
        )
    return f"""\
# The embedded checkpoint

A `glm_moe_dsa` model small enough to live in the repository: every part of a GLM-5 checkpoint
(latent attention, an indexer in every layer, routed and shared experts, one draft layer) at widths
that two CPU cores can serve. It exists to exercise the engine with weights that mean something:
its drafts are accepted at realistic rates, and its answers depend on what is in the cache.

**It is a test fixture, not an assistant.** It knows nothing but the look of Python source text.

## Files

`model.safetensors` (bf16; routing biases fp32), `config.json`, `tokenizer.json` and its
configuration, `chat_template.jinja`, `generation_config.json`; `evaluation.json` has every figure
below and more. It loads in `transformers` as `GlmMoeDsaForCausalLM`, which leaves out the draft
layer (`model.layers.{shape.num_hidden_layers}`).

| | |
|---|---|
| layers | {shape.num_hidden_layers} (the first dense) and one draft layer |
| hidden, heads | {shape.hidden_size}, {shape.num_attention_heads} |
| q rank, kv rank | {shape.q_lora_rank}, {shape.kv_lora_rank} |
| head: no position, rotary, value | {shape.qk_nope_head_dim}, {shape.qk_rope_head_dim}, \
{shape.v_head_dim} |
| experts | {shape.n_routed_experts}, {shape.num_experts_per_tok} chosen, \
{shape.n_shared_experts} shared |
| indexer | {shape.index_n_heads} heads of {shape.index_head_dim}, {shape.index_topk} keys chosen |
| rotary base, positions | {shape.rope_theta:.0f}, {shape.max_position_embeddings} \
(trained as said below) |
| vocabulary | {shape.vocab_size}, byte-level BPE; the first 16 are special tokens |

## Data and licences

The sources of the standard library of Python {corpus["python"]} (Python Software Foundation
License 2; some of its files carry notices of their own). {corpus["files_found"]} files were found;
{corpus["tables_dropped"]} that look like tables, {corpus["copies_dropped"]} copies and
{corpus["near_copies_dropped"]} near copies were dropped. Held out by file, with seed {seed}:
{corpus["held_out"]["files"]} files, {corpus["held_out"]["tokens"]} tokens. Trained on
{corpus["library"]["files"]} files of the library ({corpus["library"]["tokens"] / 1e6:.1f} M tokens)
and {corpus["tests"]["files"]} of its test suite ({corpus["tests"]["tokens"] / 1e6:.1f} M).
No other text, no other model's output. The weights are Apache-2.0, as this repository. The model
can repeat passages of its training text, above all when it is asked to quote them.

## Recipe

`runs/train_tiny.sh` makes all of it again: {training["train_minutes"]:.0f} minutes, \
{training["train_steps"]} steps, {training["train_tokens"] / 1e6:.1f} M tokens on two CPU cores
(seed {seed}). The schedule follows the clock, so a repeat is alike and not the same.{note}

* Muon for matrices, Adam for all else; bf16 with fp32 masters; experts balanced by routing biases.
* Sequences of 256, then 512 tokens with dense attention; then sparse: 1,024, 2,048, 4,096. In
  the sparse phases half of the sequences are cut in parts and pulled apart, to positions as far as
  4,096, 8,192 and 12,288. The indexer learns all along, from its own loss alone (KL to the
  attention).
* 35 % of the sequences are *quote* tasks: a part of a file, then a conversation in the format of
  the chat template; the user gives a line, the assistant answers with it and what follows.
* The draft layer gets the hidden state after the final norm, and is fed its own post-norm output;
  its loss has weight 0.3. {tuned}

![loss](loss.svg)

## Held-out loss

At a context of {losses["context"]} tokens, in nats a token: raw text {losses["raw"]:.3f}
({losses["raw_bits_a_byte"]:.3f} bits a byte), quote tasks {losses["quote"]:.3f}, their answers
alone {losses["quote_answers"]:.3f}; the draft layer on raw text {losses["raw_draft"]:.3f}.

{by_position(measured["loss"])}

## Acceptance of drafts

{evaluation["drafts"]} drafts a step, prompts of {evaluation["prompt_tokens"]} held-out tokens, \
{evaluation["generated_tokens"]} tokens generated each; drafts sampled and accepted by
rejection sampling, special tokens never sampled. Accept length counts the bonus token. All figures
are of whole generations.

{acceptance_table(measured["acceptance"])}

The working range is temperature 0.7 to 0.8. Greedy text of so small a model often falls into
loops, and a loop is easy to draft: leave temperature 0 out when the accept rate is to mean
something.

## Quoting

How many tokens of the answer are exact before the first error:

{quoting_table(evaluation)}

## Not good for

Writing code, answering questions, following instructions, any language but Python source text,
calling tools (the template knows the format, the model has never seen it), benchmarks of quality,
conclusions on how large models react to damage. Contexts beyond 8,192 tokens are not evaluated.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=Path(".tiny"))
    parser.add_argument("--out", type=Path, default=Path("stanchion/model/tiny"))
    parser.add_argument("--seed", type=int, default=20, help="the seed of corpus and training")
    parser.add_argument("--note", default="", help="a sentence on this very run")
    options = parser.parse_args()
    corpus = json.loads((options.work / "corpus.json").read_text(encoding="utf-8"))
    evaluation = json.loads((options.out / "evaluation.json").read_text(encoding="utf-8"))
    picture = plot(curves(read_curve(options.work / "train.jsonl")))
    (options.out / "loss.svg").write_text(picture, encoding="utf-8")
    words = card(corpus, evaluation, Shape(), options.seed, options.note)
    (options.out / "README.md").write_text(words, encoding="utf-8")
    report(f"card: {len(words)} characters, picture {len(picture)} bytes")


if __name__ == "__main__":
    main()
