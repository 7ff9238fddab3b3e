"""A bidirectional transformer: pre-norm RMSNorm, rotary positions, SwiGLU, SDPA attention.

Legend: B sequences, L positions, D width, H heads of the queries, K of the keys and values, E the width of a head.
`attention_mask` [B, L] bool is False on padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, rms_norm, scaled_dot_product_attention, silu

from unmask.decoding.blocks import block_causal
from unmask.errors import UserError, require
from unmask.models.packing import Attend, Layout, Spans, stream_dtype

_RANGES = {
    "width": (1, 65_536),
    "layers": (1, 1_000),
    "heads": (1, 65_536),
    "intermediate": (1, 1_000_000),
    "max_length": (1, 2**24),
    "kv_heads": (0, 65_536),
    "head_width": (0, 65_536),
    "block_size": (0, 2**24),
}


@dataclass(frozen=True)
class BackboneConfig:
    """The shape of a trunk.  `absolute_positions` adds a learned vector per position.

    `kv_heads` < `heads` is grouped-query attention: H / K neighbouring queries share a key and a value.

    `rope_frequencies`, if given, are the E / 2 angles by which a position turns its pairs, in the place of
    rope_theta^(-2j/E), and `rope_scale` multiplies queries and keys: so are contexts stretched (YaRN and others).

    `block_size` > 0 makes it block-causal: a position sees its own block of the response and what came before
    (`decoding.blocks`).  Who calls it says what the response is; without a word, it is the whole sequence.

    Rotary positions alone cannot tell the positions of a canvas that is all mask apart: attention then averages
    identical values, whatever its weights.  With a prompt they can, if slowly; unconditional tasks want both.
    """

    width: int
    layers: int
    heads: int
    intermediate: int
    max_length: int = 2048
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    qk_norm: bool = False
    absolute_positions: bool = False
    kv_heads: int = 0  # K; 0: as many as heads
    head_width: int = 0  # E; 0: width / heads
    qkv_bias: bool = False  # of the projection to queries, keys and values
    rope_frequencies: tuple[float, ...] = ()
    rope_scale: float = 1.0
    block_size: int = 0  # 0: every position sees every other

    def __post_init__(self) -> None:
        for field, (low, high) in _RANGES.items():
            value = getattr(self, field)
            require(low <= value <= high, f"{field} must be between {low} and {high:,}, got {value}")
        if not self.head_width and self.width % (2 * self.heads):
            raise UserError(f"width {self.width} must be a multiple of 2 * heads = {2 * self.heads} (rotary pairs)")
        require(self.head_width % 2 == 0, f"head_width must be even (rotary pairs), got {self.head_width}")
        if self.kv_heads and self.heads % self.kv_heads:
            raise UserError(f"heads {self.heads} must be a multiple of kv_heads = {self.kv_heads}")
        given, half = len(self.rope_frequencies), self.E // 2
        require(given in (0, half), f"rope_frequencies must be {half} numbers, half of a head's width, got {given}")

    @property
    def E(self) -> int:
        return self.head_width or self.width // self.heads

    @property
    def K(self) -> int:
        return self.kv_heads or self.heads

    def num_weights(self, num_tokens: int = 0) -> int:
        """Of the matrices, which is nearly all: layers * (2 (H + K) E D + 3 D intermediate) + embeddings."""
        D, H, K, E = self.width, self.heads, self.K, self.E
        positions = self.max_length if self.absolute_positions else 0
        return self.layers * (2 * (H + K) * E * D + 3 * D * self.intermediate) + (num_tokens + positions) * D


# (layers, width, heads) by millions of parameters, embeddings not counted: sizes of the published family of SMDM
# (Nie et al. 2025, "Scaling up masked diffusion models on text"; the paper's model is 170m).
SIZES = {
    name: BackboneConfig(width, layers, heads, intermediate=4 * width)
    for name, (layers, width, heads) in {
        "6m": (6, 256, 4),
        "19m": (8, 384, 6),
        "34m": (8, 512, 8),
        "85m": (13, 640, 10),
        "113m": (12, 768, 12),
        "170m": (18, 768, 12),
        "336m": (20, 1024, 16),
        "1028m": (20, 1792, 14),
    }.items()
}


Rotary = tuple[Tensor, Tensor]


def rotary_angles(positions: Tensor, config: BackboneConfig) -> Rotary:
    """cos and signed sin of position * theta^(-2j/E) for j < E/2, each twice, as [B or 1, L, 1, 1, E] float32."""
    if config.rope_frequencies:
        frequencies = torch.tensor(config.rope_frequencies, device=positions.device, dtype=torch.float32)
    else:
        even = torch.arange(0, config.E, 2, device=positions.device, dtype=torch.float32)
        frequencies = config.rope_theta ** (-even / config.E)
    angles = positions[..., None].float() * frequencies
    cos, sin = angles.cos(), angles.sin()
    if config.rope_scale != 1:
        cos, sin = cos * config.rope_scale, sin * config.rope_scale
    return torch.cat([cos, cos], dim=-1)[:, :, None, None], torch.cat([-sin, sin], dim=-1)[:, :, None, None]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (x_j, x_{j + E/2}) of x [B, L, ..., H, E]: the partner, x rolled by E/2, comes with its sign."""
    return torch.addcmul(x * cos.to(x.dtype), x.roll(x.shape[-1] // 2, -1), sin.to(x.dtype))


def attended(query: Tensor, key: Tensor, value: Tensor, attend: Attend) -> Tensor:
    """Softmax attention [B, L, H, E] of queries, keys and values [B, L, H, E]; with spans, of [1, M, H, E]."""
    if not isinstance(attend, Spans):
        query, key, value = (states.transpose(1, 2) for states in (query, key, value))
        return scaled_dot_product_attention(query, key, value, attn_mask=attend).transpose(1, 2)
    if query.is_cuda and query.dtype.itemsize == 2:
        from torch.nn.attention.varlen import varlen_attn  # here, because older versions of torch have none

        (ends, longest), width = attend, query.shape[-1]
        query, key, value = pad_heads(query, key, value)
        packed: Tensor = varlen_attn(query[0], key[0], value[0], ends, ends, longest, longest)  # type: ignore[assignment]
        return packed[None, ..., :width]
    lengths = attend.ends.diff().tolist()
    split = (states.split(lengths, dim=1) for states in (query, key, value))
    mixed = [attended(q, k, v, None) for q, k, v in zip(*split, strict=True)]
    return torch.cat(mixed, dim=1) if mixed else value


def pad_heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same [..., E] with zeros behind, up to a multiple of 8: variable-length attention takes no other heads.

    The queries are scaled so that query . key / sqrt(E) is what it was.
    """
    width = query.shape[-1]
    spare = -width % 8
    if not spare:
        return query, key, value
    query = query * ((width + spare) / width) ** 0.5
    return pad(query, (0, spare)), pad(key, (0, spare)), pad(value, (0, spare))


class RMSNorm(nn.RMSNorm):
    """Of the stream's own dtype, whatever that of the weights: the fused kernels want one."""

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class Kept(NamedTuple):
    """Keys and values of one layer that outlive a pass: of b sequences of L places."""

    states: Tensor  # [2, b, L, K, E]
    rows: Tensor  # [r]: the sequences of this pass
    at: Tensor  # [r, W]: the places that it computes

    def exchange(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keep what was computed, [r, W, K, E] each; all that is known of these sequences, [r, L, K, E] each."""
        for states, new in zip(self.states, (key, value), strict=True):
            states[self.rows[:, None], self.at] = new
        return self.states[0][self.rows], self.states[1][self.rows]


class Block(nn.Module):
    """x + Attention(norm(x)), then x + SwiGLU(norm(x))."""

    def __init__(self, config: BackboneConfig) -> None:
        super().__init__()
        D, H, K, E = config.width, config.heads, config.K, config.E
        self.head_width = E
        self.groups = (H, K, K)  # the heads of queries, keys and values, in the order of the projection's rows
        self.attention_norm = RMSNorm(D, eps=config.norm_eps)
        self.query_key_value = nn.Linear(D, sum(self.groups) * E, bias=config.qkv_bias)
        self.attention_out = nn.Linear(H * E, D, bias=False)
        self.query_norm = RMSNorm(E, eps=config.norm_eps) if config.qk_norm else None
        self.key_norm = RMSNorm(E, eps=config.norm_eps) if config.qk_norm else None
        self.mlp_norm = RMSNorm(D, eps=config.norm_eps)
        self.gate_up = nn.Linear(D, 2 * config.intermediate, bias=False)
        self.down = nn.Linear(config.intermediate, D, bias=False)
        for read in (self.query_key_value, self.gate_up):
            nn.init.normal_(read.weight, std=small_init(D))
        for write in (self.attention_out, self.down):  # residual branches start small, or depth blows up the stream
            nn.init.normal_(write.weight, std=small_init(D) / (2 * config.layers) ** 0.5)

    def forward(
        self, x: Tensor, rotary: Rotary, attend: Attend, kept: Kept | None = None, finish: bool = True
    ) -> Tensor:
        B, L, _ = x.shape
        H, K, _ = self.groups
        qkv = self.query_key_value(self.attention_norm(x)).view(B, L, 1, sum(self.groups), self.head_width)
        query_key, value = qkv.split([H + K, K], dim=-2)  # whose backward is one concatenation
        value = value[:, :, 0]
        if self.query_norm is not None and self.key_norm is not None:
            query, key = query_key.split([H, K], dim=-2)
            query_key = torch.cat([self.query_norm(query), self.key_norm(key)], dim=-2)
        query, key = rotate(query_key, *rotary)[:, :, 0].split([H, K], dim=-2)
        if kept is not None:
            key, value = kept.exchange(key, value)
        if K < H:  # every kernel takes as many keys as queries, not every one fewer
            key, value = (states.repeat_interleave(H // K, dim=-2) for states in (key, value))
        mixed = attended(query, key, value, attend)
        x = x + self.attention_out(mixed.reshape(B, L, H * self.head_width))
        return self.finish(x) if finish else x

    def finish(self, x: Tensor) -> Tensor:
        """x + SwiGLU(norm(x)): of each position [..., D] alone."""
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self.down(silu(gate) * up)


class Backbone(nn.Module):
    """Tokens [B, L] to normalised hidden states [B, L, D].  `num_tokens` counts every id, the mask's included."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: BackboneConfig, num_tokens: int) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(num_tokens, config.width)
        self.positions = nn.Embedding(config.max_length, config.width) if config.absolute_positions else None
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.width, eps=config.norm_eps)
        everywhere = torch.arange(config.max_length)[None]
        cos, sin = rotary_angles(everywhere, config)
        self.register_buffer("cos", cos, persistent=False)  # [1, max_length, 1, 1, E]: a compiled pass that computed
        self.register_buffer("sin", sin, persistent=False)  # them would do so again in every block
        nn.init.normal_(self.embedding.weight, std=small_init(config.width))
        if self.positions is not None:
            nn.init.normal_(self.positions.weight, std=small_init(config.width))

    def forward(self, tokens: Tensor, attention_mask: Tensor | Layout | None = None, finish: bool = True) -> Tensor:
        """Without `finish`, what the method of that name makes hidden states of."""
        length = tokens.shape[1]
        if not isinstance(attention_mask, Layout):  # a copy of each position may be in it
            self._check_length(length)
        dtype = stream_dtype(self.embedding.weight)
        if self.config.block_size and (attention_mask is None or isinstance(attention_mask, Tensor)):
            attention_mask = self.in_blocks(tokens, attention_mask)
        layout = attention_mask if isinstance(attention_mask, Layout) else Layout.of(tokens, attention_mask, dtype)
        x = self.embedding(layout.take(tokens)).to(dtype)
        if self.positions is not None:
            x = x + self.positions(layout.positions).to(dtype)
        if layout.attend is None:
            cos, sin = self.cos[:, :length], self.sin[:, :length]
        else:
            cos, sin = self.cos[0][layout.positions], self.sin[0][layout.positions]
        if finish:
            return layout.put(self.run(x, cos, sin, layout.attend))
        return layout.put(self.through(x, (cos, sin), layout.attend, finish=False))

    def _check_length(self, length: int) -> None:
        longest = self.config.max_length
        if length > longest:
            raise UserError(
                f"a sequence of {length} tokens is longer than the model's context of {longest}: "
                "shorten it or train with a larger max_length"
            )

    def at(self, tokens: Tensor, positions: Tensor, attend: Tensor) -> Tensor:
        """As forward, of tokens at these positions [B, L], where i sees j if attend [B, L, L] bool holds at i, j."""
        dtype = stream_dtype(self.embedding.weight)
        x = self.embedding(tokens).to(dtype)
        if self.positions is not None:
            x = x + self.positions(positions).to(dtype)
        return self.run(x, self.cos[0][positions], self.sin[0][positions], attend[:, None])

    def in_blocks(self, tokens: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Who sees whom [B, L, L], where nobody says it: blocks from the first token on."""
        if attention_mask is not None and attention_mask.ndim == 3:
            return attention_mask
        attended = torch.ones_like(tokens, dtype=torch.bool) if attention_mask is None else attention_mask
        return block_causal((attended.long().cumsum(-1) - 1) // self.config.block_size, attended)

    def new_cache(self, rows: int, length: int) -> Tensor:
        """Room for the keys and values of `rows` sequences: [layers, 2, rows, length, K, E]."""
        self._check_length(length)
        weight, config = self.embedding.weight, self.config
        shape = (config.layers, 2, rows, length, config.K, config.E)
        return torch.zeros(shape, dtype=stream_dtype(weight), device=weight.device)

    def cached(
        self, tokens: Tensor, at: Tensor, sees: Tensor, cache: Tensor, rows: Tensor, finish: bool = True
    ) -> Tensor:
        """Hidden states [r, W, D] of tokens [r, W] at the places `at` [r, W] of the sequences `rows` [r] of a cache.

        sees [r, W, L]: the places that each one looks at.  The cache has the keys and values of all of these but those
        that are computed here, which it gets.  A place is a position: padding is on the right.
        """
        x = self.embedding(tokens).to(cache.dtype)
        if self.positions is not None:
            x = x + self.positions(at).to(cache.dtype)
        rotary = self.cos[0][at], self.sin[0][at]
        x = self.through(x, rotary, sees[:, None], [Kept(states, rows, at) for states in cache], finish)
        return self.norm(x) if finish else x

    def run(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """The blocks: all that is worth compiling."""
        return self.norm(self.through(x, (cos, sin), attend))

    def through(
        self, x: Tensor, rotary: Rotary, attend: Attend, kept: Sequence[Kept] | None = None, finish: bool = True
    ) -> Tensor:
        """The blocks; without `finish`, all but the MLP of the last."""
        last = len(self.blocks) - 1
        for layer, block in enumerate(self.blocks):
            x = block(x, rotary, attend, None if kept is None else kept[layer], finish or layer < last)
        return x

    def finish(self, x: Tensor) -> Tensor:
        """Hidden states [..., D] from a stream [..., D] that is not finished: the last MLP, and the norm.

        Each position is on its own, so that those that nobody reads can be left out.
        """
        return self.norm(cast(Block, self.blocks[-1]).finish(x))


def small_init(width: int) -> float:
    """Standard deviation sqrt(2 / (5 D)) of Nguyen and Salazar (2019): about 0.023 at width 768, 0.09 at width 48."""
    return (2 / (5 * width)) ** 0.5
