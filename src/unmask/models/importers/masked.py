"""Denoisers of other people: masked language models of transformers, and any function that gives logits."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import Tensor, nn

from unmask import files
from unmask.display import say
from unmask.errors import UserError, require
from unmask.jsonl import parse_json
from unmask.models.frozen import FrozenDenoiser
from unmask.models.importers.checkpoints import LLAMA_SHAPED, load_checkpoint
from unmask.models.importers.pretrained import Source, check_keys, check_room, read_by_transformers
from unmask.models.importers.vocabulary import check_ids
from unmask.models.networks import Denoiser, without_mask
from unmask.models.order_model import OrderModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# The layers from the last hidden state to the logits, by model_type.  Others are projected everywhere.
HEADS = {
    "bert": ("cls",),
    "camembert": ("lm_head",),
    "distilbert": ("vocab_transform", "activation", "vocab_layer_norm", "vocab_projector"),
    "modernbert": ("head", "decoder"),
    "roberta": ("lm_head",),
    "xlm-roberta": ("lm_head",),
}
# Weights beside a masked language model: the heads of BERT's other objectives, and a table of old versions.
_BESIDE = re.compile(r"(^|\.)(pooler|seq_relationship|position_ids)(\.|$)")
_TOKENIZERS = ("tokenizer.json", "vocab.txt", "vocab.json", "sentencepiece.bpe.model")


class LoadedDenoiser(Protocol):
    """A denoiser for `generate`, and what is known about it; None: not known."""

    eos_token_id: int | None
    tokenizer: Any  # of transformers, or of tokenizers for a run of unmask

    @property
    def mask_token_id(self) -> int: ...

    @property
    def context_length(self) -> int | None: ...

    def hidden(self, tokens: Tensor, attention_mask: Tensor | None = None) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...


def load_denoiser(
    source: Any,
    *,
    mask_token_id: int | None = None,
    tokenizer: Any = None,
    bidirectional: bool = False,
    shift: bool = False,
) -> LoadedDenoiser:
    """A denoiser for `generate`, in eval mode.

    source: a run folder of unmask; a masked language model of transformers (`AutoModelForMaskedLM`), as a folder or
        loaded; a folder of LLaDA, Dream, or a causal model (Llama, Mistral, Qwen2, Qwen3); or any module or function
        that gives logits [B, L, V] from tokens [B, L] and attention_mask [B, L] bool (False on padding, which is on the
        right; None: no padding).
    mask_token_id: needed where neither the folder nor the tokenizer says it.
    tokenizer: of transformers; for a folder, the one in it by default.
    bidirectional: take the causal mask off a causal model, which should have been trained so.
    shift: of such a model: read the token at n from the hidden state at n - 1.  Its folder does not say; one trained as
        a denoiser fills in the mask where it stands, unless it kept the habit of a causal model (Dream, always).

        model = BertForMaskedLM.from_pretrained("my-bert")
        denoiser = unmask.load_denoiser(model, tokenizer=AutoTokenizer.from_pretrained("my-bert"))
        denoiser = unmask.load_denoiser(lambda tokens, mask: my_network(tokens, mask), mask_token_id=103)
    """
    if isinstance(source, str | Path):
        folder = Path(source).expanduser()
        values, place = _config_of(folder), Source(str(source), folder, None)
        if files.is_ours(folder) or "format_version" in values:
            source = OrderModel.from_pretrained(folder)
        elif "model_type" not in values:
            raise UserError(
                f"{folder} holds no model: give the folder of a finished run of `unmask train`, or one that "
                "transformers saved"
            )
        else:
            kind = values["model_type"]
            if kind in LLAMA_SHAPED and not bidirectional:
                raise UserError(
                    f"{folder} is a causal model ({kind}), in which no position sees the later ones: give "
                    "bidirectional=True (in a recipe model.bidirectional) if it was trained as a denoiser, else start "
                    "from it with unmask.adapt_causal"
                )
            if tokenizer is None and any((folder / name).is_file() for name in _TOKENIZERS):
                # Without a file it would make one up.  Dream's own class is Qwen2's.
                tokenizer = read_by_transformers(place, "Qwen2Tokenizer" if kind == "Dream" else "AutoTokenizer")
            ours = kind in ("llada", "Dream", *LLAMA_SHAPED)
            # Else the tokenizer knows better: XLM's config has 0, whatever its mask token.
            if mask_token_id is None and (ours or getattr(tokenizer, "mask_token_id", None) is None):
                mask_token_id = values.get("mask_token_id")
            if ours:
                return load_checkpoint(place, values, _mask_id(mask_token_id, tokenizer), tokenizer, shift=shift)
            source = _read_masked(place)
    if isinstance(source, OrderModel) and isinstance(source.denoiser, FrozenDenoiser):
        found: LoadedDenoiser = source.denoiser.network
        return found
    if isinstance(source, OrderModel):
        source.denoiser.tokenizer = source.tokenizer
        source = source.denoiser
    if isinstance(source, Denoiser):
        return source
    if not callable(source):
        raise UserError(f"a denoiser is loaded from a folder, a module or a function, got {type(source).__name__}")
    if "transformers" in sys.modules:  # else it cannot be one of its models
        from transformers import PreTrainedModel

        if isinstance(source, PreTrainedModel):
            return MaskedLanguageModel(source, _mask_id(mask_token_id, tokenizer), tokenizer)
    return LogitsDenoiser(source, _mask_id(mask_token_id, tokenizer), tokenizer)


class LogitsDenoiser(nn.Module):
    """A function from tokens and attention mask to logits [B, L, V], which stand for the hidden states too."""

    context_length = None

    def __init__(self, function: Callable[..., Any], mask_token_id: int, tokenizer: Any = None) -> None:
        super().__init__()
        self.function, self.mask_token_id, self.tokenizer = function, mask_token_id, tokenizer
        self.eos_token_id = _eos_id(tokenizer)
        self.eval()

    def hidden(self, tokens: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        logits = self.function(tokens, attention_mask)
        if not torch.is_tensor(logits) or logits.shape[:-1] != tokens.shape:
            found = list(logits.shape) if torch.is_tensor(logits) else type(logits).__name__
            raise UserError(f"the function must give logits [B, L, V] for tokens {list(tokens.shape)}, got {found}")
        return logits

    def logits(self, hidden: Tensor) -> Tensor:
        return without_mask(hidden, self.mask_token_id)


class MaskedLanguageModel(nn.Module):
    """A masked language model of transformers.

    Positions are given to it: they do not count padding, so a sequence gets the same ones alone as next to longer ones,
    padded on either side.  All tokens are of segment 0.
    """

    def __init__(self, model: PreTrainedModel, mask_token_id: int, tokenizer: Any = None) -> None:
        super().__init__()
        _check_masked(model)
        config, table = model.config, cast(nn.Embedding, model.get_input_embeddings())
        self.model, self.mask_token_id, self.tokenizer = model.eval(), mask_token_id, tokenizer
        self.eos_token_id, self.vocab_size = _eos_id(tokenizer), table.num_embeddings
        check_ids(mask_token_id, tokenizer, self.vocab_size)
        self.head = HEADS.get(config.model_type, ())
        known = inspect.signature(model.forward).parameters
        require(
            {"attention_mask", "position_ids"} <= set(known),
            f"{type(model).__name__} takes no position_ids, so padding would change what it says: give a function of "
            "(tokens, attention_mask) instead, and prompts of one length",
        )
        self.has_segments = "token_type_ids" in known
        # RoBERTa and its family count positions from padding_idx + 1 on.
        positions = getattr(getattr(model.base_model, "embeddings", None), "position_embeddings", None)
        padding = getattr(positions, "padding_idx", None)
        self.first_position = 0 if padding is None else padding + 1
        self.context_length: int | None = None
        if longest := getattr(config, "max_position_embeddings", None):
            self.context_length = longest - self.first_position

    def hidden(self, tokens: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """[B, L, D]; the logits [B, L, V] where the head is not known apart."""
        length = tokens.shape[1]
        if self.context_length is not None and length > self.context_length:
            raise UserError(
                f"a sequence of {length} tokens is longer than the model's context of {self.context_length}: shorten it"
            )
        attended = torch.ones_like(tokens) if attention_mask is None else attention_mask.long()
        options = {"position_ids": (attended.cumsum(-1) - 1).clamp(min=0) + self.first_position}
        if self.has_segments:
            options["token_type_ids"] = torch.zeros_like(tokens)
        network = self.model.base_model if self.head else self.model
        states: Tensor = network(tokens, attention_mask=attention_mask, return_dict=True, **options)[0]
        return states

    def logits(self, hidden: Tensor) -> Tensor:
        for name in self.head:
            hidden = getattr(self.model, name)(hidden)
        return without_mask(hidden, self.mask_token_id)


def _mask_id(given: int | None, tokenizer: Any) -> int:
    if given is not None:
        return given
    require(tokenizer is not None, "nothing says which token is the mask: give mask_token_id=, or tokenizer=")
    found: int | None = getattr(tokenizer, "mask_token_id", None)
    if found is None:
        raise UserError(
            "the tokenizer has no mask token: give mask_token_id= (in a folder: in config.json), or add one with "
            "tokenizer.add_special_tokens({'mask_token': '[MASK]'}), model.resize_token_embeddings(len(tokenizer)), "
            "and train it"
        )
    return found


def _eos_id(tokenizer: Any) -> int | None:
    """The end of a text; BERT's is its separator."""
    eos: int | None = getattr(tokenizer, "eos_token_id", None)
    return getattr(tokenizer, "sep_token_id", None) if eos is None else eos


