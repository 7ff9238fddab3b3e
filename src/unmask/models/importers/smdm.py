"""Checkpoints of SMDM (Nie et al. 2025, github.com/ML-GSAI/SMDM): masked diffusion models in the form of lit-gpt.

The embedding [V + 1, D] has a row more than the head [V, D]: the last is that of the mask token.

Rotary pairs are (x_j, x_{j + E/2}), as here.  SMDM rounds their cosines and sines to bfloat16; here they are float32.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from unmask.errors import UserError
from unmask.models.backbone import BackboneConfig
from unmask.models.importers.checkpoints import translated
from unmask.models.importers.vocabulary import ids_in, rows, vocabulary_of
from unmask.models.order_model import OrderModel, OrderModelConfig, with_mask_token

SMDM = {
    "embedding": ("transformer.wte",),
    "attention_norm": ("transformer.h.I.norm_1",),
    "query_key_value": ("transformer.h.I.attn.attn",),
    "attention_out": ("transformer.h.I.attn.proj",),
    "mlp_norm": ("transformer.h.I.norm_2",),
    "gate_up": ("transformer.h.I.mlp.swiglu.w1", "transformer.h.I.mlp.swiglu.w2"),
    "down": ("transformer.h.I.mlp.swiglu.w3",),
    "norm": ("transformer.ln_f",),
    "head": ("lm_head",),
}


def load_smdm(
    path: str | Path, shape: BackboneConfig, whole: Tokenizer, tokenizer: Tokenizer | None = None
) -> OrderModel:
    """A model without an order whose denoiser has the weights of an SMDM .safetensors file.

    shape: of the same size, such as SIZES["170m"]; the number of heads is not in the file.
    whole: the tokenizer that it was trained with (TinyLlama's), which is not in the file either.
    tokenizer: `whole`, or one cut from it (`cut_tokenizer`); None: `whole`.
    """
    tokenizer = tokenizer or whole
    vocabulary = vocabulary_of(tokenizer)
    config = OrderModelConfig(len(vocabulary), shape)
    with torch.random.fork_rng():  # the weights of a new network are drawn from torch's global state
        model = OrderModel(config, with_mask_token(tokenizer))
    try:
        theirs = {name: tensor.float() for name, tensor in load_file(path).items()}
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is no safetensors file: {error}") from None
    empty = model.denoiser.state_dict()
    weights = _translated(theirs, empty, shape, ids_in(whole, vocabulary), path)
    for name, wanted in empty.items():
        if weights[name].shape != wanted.shape:
            raise UserError(
                f"{path} is of another size: its {name} is {list(weights[name].shape)}, and of the model given "
                f"{list(wanted.shape)}: set model.size to the one in the file's name"
            )
    model.denoiser.load_state_dict(weights)
    return model.eval()


def _translated(
    theirs: dict[str, Tensor], wanted: Iterable[str], shape: BackboneConfig, ids: list[int | None], path: str | Path
) -> dict[str, Tensor]:
    """The weights of the denoiser by our names; `ids` are the rows of the vocabulary."""
    ours = translated(theirs, wanted, SMDM, f"{path} is no SMDM checkpoint of {shape.layers} layers: it")
    embedding, head = ours["backbone.embedding.weight"], ours["head.weight"]
    if len(embedding) != len(head) + 1:
        raise UserError(f"{path} has no embedding of the mask token: {len(embedding)} of {len(head)} tokens")
    if max(index or 0 for index in ids) >= len(head):
        raise UserError(f"{path} has {len(head)} tokens, fewer than its tokenizer: give the one it was trained with")
    ours["backbone.embedding.weight"] = torch.cat([rows(embedding[:-1], ids), embedding[-1:]])
    ours["head.weight"] = rows(head, ids)
    return {name: _by_kind(x, shape) if "query_key_value" in name else x for name, x in ours.items()}


def _by_kind(weight: Tensor, shape: BackboneConfig) -> Tensor:
    """All queries, then all keys, then all values, from groups of H / K queries, a key and a value."""
    H, K, E = shape.heads, shape.K, shape.E
    if len(weight) != (H + 2 * K) * E:
        return weight  # of another size, which the caller will say
    parts = weight.view(K, H // K + 2, E, -1).split([H // K, 1, 1], dim=1)
    return torch.cat([part.reshape(-1, weight.shape[-1]) for part in parts])
