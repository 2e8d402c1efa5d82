"""A decoder-only transformer with Llama's names of weights, so that an export needs no renaming.

Pre-norm layers of attention (grouped queries, rotary positions) and a gated MLP (SwiGLU), with RMSNorm.
`transformers.LlamaForCausalLM` computes the same logits from the same state dict; with biases `Qwen2ForCausalLM` does,
with norms of queries and keys `Qwen3ForCausalLM`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.nn.functional as F  # noqa: N812 (the usual name)
from torch import Tensor, nn

from hpcdist.checkpoint.sharded import copy_overlap, targets_of
from hpcdist.trainers.lm import LORA_WEIGHTS, LmConfig, LmLoraConfig
from hpcdist.trainers.lm.sizes import EMBEDDING, LmModelConfig

#: Standard deviation of the initial weights, that of GPT-2 and Llama.
INIT_STD = 0.02
#: Number of rows of a weight that `draw_normal` draws together.
BLOCK_ROWS = 1024


class Decoder(nn.Module):
    """The model: from tokens int64 [B, T] to the logits of the next tokens, [B, T, vocab_size].

    Args:
        config: its sizes.
        vocab_size: rows of the embedding, with padding.
    """

    def __init__(self, config: LmModelConfig, vocab_size: int) -> None:
        super().__init__()
        self.config = config
        self.vocab_size = vocab_size
        self.model = Body(config, vocab_size)
        self.lm_head = nn.Linear(config.hidden_size, vocab_size, bias=False)
        self.tie()

    def tie(self) -> None:
        """Make embedding and output one table, if the config says so: also after a change that has replaced them."""
        if self.config.tie_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, tokens: Tensor, caches: list[KeyValues] | None = None) -> Tensor:
        """Return logits.

        Args:
            tokens: int64 [B, T].
            caches: one of each layer with keys and values of the tokens before `tokens`, which the call appends to.
        """
        logits: Tensor = self.lm_head(self.model(tokens, caches))
        return logits

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Draw all weights, whole or sharded: they depend on (seed, name), not on the mesh.

        As in GPT-2, the outputs of the layers are smaller the more layers there are: their sum is the residual stream.
        """
        self.tie()  # `to_empty` has made two tables of one
        for name, weight in self.named_parameters():
            kind = name.split(".")[-2]
            if "norm" in kind:
                weight.fill_(1.0)
            elif name.endswith(("bias", "lora_b")):
                weight.zero_()
            elif kind in ("o_proj", "down_proj"):
                draw_normal(weight, INIT_STD / math.sqrt(2 * self.config.num_layers), seed, name)
            else:
                draw_normal(weight, INIT_STD, seed, name)


class Body(nn.Module):
    """Embedding, layers and final norm."""

    def __init__(self, config: LmModelConfig, vocab_size: int) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.norm_eps)

    def forward(self, tokens: Tensor, caches: list[KeyValues] | None = None) -> Tensor:
        """Return the normalised residual stream, [B, T, hidden_size]."""
        begin = 0
        if caches is not None:
            begin = caches[0].length
        config = self.config
        positions = torch.arange(begin, begin + tokens.shape[1], device=tokens.device)
        cos, sin = rope_table(positions, config.head_size, config.rope_theta)
        hidden = self.embed_tokens(tokens)
        for number, layer in enumerate(self.layers):
            cache = None
            if caches is not None:
                cache = caches[number]
            hidden = layer(hidden, cos, sin, cache)
        normalised: Tensor = self.norm(hidden)
        return normalised


