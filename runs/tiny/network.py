"""The GLM-5 architecture in the form that trains fast on CPU cores.

Promises the same function as `GlmMoeDsaForCausalLM` on the exported weights (`check.py` compares
them), plus the draft layer, wired as in the report: the hidden state it gets is the one after the
final norm, and its own post-norm output is both what the head reads and what it is fed next.

Expanded attention, packed experts, no cache. Knows nothing of data or optimizers.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from shape import Shape
from torch import Tensor, nn

QUERY_CHUNK = 512  # indexer scores are made for this many queries at a time, to bound memory
NO_LABEL = -100


@dataclass(frozen=True)
class Turn:
    """The rotation of every position: cosines and sines, [B, T, R/2] in fp32."""

    cos: Tensor
    sin: Tensor


@dataclass(frozen=True)
class Look:
    """How attention looks: at all keys or at the chosen ones, and which queries teach."""

    sparse: bool
    taught: Tensor | None  # positions of the queries whose indexer loss is taken


@dataclass(frozen=True)
class Losses:
    language: Tensor
    draft: Tensor
    indexer: Tensor  # summed over layers


def turn_of(positions: Tensor, shape: Shape) -> Turn:
    steps = torch.arange(0, shape.qk_rope_head_dim, 2, dtype=torch.float32)
    frequencies = 1.0 / shape.rope_theta ** (steps / shape.qk_rope_head_dim)
    angles = positions[..., None].float() * frequencies  # [B, T, R/2]
    return Turn(angles.cos(), angles.sin())


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the pairs (0, 1), (2, 3), ... of the last axis."""
    even, odd = x[..., 0::2].float(), x[..., 1::2].float()
    pairs = torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1)
    return pairs.flatten(-2).to(x.dtype)


def rotate_heads(x: Tensor, turn: Turn) -> Tensor:
    return rotate(x, turn.cos.unsqueeze(-2), turn.sin.unsqueeze(-2))  # x: [B, T, H, R]


def causal_rows(start: int, end: int) -> Tensor:
    """Which of the keys [0, end) the queries [start, end) may see."""
    return torch.arange(end) <= torch.arange(start, end)[:, None]


class Norm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


class Indexer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.wq_b = linear(shape.q_lora_rank, shape.index_n_heads * shape.index_head_dim)
        self.wk = linear(shape.hidden_size, shape.index_head_dim)
        self.k_norm = nn.LayerNorm(shape.index_head_dim, eps=1e-6)
        self.weights_proj = linear(shape.hidden_size, shape.index_n_heads)

    def queries(self, x: Tensor, q_latent: Tensor, turn: Turn) -> tuple[Tensor, Tensor]:
        shape = self.shape
        rotated = shape.qk_rope_head_dim
        q: Tensor = self.wq_b(q_latent)
        q = q.view(*q.shape[:2], shape.index_n_heads, shape.index_head_dim)  # [B, Q, H, D]
        q = torch.cat((rotate_heads(q[..., :rotated], turn), q[..., rotated:]), -1)
        # Both scales of the score are in the weights: ReLU lets positive factors through.
        scale = (shape.index_n_heads * shape.index_head_dim) ** -0.5
        weights: Tensor = self.weights_proj(x)  # [B, Q, H]
        return q, weights.float() * scale

    def keys(self, x: Tensor, turn: Turn) -> Tensor:
        rotated = self.shape.qk_rope_head_dim
        k: Tensor = self.k_norm(self.wk(x))  # [B, T, D]
        return torch.cat((rotate(k[..., :rotated], turn.cos, turn.sin), k[..., rotated:]), -1)


def index_scores(q: Tensor, weights: Tensor, k: Tensor) -> Tensor:
    batch, queries, heads, size = q.shape
    dots = torch.bmm(q.reshape(batch, queries * heads, size), k.transpose(1, 2))
    dots = torch.relu(dots).view(batch, queries, heads, -1).float()
    return torch.einsum("bqht,bqh->bqt", dots, weights)  # [B, Q, T]


