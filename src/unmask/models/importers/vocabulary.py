"""The vocabulary of a tokenizer, cut to the tokens that some texts use."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from tokenizers import Tokenizer, pre_tokenizers
from torch import Tensor

from unmask.errors import UserError


def vocabulary_of(tokenizer: Tokenizer) -> tuple[str, ...]:
    """The tokens in the order of their ids; a UserError where these are not 0, 1, 2 and so on."""
    ids = tokenizer.get_vocab()
    ordered = tuple(sorted(ids, key=ids.__getitem__))
    if ordered and ids[ordered[-1]] != len(ordered) - 1:
        raise UserError(
            f"the {len(ordered)} tokens of the tokenizer have ids up to {ids[ordered[-1]]}, with gaps: cut it to the "
            "tokens of your texts (cut_tokenizer), which closes them"
        )
    return ordered


def cut_tokenizer(tokenizer: Tokenizer, texts: Iterable[str], first: Sequence[str] = ()) -> Tokenizer:
    """The same byte-pair encoding with the tokens that `texts` use; these are split as before, and any text comes back.

    Kept are the tokens of the texts, all that these are merged from, the special ones and a token for every byte; of
    the merges, those between kept tokens.  Splitting applies the earliest merge that is possible: on these texts it is
    always a kept one, so nothing changes for them, while the rare words of other texts fall into smaller pieces.

    The ids are new: `first`, then the kept tokens in their old order, then bytes that the tokenizer did not have.
    """
    state: dict[str, Any] = json.loads(tokenizer.to_str())
    model = state["model"]
    if model["type"] != "BPE" or model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        raise UserError(f"only a plain byte-pair encoding can be cut, and this tokenizer is a {model['type']}")
    state |= {"post_processor": None, "truncation": None, "padding": None}  # a text's tokens, and nothing around them
    plain = Tokenizer.from_str(json.dumps(state))
    old = tokenizer.get_vocab()
    if missing := [token for token in first if token not in old]:
        raise UserError(f"the tokenizer has no token {missing[0]!r}")

    parts: dict[str, list[tuple[str, str]]] = {}  # of a token: the pairs that are merged into it
    for left, right in model["merges"]:
        parts.setdefault(left + right, []).append((left, right))

    texts, used = list(texts), set[int]()
    for start in range(0, len(texts), 4096):  # a few at a time: an encoding is many times as large as its text
        for encoding in plain.encode_batch_fast(texts[start : start + 4096]):
            used.update(encoding.ids)
    words = {index: token for token, index in old.items()}
    wanted = [*(words[index] for index in used), *first, *bytes_of(state)]
    wanted += [token["content"] for token in state["added_tokens"]]
    wanted += [model["unk_token"]] if model.get("unk_token") else []
    kept: set[str] = set()
    while wanted:
        token = wanted.pop()
        if token not in kept:
            kept.add(token)
            wanted += [part for pair in parts.get(token, ()) for part in pair]

    ordered = [*first, *sorted(kept - set(first), key=lambda token: (old.get(token, math.inf), token))]
    new = {token: index for index, token in enumerate(ordered)}
    model["vocab"] = {token: index for token, index in new.items() if token in model["vocab"] or token not in old}
    model["merges"] = [merge for merge in model["merges"] if "".join(merge) in kept]  # and then so are its parts
    for token in state["added_tokens"]:
        token["id"] = new[token["content"]]
    state["added_tokens"].sort(key=lambda token: token["id"])
    return Tokenizer.from_str(json.dumps(state))


def bytes_of(state: dict[str, Any]) -> list[str]:
    """The 256 tokens of a tokenizer.json that stand for single bytes: of byte-level encodings, or <0x00> to <0xFF>.

    Behind a byte-level split there is nothing to fall back from, though the model may say byte_fallback: so
    transformers 5.17 reads GGUF files.
    """
    byte_level = '"ByteLevel"' in json.dumps(state["pre_tokenizer"])
    if state["model"].get("byte_fallback") and not byte_level:
        return [f"<0x{byte:02X}>" for byte in range(256)]
    return sorted(pre_tokenizers.ByteLevel.alphabet())


def ids_in(tokenizer: Tokenizer, vocabulary: Sequence[str]) -> list[int | None]:
    """The id that each token of `vocabulary` has in `tokenizer`; None for a byte that it does not have.

    A UserError where another token is missing: the vocabulary is not one of this tokenizer.
    """
    ids = tokenizer.get_vocab()
    single = set(bytes_of(json.loads(tokenizer.to_str())))
    if missing := [token for token in vocabulary if token not in ids and token not in single]:
        raise UserError(
            f"{len(missing)} tokens, such as {missing[0]!r}, are not tokens of the pretrained tokenizer: "
            "set task.tokenizer to the pretrained model"
        )
    return [ids.get(token) for token in vocabulary]


def check_ids(mask_token_id: int, tokenizer: Any, vocab_size: int) -> None:
    """UserError where the mask token or another of the tokenizer's (of transformers, or None) is not one of the V."""
    largest = max(mask_token_id, len(tokenizer) - 1 if hasattr(tokenizer, "__len__") else 0)
    if mask_token_id < 0 or largest >= vocab_size:
        raise UserError(
            f"the tokens have ids up to {largest}, the model knows {vocab_size}: give the tokenizer that it was "
            "trained with, or model.resize_token_embeddings(len(tokenizer)) and train the new ones"
        )


def rows(table: Tensor, ids: Sequence[int | None]) -> Tensor:
    """The rows of a vocabulary's table; their mean for a token that has none."""
    known = torch.tensor([len(table) if index is None else min(index, len(table)) for index in ids])
    return torch.cat([table, table.mean(0, keepdim=True)])[known]