class Block(nn.Module):
    """One layer."""

    def __init__(self, config: LmModelConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = Mlp(config)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, cache: KeyValues | None = None) -> Tensor:
        """Return the residual stream after this layer, [B, T, hidden_size]."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), cos, sin, cache)
        added: Tensor = self.mlp(self.post_attention_layernorm(hidden))
        return hidden + added


class Attention(nn.Module):
    """Causal attention; each head of keys and values serves the same number of heads of queries."""

    def __init__(self, config: LmModelConfig) -> None:
        super().__init__()
        self.head_size = config.head_size
        width = config.hidden_size
        num_queries = config.num_heads * self.head_size
        num_keys = config.kv_heads * self.head_size
        self.q_proj = nn.Linear(width, num_queries, bias=config.qkv_bias)
        self.k_proj = nn.Linear(width, num_keys, bias=config.qkv_bias)
        self.v_proj = nn.Linear(width, num_keys, bias=config.qkv_bias)
        self.o_proj = nn.Linear(num_queries, width, bias=False)
        self.q_norm: nn.Module = nn.Identity()
        self.k_norm: nn.Module = nn.Identity()
        if config.qk_norm:
            self.q_norm = nn.RMSNorm(self.head_size, config.norm_eps)
            self.k_norm = nn.RMSNorm(self.head_size, config.norm_eps)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, cache: KeyValues | None = None) -> Tensor:
        """Return the output of the heads, [B, T, hidden_size]."""
        # With tensor parallelism, a rank has a part of the heads.
        shape = (-1, self.head_size)
        query = self.q_proj(hidden).unflatten(-1, shape)
        key = self.k_proj(hidden).unflatten(-1, shape)
        value = self.v_proj(hidden).unflatten(-1, shape).transpose(1, 2)
        query = rotate(self.q_norm(query).transpose(1, 2), cos, sin)
        key = rotate(self.k_norm(key).transpose(1, 2), cos, sin)
        is_causal = True
        if cache is not None:
            key, value = cache.append(key, value)
            # A single query, the last token, sees all keys.
            is_causal = query.shape[2] > 1
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=is_causal, enable_gqa=True)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out


class Mlp(nn.Module):
    """A gated MLP (SwiGLU)."""

    def __init__(self, config: LmModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the output, [B, T, hidden_size]."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))
        return out


def rope_table(positions: Tensor, head_size: int, theta: float) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of the angles of positions [T], float32 [T, head_size]."""
    even = torch.arange(0, head_size, 2, device=positions.device, dtype=torch.float32)
    frequencies = theta ** -(even / head_size)
    angles = torch.outer(positions.float(), frequencies).repeat(1, 2)
    return angles.cos(), angles.sin()


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return heads [B, heads, T, head_size] with element i and i + head_size / 2 rotated by their angle, as Llama's."""
    first, second = heads.chunk(2, dim=-1)
    rotated = torch.cat((-second, first), dim=-1)
    return (heads * cos + rotated * sin).to(heads.dtype)


class LoraLinear(nn.Linear):
    """A linear layer with frozen weights; a trained product of two small matrices is added to its output.

    https://arxiv.org/abs/2106.09685. The product is 0 at first, since `lora_b` is.
    """

    def __init__(self, base: nn.Linear, config: LmLoraConfig) -> None:
        super().__init__(base.in_features, base.out_features, base.bias is not None, base.weight.device)
        self.requires_grad_(False)
        self.scale = config.scale
        self.lora_a = nn.Parameter(self.weight.new_empty(config.rank, base.in_features))
        self.lora_b = nn.Parameter(self.weight.new_empty(base.out_features, config.rank))

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the output, [..., out_features]."""
        return super().forward(hidden) + F.linear(F.linear(hidden, self.lora_a), self.lora_b) * self.scale


def add_lora(model: Decoder, config: LmLoraConfig) -> None:
    """Freeze the weights of a model without values (on the device meta), and add those that are trained instead."""
    model.requires_grad_(False)
    for part in list(model.modules()):
        for name, layer in list(part.named_children()):
            if name in config.targets and isinstance(layer, nn.Linear):
                setattr(part, name, LoraLinear(layer, config))


class KeyValues:
    """Keys and values of the tokens so far in one layer.

    Args:
        batch_size: sequences.
        length: the largest number of tokens of a sequence.
        weight: any weight of the model, for device and dtype.
    """

    def __init__(self, config: LmModelConfig, batch_size: int, length: int, weight: Tensor) -> None:
        shape = (batch_size, config.kv_heads, length, config.head_size)
        self.keys = torch.empty(shape, device=weight.device, dtype=weight.dtype)
        self.values = torch.empty_like(self.keys)
        self.length = 0  #: tokens so far

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append those of T tokens, [B, kv_heads, T, head_size]: one token, or all of the prompt. Return all so far."""
        num_new = keys.shape[2]
        assert num_new == 1 or self.length == 0, "the causal mask of several tokens needs an empty cache"
        end = self.length + num_new
        self.keys[:, :, self.length : end] = keys
        self.values[:, :, self.length : end] = values
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]