@torch.no_grad()
def choose(q: Tensor, weights: Tensor, k: Tensor, topk: int) -> Tensor:
    """Which keys each query may look at: the causal ones with the highest scores. [B, T, T]"""
    batch, length = k.shape[:2]
    chosen = torch.zeros(batch, length, length, dtype=torch.bool)
    for start in range(0, length, QUERY_CHUNK):
        end = min(start + QUERY_CHUNK, length)
        seen = causal_rows(start, end)
        rows = chosen[:, start:end, :end]
        if end <= topk:
            rows.copy_(seen)
            continue
        scores = index_scores(q[:, start:end], weights[:, start:end], k[:, :end])
        top = scores.masked_fill_(~seen, float("-inf")).topk(topk, -1, sorted=False).indices
        rows.scatter_(2, top, True)
        rows &= seen
    return chosen


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        heads = shape.num_attention_heads
        # These two norms keep the default epsilon, whatever the config says; so does the original.
        self.q_a_proj = linear(shape.hidden_size, shape.q_lora_rank)
        self.q_a_layernorm = Norm(shape.q_lora_rank, 1e-6)
        self.q_b_proj = linear(shape.q_lora_rank, heads * shape.qk_head_dim)
        self.kv_a_proj_with_mqa = linear(
            shape.hidden_size, shape.kv_lora_rank + shape.qk_rope_head_dim
        )
        self.kv_a_layernorm = Norm(shape.kv_lora_rank, 1e-6)
        self.kv_b_proj = linear(
            shape.kv_lora_rank, heads * (shape.qk_nope_head_dim + shape.v_head_dim)
        )
        self.o_proj = linear(heads * shape.v_head_dim, shape.hidden_size)
        self.indexer = Indexer(shape)
        self.scale = shape.qk_head_dim**-0.5

    def q_latent(self, x: Tensor) -> Tensor:
        latent: Tensor = self.q_a_layernorm(self.q_a_proj(x))
        return latent

    def queries(self, q_latent: Tensor, turn: Turn) -> Tensor:
        nope = self.shape.qk_nope_head_dim
        q: Tensor = self.q_b_proj(q_latent)
        q = q.view(*q.shape[:2], self.shape.num_attention_heads, self.shape.qk_head_dim)
        return torch.cat((q[..., :nope], rotate_heads(q[..., nope:], turn)), -1)  # [B, T, H, D]

    def kv_latent(self, x: Tensor, turn: Turn) -> Tensor:
        """What a cache would hold: the normed latent and the rotated key part. [B, T, C + R]"""
        rank = self.shape.kv_lora_rank
        kv: Tensor = self.kv_a_proj_with_mqa(x)
        latent = self.kv_a_layernorm(kv[..., :rank])
        return torch.cat((latent, rotate(kv[..., rank:], turn.cos, turn.sin)), -1)

    def expand(self, kv_latent: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of all heads, each [B, H, T, D]."""
        shape = self.shape
        heads, nope = shape.num_attention_heads, shape.qk_nope_head_dim
        kv: Tensor = self.kv_b_proj(kv_latent[..., : shape.kv_lora_rank])
        kv = kv.view(*kv.shape[:2], heads, nope + shape.v_head_dim)
        rotated = kv_latent[..., shape.kv_lora_rank :].unsqueeze(2).expand(-1, -1, heads, -1)
        k = torch.cat((kv[..., :nope], rotated), -1)
        return k.transpose(1, 2), kv[..., nope:].transpose(1, 2)

    def forward(self, x: Tensor, turn: Turn, look: Look) -> tuple[Tensor, Tensor]:
        """The output and the indexer's loss (zero where no query teaches)."""
        q_latent = self.q_latent(x)
        q = self.queries(q_latent, turn).transpose(1, 2)  # [B, H, T, D]
        k, v = self.expand(self.kv_latent(x, turn))
        loss, chosen = torch.zeros(()), None
        if look.sparse or look.taught is not None:
            # The indexer learns from its own loss alone: nothing flows back into the model.
            index_q, weights = self.indexer.queries(x.detach(), q_latent.detach(), turn)
            index_k = self.indexer.keys(x.detach(), turn)
            if look.sparse:
                chosen = choose(index_q, weights, index_k, self.shape.index_topk)
            if look.taught is not None:
                rows = look.taught
                scores = index_scores(index_q[:, rows], weights[:, rows], index_k)
                loss = self.indexer_loss(scores, q[:, :, rows], k, rows, chosen)
        out = self.attend(q, k, v, chosen)
        return self.o_proj(out.transpose(1, 2).flatten(2)), loss

    def attend(self, q: Tensor, k: Tensor, v: Tensor, chosen: Tensor | None) -> Tensor:
        if chosen is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        mask = torch.zeros(chosen.shape, dtype=q.dtype).masked_fill_(~chosen, float("-inf"))
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask.unsqueeze(1), scale=self.scale
        )

    def indexer_loss(
        self, scores: Tensor, q: Tensor, k: Tensor, rows: Tensor, chosen: Tensor | None
    ) -> Tensor:
        """KL from the indexer's softmax to the mean of the heads' attention, over `rows`."""
        if chosen is None:
            seen = (torch.arange(k.shape[2]) <= rows[:, None]).expand_as(scores)
        else:
            seen = chosen[:, rows]  # [B, N, T]
        with torch.no_grad():
            attention = (q @ k.transpose(2, 3)).float() * self.scale  # [B, H, N, T]
            attention = attention.masked_fill_(~seen.unsqueeze(1), float("-inf")).softmax(-1)
            goal = attention.mean(1)
        guess = scores.masked_fill(~seen, float("-inf")).log_softmax(-1).masked_fill(~seen, 0.0)
        loss: Tensor = (goal * (goal.clamp_min(1e-9).log() - guess)).sum(-1).mean()
        return loss


