"""A causal language model turned into a denoiser: its causal mask off, a mask token added, its vocabulary cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from unmask.errors import UserError
from unmask.models.backbone import BackboneConfig
from unmask.models.importers.pretrained import Causal
from unmask.models.importers.vocabulary import ids_in, rows, vocabulary_of
from unmask.models.order_model import OrderModel, OrderModelConfig, with_mask_token

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Pre-norm RMSNorm, rotary pairs (x_j, x_{j + E/2}), SwiGLU, grouped queries; Qwen3 also normalises queries and keys.
LLAMA_SHAPED = ("llama", "qwen3")


def adapt_causal(
    causal: Causal, tokenizer: Tokenizer | None = None, *, shift: bool = True, max_length: int = 0
) -> OrderModel:
    """A model without an order whose denoiser has the weights of a Llama-shaped causal language model.

    tokenizer: the causal model's own or one cut from it (`cut_tokenizer`); None: its own.
    shift: read the token at n from the hidden state at n - 1, which is where a causal model predicts it.
    max_length: the longest sequence; 0: the causal model's.

    The mask token starts at the mean of the causal model's embeddings, and so does a token that has none there.
    """
    tokenizer = tokenizer or causal.tokenizer
    vocabulary = vocabulary_of(tokenizer)
    config = OrderModelConfig(
        vocab_size=len(vocabulary),
        denoiser=backbone_config(causal.model.config, max_length),
        tied_head=bool(causal.model.config.tie_word_embeddings),
        shift=shift,
    )
    weights = _translated(causal.model, config, ids_in(causal.tokenizer, vocabulary))
    with torch.random.fork_rng():  # the weights of a new network are drawn from torch's global state
        model = OrderModel(config, with_mask_token(tokenizer))
    model.denoiser.load_state_dict(weights)
    return model.eval()


def backbone_config(config: Any, max_length: int = 0) -> BackboneConfig:
    """Our shape of a Llama-shaped transformers config; a UserError where it is another."""
    rope = config.rope_parameters if config.model_type in LLAMA_SHAPED else {}
    for what, found, wanted in (
        ("model_type", config.model_type, LLAMA_SHAPED),
        ("hidden_act", getattr(config, "hidden_act", None), ("silu",)),
        ("rope_type", rope.get("rope_type", "default"), ("default",)),
        ("partial_rotary_factor", rope.get("partial_rotary_factor", 1.0), (1.0,)),
    ):
        if found not in wanted:
            raise UserError(
                f"only a Llama-shaped model can be adapted, and this one has {what} {found!r}, not "
                f"{' or '.join(map(repr, wanted))}"
            )
    own = config.hidden_size // config.num_attention_heads
    head_width = getattr(config, "head_dim", None) or own
    return BackboneConfig(
        width=config.hidden_size,
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        intermediate=config.intermediate_size,
        max_length=max_length or config.max_position_embeddings,
        rope_theta=float(rope["rope_theta"]),
        norm_eps=float(config.rms_norm_eps),
        qk_norm=config.model_type == "qwen3",
        kv_heads=config.num_key_value_heads,
        head_width=0 if head_width == own else head_width,
    )


def _translated(model: PreTrainedModel, config: OrderModelConfig, ids: Sequence[int | None]) -> dict[str, Tensor]:
    """The weights of the denoiser by our names; `ids` are the rows of the causal model's vocabulary."""
    assert isinstance(config.denoiser, BackboneConfig)
    theirs = {name: tensor.detach() for name, tensor in model.state_dict().items()}

    def take(*names: str) -> Tensor:
        """One weight, or several one below the other."""
        try:
            return torch.cat([theirs.pop(f"{name}.weight") for name in names])
        except KeyError as error:
            raise UserError(f"only a Llama-shaped model can be adapted, and this one has no {error}") from None

    embedding = take("model.embed_tokens")
    ours = {
        "backbone.embedding.weight": torch.cat([rows(embedding, ids), embedding.mean(0, keepdim=True)]),
        "backbone.norm.weight": take("model.norm"),
    }
    head = theirs.pop("lm_head.weight", embedding)
    if not config.tied_head:
        ours["head.weight"] = rows(head, ids)
    for layer in range(config.denoiser.layers):
        there, here = f"model.layers.{layer}", f"backbone.blocks.{layer}"
        attention, mlp = f"{there}.self_attn", f"{there}.mlp"
        ours[f"{here}.attention_norm.weight"] = take(f"{there}.input_layernorm")
        ours[f"{here}.query_key_value.weight"] = take(*(f"{attention}.{x}_proj" for x in "qkv"))
        ours[f"{here}.attention_out.weight"] = take(f"{attention}.o_proj")
        if config.denoiser.qk_norm:
            ours[f"{here}.query_norm.weight"] = take(f"{attention}.q_norm")
            ours[f"{here}.key_norm.weight"] = take(f"{attention}.k_norm")
        ours[f"{here}.mlp_norm.weight"] = take(f"{there}.post_attention_layernorm")
        ours[f"{here}.gate_up.weight"] = take(f"{mlp}.gate_proj", f"{mlp}.up_proj")
        ours[f"{here}.down.weight"] = take(f"{mlp}.down_proj")
    if theirs:  # biases, for instance
        raise UserError(
            f"only a Llama-shaped model can be adapted, and this one has weights that have no place: {min(theirs)}"
        )
    return ours