def _config_of(folder: Path) -> dict[str, Any]:
    """The config.json of a folder; empty where there is none."""
    try:
        values = parse_json((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def _read_masked(source: Source) -> PreTrainedModel:
    config = read_by_transformers(source, "AutoConfig")
    from transformers import MODEL_FOR_MASKED_LM_MAPPING

    if type(config) not in MODEL_FOR_MASKED_LM_MAPPING:
        raise UserError(_no_masked(f"{source.name}, a {config.model_type},"))
    check_room(source, torch.float32)
    say(f"reading {source.name}", err=True)
    model, found = read_by_transformers(
        source,
        "AutoModelForMaskedLM",
        dtype=torch.float32,
        config=config,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # which are refused here, in one line
    )
    surplus = (key for key in found["unexpected_keys"] if not _BESIDE.search(key))
    check_keys(f"the checkpoint of {source.name}", found["missing_keys"], surplus)
    for name, theirs, ours in sorted(found["mismatched_keys"]):
        raise UserError(f"{source.name} does not fit its config.json: {name} is {list(theirs)}, not {list(ours)}")
    return model


def _check_masked(model: PreTrainedModel) -> None:
    from transformers import MODEL_FOR_MASKED_LM_MAPPING

    kind, classes = type(model.config), cast(dict[type, type], MODEL_FOR_MASKED_LM_MAPPING)
    if kind not in classes or not isinstance(model, classes[kind]) or getattr(model.config, "is_decoder", False):
        raise UserError(_no_masked(type(model).__name__))


def _no_masked(name: str) -> str:
    return (
        f"{name} is no masked language model: load one with AutoModelForMaskedLM and is_decoder=False, start from a "
        "causal one with unmask.adapt_causal, give the folder of one that was trained as a denoiser with "
        "bidirectional=True, or give a function of (tokens, attention_mask)"
    )
