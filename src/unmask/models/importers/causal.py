"""A causal language model turned into a denoiser: its causal mask off, a mask token added, its vocabulary cut."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer

from unmask.models.importers.checkpoints import LLAMA, llama_shape, translated
from unmask.models.importers.pretrained import Causal
from unmask.models.importers.vocabulary import ids_in, rows, vocabulary_of
from unmask.models.order_model import OrderModel, OrderModelConfig, with_mask_token


def adapt_causal(
    causal: Causal, tokenizer: Tokenizer | None = None, *, shift: bool = True, max_length: int = 0
) -> OrderModel:
    """A model without an order whose denoiser has the weights of a Llama-shaped causal language model.

    tokenizer: the causal model's own or one cut from it (`cut_tokenizer`); None: its own.
    shift: read the token at n from the hidden state at n - 1, which is where a causal model predicts it.
    max_length: the longest sequence; 0: the causal model's.  A sliding window is the most (`llama_shape`).

    The mask token starts at the mean of the causal model's embeddings, and so does a token that has none there.
    """
    tokenizer = tokenizer or causal.tokenizer
    vocabulary = vocabulary_of(tokenizer)
    config = OrderModelConfig(
        vocab_size=len(vocabulary),
        denoiser=llama_shape(causal.model.config, max_length),
        tied_head=bool(causal.model.config.tie_word_embeddings),
        shift=shift,
    )
    ids = ids_in(causal.tokenizer, vocabulary)
    with torch.random.fork_rng():  # the weights of a new network are drawn from torch's global state
        model = OrderModel(config, with_mask_token(tokenizer))
    theirs = {name: tensor.detach() for name, tensor in causal.model.state_dict().items()}
    weights = translated(
        theirs, model.denoiser.state_dict(), LLAMA, "only a Llama-shaped model can be read, and this one"
    )
    embedding = weights["backbone.embedding.weight"]
    weights["backbone.embedding.weight"] = torch.cat([rows(embedding, ids), embedding.mean(0, keepdim=True)])
    if not config.tied_head:
        weights["head.weight"] = rows(weights["head.weight"], ids)
    model.denoiser.load_state_dict(weights)
    return model.eval()