def whole_decoder(weights: Mapping[str, Tensor], config: LmConfig) -> Decoder:
    """Return a model of its own with the weights of a run, in which those of LoRA are merged."""
    merged = {}
    for name, weight in weights.items():
        if not name.endswith(LORA_WEIGHTS):
            merged[name] = config.lora.merged(name, weight, weights)
    with torch.device("meta"):
        model = Decoder(config.model, len(merged[EMBEDDING]))
    model.load_state_dict(merged, assign=True)
    model.tie()
    return model


@torch.no_grad()
def generate(
    model: Decoder, prompt: Tensor, num_tokens: int, *, temperature: float = 0.0, top_k: int = 0, seed: int = 0
) -> Iterator[int]:
    """Yield the ids of the tokens that continue a prompt, one by one, computed with a cache of keys and values.

    Args:
        model: a whole model, not a sharded one.
        prompt: int64 [T], at least one token.
        num_tokens: number of tokens to generate.
        temperature: 0 takes the most probable token, larger values draw from more tokens.
        top_k: draw from the `top_k` most probable tokens only; 0: from all.
        seed: of the draws.
    """
    weight = next(model.parameters())
    generator = torch.Generator(weight.device).manual_seed(seed)
    length = len(prompt) + num_tokens
    caches = [KeyValues(model.config, 1, length, weight) for _ in model.model.layers]
    tokens = prompt.to(weight.device).unsqueeze(0)
    for _ in range(num_tokens):
        logits = model(tokens, caches)[0, -1].float()
        token = choose(logits, temperature, top_k, generator)
        tokens = token.view(1, 1)
        yield int(token)


def generate_tokens(
    model: Decoder, prompt: Sequence[int], num_tokens: int, *, temperature: float, top_k: int, seed: int
) -> Iterator[int]:
    """Yield what `generate` does, on the GPU if there is one; the model is moved there."""
    if torch.accelerator.is_available():
        model = model.to(torch.accelerator.current_accelerator())
    return generate(model, torch.tensor(prompt), num_tokens, temperature=temperature, top_k=top_k, seed=seed)


def choose(logits: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> Tensor:
    """Return the next token, int64 [], of logits [vocab_size]; see `generate`."""
    if temperature == 0:
        return logits.argmax()
    if 0 < top_k < len(logits):
        smallest = logits.topk(top_k).values[-1]
        logits = logits.masked_fill(logits < smallest, -math.inf)
    probabilities = (logits / temperature).softmax(-1)
    return torch.multinomial(probabilities, 1, generator=generator).squeeze()


def draw_normal(weight: Tensor, std: float, seed: int, name: str) -> None:
    """Fill a weight, whole or sharded, with normally distributed values that depend on (seed, name) and the index.

    Blocks of rows have generators of their own, so that a rank draws the blocks of its own rows only.
    """
    for target in targets_of(weight):
        end_row = target.offset[0] + len(target.tensor)
        for number in range(target.offset[0] // BLOCK_ROWS, math.ceil(end_row / BLOCK_ROWS)):
            first_row = number * BLOCK_ROWS
            num_rows = min(BLOCK_ROWS, weight.shape[0] - first_row)
            digest = hashlib.blake2b(f"{seed}/{name}/{number}".encode(), digest_size=8).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
            block = torch.empty(num_rows, *weight.shape[1:]).normal_(0.0, std, generator=generator)
            copy_overlap(block, (first_row, *[0] * (block.dim() - 1)), target)