class Mlp(nn.Module):
    def __init__(self, size: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = linear(size, inner)
        self.up_proj = linear(size, inner)
        self.down_proj = linear(inner, size)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Moe(nn.Module):
    bias: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        experts, size, inner = (
            shape.n_routed_experts,
            shape.hidden_size,
            shape.moe_intermediate_size,
        )
        self.gate = nn.Parameter(torch.empty(experts, size))
        self.register_buffer("bias", torch.zeros(experts))
        self.gate_up = nn.Parameter(torch.empty(experts, 2 * inner, size))
        self.down = nn.Parameter(torch.empty(experts, size, inner))
        self.shared = Mlp(size, inner * shape.n_shared_experts)
        # Two threads append here at once, which a list allows and `+=` on a tensor does not.
        self.loads: list[Tensor] = []

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = F.linear(x.float(), self.gate.float()).sigmoid()  # [N, E]
        top = self.shape.num_experts_per_tok
        chosen = (scores.detach() + self.bias).topk(top, -1, sorted=False).indices
        weights = scores.gather(1, chosen)
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return chosen, weights * self.shape.routed_scaling_factor  # [N, K] each

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        chosen, weights = self.route(flat)
        top = chosen.shape[1]
        order = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=self.shape.n_routed_experts)
        if self.training:
            self.loads.append(counts)
        ordered = flat.index_select(0, order // top)
        outs, start = [], 0
        for expert, count in enumerate(counts.tolist()):
            part = ordered[start : start + count]
            gate, up = F.linear(part, self.gate_up[expert]).chunk(2, -1)
            outs.append(F.linear(F.silu(gate) * up, self.down[expert]))
            start += count
        back = torch.empty_like(order)
        back[order] = torch.arange(order.numel())
        routed = torch.cat(outs).index_select(0, back).view(-1, top, flat.shape[1])
        out = (routed * weights.to(routed.dtype).unsqueeze(-1)).sum(1) + self.shared(flat)
        result: Tensor = out.view_as(x)
        return result


class Layer(nn.Module):
    def __init__(self, shape: Shape, dense: bool) -> None:
        super().__init__()
        size, eps = shape.hidden_size, shape.rms_norm_eps
        self.input_layernorm = Norm(size, eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = Norm(size, eps)
        self.mlp = Mlp(size, shape.intermediate_size) if dense else Moe(shape)

    def forward(self, x: Tensor, turn: Turn, look: Look) -> tuple[Tensor, Tensor]:
        out, loss = self.self_attn(self.input_layernorm(x), turn, look)
        x = x + out
        return x + self.mlp(self.post_attention_layernorm(x)), loss


class Draft(nn.Module):
    """The MTP layer: at slot p it has token p and the hidden state of position p - 1."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        size, eps = shape.hidden_size, shape.rms_norm_eps
        self.enorm = Norm(size, eps)
        self.hnorm = Norm(size, eps)
        self.eh_proj = linear(2 * size, size)
        self.layer = Layer(shape, dense=False)
        self.head_norm = Norm(size, eps)

    def join(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        joined: Tensor = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(hidden)), -1))
        return joined

    def forward(
        self, embedded: Tensor, hidden: Tensor, turn: Turn, look: Look
    ) -> tuple[Tensor, Tensor]:
        out, loss = self.layer(self.join(embedded, hidden), turn, look)
        return self.head_norm(out), loss


def shifted(hidden: Tensor) -> Tensor:
    """Hidden states as the draft layer's slots get them: one later, the first one zero."""
    return torch.cat((torch.zeros_like(hidden[:, :1]), hidden[:, :-1]), 1)


class Network(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(
            Layer(shape, dense=index < shape.first_k_dense_replace)
            for index in range(shape.num_hidden_layers)
        )
        self.norm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.lm_head = linear(shape.hidden_size, shape.vocab_size)
        self.draft = Draft(shape)

    def hidden(self, tokens: Tensor, turn: Turn, look: Look) -> tuple[Tensor, Tensor]:
        """Hidden states after the final norm [B, T, D], and the indexers' loss."""
        x = self.embed(tokens)
        total = torch.zeros(())
        for layer in self.layers:
            x, loss = layer(x, turn, look)
            total = total + loss
        return self.norm(x), total

    def losses(self, tokens: Tensor, labels: Tensor, positions: Tensor, look: Look) -> Losses:
        turn = turn_of(positions, self.shape)
        hidden, indexer = self.hidden(tokens, turn, look)
        drafted, loss = self.draft(self.embed(tokens), shifted(hidden), turn, look)
        return Losses(
            self.cross_entropy(hidden, labels),
            self.cross_entropy(drafted, labels),
            indexer + loss,
        )

    def cross_entropy(self, hidden: Tensor, labels: Tensor) -> Tensor:
        flat = hidden.flatten(0, 1)
        loss: Tensor = HeadLoss.apply(flat, self.lm_head.weight, labels.flatten())  # type: ignore[no-untyped-call]
        return loss

    def moes(self) -> list[Moe]:
        return [module for module in self.modules() if isinstance(module, Moe)]

    def to_bfloat16(self) -> None:
        """All but the routing biases, whose steps are too small for bf16."""
        biases = [moe.bias for moe in self.moes()]
        self.bfloat16()
        for moe, bias in zip(self.moes(), biases, strict=True):
            moe.bias = bias


class HeadLoss(torch.autograd.Function):
    """Mean cross entropy of `x @ weight.T`; makes the gradients on the way forward.

    So the logits, the largest tensor of the model, are never kept.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        kept = labels != NO_LABEL
        count = int(kept.sum())
        logits = (x @ weight.T).float()
        log_sum = torch.logsumexp(logits, -1, keepdim=True)
        goals = labels.clamp_min(0).unsqueeze(1)
        losses = (log_sum - logits.gather(1, goals))[:, 0] * kept
        slope = logits.sub_(log_sum).exp_()
        slope.scatter_add_(1, goals, torch.full(goals.shape, -1.0))
        slope = (slope.mul_(kept.unsqueeze(1)) / count).to(x.dtype)
        ctx.save_for_backward(slope @ weight, slope.T @ x)
        return losses.sum() / count

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, Tensor, None]:
        x_slope, weight_slope = ctx.saved_tensors
        return x_slope * slopes[0], weight_slope * slopes[0], None


@torch.no_grad()
def initialize(network: Network) -> None:
    for name, parameter in network.named_parameters():
        if parameter.ndim < 2:
            continue
        deviation = 0.6 * parameter.shape[-1] ** -0.5
        if name == "embed.weight":
            deviation = 1.0
        elif name == "lm_head.weight":
            deviation = 0.005
        elif name.endswith(("o_proj.weight", "down_proj.weight", "mlp.down")):
            deviation *= 0.3
        nn.init.normal_(parameter, std=deviation)
    look_back(network)


def look_back(network: Network, sharpness: float = 6.0, pairs: int = 4, heads: int = 3) -> None:
    """Lets heads 0, 1, 2 of layer 0 begin by looking one, two, three tokens back.

    Every embedding gets a common direction `u`; queries and keys of the first rotary pairs read
    only `u`, and the query's phase is turned back by the distance. Copying is then one step away,
    and appears early in training.
    """
    shape = network.shape
    size, rank = shape.hidden_size, shape.q_lora_rank
    u = torch.randn(size)
    u /= u.norm()
    network.embed.weight.add_(0.5 * size**0.5 * u)
    along = 0.5 * size**0.5 / 1.25**0.5  # what the input norm leaves along u
    layer = network.layers[0]
    assert isinstance(layer, Layer)
    attention = layer.self_attn
    attention.q_a_proj.weight[0] = u
    first = along / ((along**2 + (rank - 1) * 0.36) / rank) ** 0.5
    q = attention.q_b_proj.weight.view(shape.num_attention_heads, shape.qk_head_dim, rank)
    k = attention.kv_a_proj_with_mqa.weight[shape.kv_lora_rank :]
    for pair in range(pairs):
        frequency = shape.rope_theta ** (-2 * pair / shape.qk_rope_head_dim)
        k[2 * pair] = u * sharpness / along
        k[2 * pair + 1] = 0
        for head in range(heads):
            phase = torch.tensor(-(head + 1) * frequency)
            row = shape.qk_nope_head_dim + 2 * pair
            q[head, row : row + 2] = 0
            q[head, row, 0] = sharpness / first * phase.cos()
            q[head, row + 1, 0] = sharpness / first * phase.sin()
