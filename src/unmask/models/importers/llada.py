"""Checkpoints of LLaDA (Nie et al. 2025, github.com/ML-GSAI/LLaDA) on our backbone, without the code that they bring.

    model.transformer.wte.weight                            [V, D]; the mask token is one of the V
    model.transformer.blocks.I.attn_norm.weight             [D]
    model.transformer.blocks.I.{q,k,v}_proj.weight          [H E, D], [K E, D], [K E, D]
    model.transformer.blocks.I.attn_out.weight              [D, H E]
    model.transformer.blocks.I.ff_norm.weight               [D]
    model.transformer.blocks.I.{ff_proj,up_proj}.weight     gate and up [intermediate, D]
    model.transformer.blocks.I.ff_out.weight                down [D, intermediate]
    model.transformer.ln_f.weight                           [D]
    model.transformer.ff_out.weight                         [V, D]; not there with weight_tying

Rotary pairs are (x_j, x_{j + E/2}), as here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from unmask.display import say
from unmask.errors import UserError, require
from unmask.models.backbone import Backbone, BackboneConfig, rotary_angles
from unmask.models.importers.pretrained import first_ten
from unmask.models.networks import without_mask
from unmask.models.packing import Layout
from unmask.runtime import available_memory

# What our backbone computes.  Biases and norms of queries and keys show as weights that have no place.
_WANTED = {
    "block_type": "llama",
    "activation_type": "silu",
    "layer_norm_type": "rms",
    "rope": True,
    "alibi": False,
    "input_emb_norm": False,
    "scale_logits": False,
}


class LLaDA(nn.Module):
    """A denoiser whose mask token is one of its V tokens."""

    keeps_no_tensors = True

    def __init__(self, shape: BackboneConfig, vocab_size: int, tied_head: bool, mask_token_id: int) -> None:
        super().__init__()
        self.vocab_size, self.mask_token_id, self.context_length = vocab_size, mask_token_id, shape.max_length
        self.eos_token_id: int | None = None
        self.tokenizer: Any = None
        self.backbone = Backbone(shape, vocab_size)
        self.head = None if tied_head else nn.Linear(shape.width, vocab_size, bias=False)

    def hidden(self, tokens: Tensor, attention_mask: Tensor | Layout | None = None) -> Tensor:
        hidden: Tensor = self.backbone(tokens, attention_mask)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        weight = self.backbone.embedding.weight if self.head is None else self.head.weight
        return without_mask(hidden @ weight.T, self.mask_token_id)


def load_llada(folder: Path, config: dict[str, Any], mask_token_id: int | None = None, tokenizer: Any = None) -> LLaDA:
    """The model of a folder in the precision of its files; `config` is its config.json."""
    for key, wanted in _WANTED.items():
        if config.get(key, wanted) != wanted:
            raise UserError(f"{folder} cannot be read: its config.json has {key} {config[key]!r}, not {wanted!r}")
    try:
        heads = config["n_heads"]
        shape = BackboneConfig(
            width=config["d_model"],
            layers=config["n_layers"],
            heads=heads,
            intermediate=config["mlp_hidden_size"],
            max_length=config["max_sequence_length"],
            rope_theta=float(config["rope_theta"]),
            norm_eps=float(config["rms_norm_eps"]),
            kv_heads=config.get("n_kv_heads") or heads,
        )
        size, mask = config["embedding_size"], config["mask_token_id"] if mask_token_id is None else mask_token_id
        tied = bool(config["weight_tying"])
    except KeyError as error:
        raise UserError(f"{folder} cannot be read: its config.json does not say {error}") from None
    require(0 <= mask < size, f"mask_token_id {mask} is not one of the {size} tokens of {folder}")
    weights = _translated(_read(folder), shape, tied, folder)
    with torch.device("meta"):  # no weights are drawn, which takes minutes for 8B
        model = LLaDA(shape, size, tied, mask)
    for name, empty in model.state_dict().items():
        if weights[name].shape != empty.shape:
            raise UserError(
                f"{folder} does not fit its config.json: {name} is {list(weights[name].shape)}, not {list(empty.shape)}"
            )
    model.load_state_dict(weights, assign=True)
    angles = rotary_angles(torch.arange(shape.max_length)[None], shape.E, shape.rope_theta)
    model.backbone.cos, model.backbone.sin = angles
    model.eos_token_id, model.tokenizer = config.get("eos_token_id"), tokenizer
    return model.eval()


def _read(folder: Path) -> dict[str, Tensor]:
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise UserError(f"{folder} has no weights: *.safetensors")
    needed, available = sum(path.stat().st_size for path in paths), available_memory()
    if needed > available:
        raise MemoryError(
            f"the weights of {folder} take {needed / 1e9:,.1f} GB of memory, of which {available / 1e9:,.1f} GB are "
            "available: take a smaller model, or free some memory"
        )
    say(f"reading {folder}", err=True)
    theirs: dict[str, Tensor] = {}
    for path in paths:
        try:
            theirs |= load_file(path)
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path} is no safetensors file: {error}") from None
    return theirs


def _translated(theirs: dict[str, Tensor], shape: BackboneConfig, tied: bool, folder: Path) -> dict[str, Tensor]:
    """The weights by our names."""
    missing: list[str] = []

    def take(*names: str) -> Tensor:
        """One weight, or several one below the other."""
        keys = [f"model.transformer.{name}.weight" for name in names]
        absent = [key for key in keys if key not in theirs]
        missing.extend(absent)
        found = [theirs.pop(key) for key in keys if key not in absent]
        return torch.empty(0) if absent else found[0] if len(found) == 1 else torch.cat(found)

    ours = {"backbone.embedding.weight": take("wte"), "backbone.norm.weight": take("ln_f")}
    if not tied:
        ours["head.weight"] = take("ff_out")
    for layer in range(shape.layers):
        there, here = f"blocks.{layer}", f"backbone.blocks.{layer}"
        ours[f"{here}.attention_norm.weight"] = take(f"{there}.attn_norm")
        ours[f"{here}.query_key_value.weight"] = take(*(f"{there}.{x}_proj" for x in "qkv"))
        ours[f"{here}.attention_out.weight"] = take(f"{there}.attn_out")
        ours[f"{here}.mlp_norm.weight"] = take(f"{there}.ff_norm")
        ours[f"{here}.gate_up.weight"] = take(f"{there}.ff_proj", f"{there}.up_proj")
        ours[f"{here}.down.weight"] = take(f"{there}.ff_out")
    for keys, what in ((missing, "lacks"), (list(theirs), "does not fit its config.json: it has also")):
        if keys:
            raise UserError(f"the checkpoint of {folder} {what} {len(keys)} weights: {first_ten(keys)}")
    return ours
