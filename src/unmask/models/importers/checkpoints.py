"""Folders of other people's transformers on our backbone, without the code that they bring: one key map per family.

    llada                           LLaDA (Nie et al. 2025, github.com/ML-GSAI/LLaDA)
    Dream                           Dream (Ye et al. 2025, github.com/DreamLM/Dream): Qwen2's shape and names; the token
                                    at n is read from the hidden state at n - 1
    llama, mistral, qwen2, qwen3    causal models of transformers; here every position sees every other

Rotary pairs are (x_j, x_{j + E/2}) in all of them, as here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from unmask.display import say
from unmask.errors import UserError, prefixed
from unmask.models.backbone import BackboneConfig, rotary_angles
from unmask.models.importers.pretrained import Source, check_keys, check_room, reading
from unmask.models.importers.vocabulary import check_ids
from unmask.models.networks import Denoiser

# By our name of a layer: theirs, several one below the other, without `.weight` and `.bias`.  I is the block's number.
LLADA = {
    "embedding": ("model.transformer.wte",),
    "attention_norm": ("model.transformer.blocks.I.attn_norm",),
    "query_key_value": tuple(f"model.transformer.blocks.I.{x}_proj" for x in "qkv"),
    "attention_out": ("model.transformer.blocks.I.attn_out",),
    "mlp_norm": ("model.transformer.blocks.I.ff_norm",),
    "gate_up": ("model.transformer.blocks.I.ff_proj", "model.transformer.blocks.I.up_proj"),
    "down": ("model.transformer.blocks.I.ff_out",),
    "norm": ("model.transformer.ln_f",),
    "head": ("model.transformer.ff_out",),
}
LLAMA = {
    "embedding": ("model.embed_tokens",),
    "attention_norm": ("model.layers.I.input_layernorm",),
    "query_key_value": tuple(f"model.layers.I.self_attn.{x}_proj" for x in "qkv"),
    "query_norm": ("model.layers.I.self_attn.q_norm",),
    "key_norm": ("model.layers.I.self_attn.k_norm",),
    "attention_out": ("model.layers.I.self_attn.o_proj",),
    "mlp_norm": ("model.layers.I.post_attention_layernorm",),
    "gate_up": ("model.layers.I.mlp.gate_proj", "model.layers.I.mlp.up_proj"),
    "down": ("model.layers.I.mlp.down_proj",),
    "norm": ("model.norm",),
    "head": ("lm_head",),
}
_COMPUTED = re.compile(r"\.rotary_emb\.inv_freq$")  # in files of old versions
_STRETCHED = ("linear", "llama3", "yarn")  # rotary frequencies, the same for every length
LLAMA_SHAPED = ("llama", "mistral", "qwen2", "qwen3")
# What our backbone computes, where a config.json says otherwise.  Other biases show as weights that have no place.
_WANTED: dict[str, dict[str, Any]] = {
    "llada": {
        "block_type": "llama",
        "activation_type": "silu",
        "layer_norm_type": "rms",
        "rope": True,
        "alibi": False,
        "input_emb_norm": False,
        "scale_logits": False,
    },
    "Dream": {"architectures": ["DreamModel"], "use_mrope": False},
}


def load_checkpoint(
    source: Source, values: dict[str, Any], mask_token_id: int, tokenizer: Any = None, *, shift: bool = False
) -> Denoiser:
    """The model of a folder in the precision of its files; `values` is its config.json.

    shift: of a causal model: read the token at n from the hidden state at n - 1, which is where it predicts it.
    """
    kind, folder = values["model_type"], source.folder
    for key, wanted in _WANTED.get(kind, {}).items():
        if values.get(key, wanted) != wanted:
            raise UserError(f"{folder} cannot be read: its config.json has {key} {values[key]!r}, not {wanted!r}")
    if kind == "llada":
        names, shift, (shape, size, tied) = LLADA, False, _llada_shape(values, folder)
    else:
        with reading(source):
            from transformers import CONFIG_MAPPING

            config = CONFIG_MAPPING["qwen2" if kind == "Dream" else kind].from_dict(values)
        with prefixed(str(folder)):
            names, shape = LLAMA, llama_shape(config)
        shift, size, tied = shift or kind == "Dream", config.vocab_size, bool(config.tie_word_embeddings)
    check_ids(mask_token_id, tokenizer, size)
    with torch.device("meta"):  # no weights are drawn, which takes minutes for 8B
        model = Denoiser(shape, size, tied, shift, mask_token_id)
    weights = translated(_read(source), model.state_dict(), names, f"the checkpoint of {folder}")
    for name, empty in model.state_dict().items():
        if weights[name].shape != empty.shape:
            raise UserError(
                f"{folder} does not fit its config.json: {name} is {list(weights[name].shape)}, not {list(empty.shape)}"
            )
    model.load_state_dict(weights, assign=True)
    model.backbone.cos, model.backbone.sin = rotary_angles(torch.arange(shape.max_length)[None], shape)
    eos = values.get("eos_token_id")
    eos = getattr(tokenizer, "eos_token_id", None) if eos is None else eos
    model.eos_token_id, model.tokenizer = eos[0] if isinstance(eos, list) else eos, tokenizer
    return model.eval()


def _llada_shape(values: dict[str, Any], folder: Path) -> tuple[BackboneConfig, int, bool]:
    """The shape, V, and whether the embedding is the head."""
    try:
        heads = values["n_heads"]
        shape = BackboneConfig(
            width=values["d_model"],
            layers=values["n_layers"],
            heads=heads,
            intermediate=values["mlp_hidden_size"],
            max_length=values["max_sequence_length"],
            rope_theta=float(values["rope_theta"]),
            norm_eps=float(values["rms_norm_eps"]),
            kv_heads=values.get("n_kv_heads") or heads,
        )
        return shape, values["embedding_size"], bool(values["weight_tying"])
    except KeyError as error:
        raise UserError(f"{folder} cannot be read: its config.json does not say {error}") from None


def llama_shape(config: Any, max_length: int = 0) -> BackboneConfig:
    """Our shape of a Llama-shaped config of transformers; a UserError where it is another.

    max_length: the longest sequence; 0: the config's.  With a sliding window it is at most the window: up to there, a
    window is full attention.  With dynamic RoPE it is at most the config's: beyond, frequencies depend on the length.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    rope_type = rope.get("rope_type", "default")
    for what, found, wanted in (
        ("model_type", config.model_type, (*LLAMA_SHAPED, "Dream")),
        ("hidden_act", getattr(config, "hidden_act", None), ("silu",)),
        ("rope_type", rope_type, ("default", "dynamic", *_STRETCHED)),
        ("partial_rotary_factor", rope.get("partial_rotary_factor", 1.0), (1.0,)),
    ):
        if found not in wanted:
            raise UserError(
                f"only a Llama-shaped model can be read, and this one has {what} {found!r}, not "
                f"{' or '.join(map(repr, wanted))}"
            )
    frequencies, scale = tuple[float, ...](), 1.0
    if rope_type in _STRETCHED:
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        given, scale = ROPE_INIT_FUNCTIONS[rope_type](config)
        frequencies = tuple(given.tolist())
    limits = [max_length or config.max_position_embeddings]
    limits += [window] if (window := getattr(config, "sliding_window", None)) else []
    limits += [config.max_position_embeddings] if rope_type == "dynamic" else []
    own = config.hidden_size // config.num_attention_heads
    head_width = getattr(config, "head_dim", None) or own
    return BackboneConfig(
        width=config.hidden_size,
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        intermediate=config.intermediate_size,
        max_length=min(limits),
        rope_theta=float(rope["rope_theta"]),
        norm_eps=float(config.rms_norm_eps),
        qk_norm=config.model_type == "qwen3",
        kv_heads=config.num_key_value_heads,
        head_width=0 if head_width == own else head_width,
        qkv_bias=config.model_type in ("qwen2", "Dream"),
        rope_frequencies=frequencies,
        rope_scale=float(scale),
    )


def translated(
    theirs: dict[str, Tensor], wanted: Iterable[str], names: Mapping[str, tuple[str, ...]], where: str
) -> dict[str, Tensor]:
    """The weights `wanted` by our names; a UserError, which begins with `where`, if some lack or have no place.

    `theirs` is emptied on the way: two copies of a large model may not fit.
    """
    ours, missing = dict[str, Tensor](), list[str]()
    for name in wanted:
        *parents, layer, kind = name.split(".")  # such as backbone.blocks.3.attention_norm.weight
        block = next(filter(str.isdigit, parents), "")
        keys = [f"{key}.{kind}".replace(".I.", f".{block}.") for key in names[layer]]
        missing += [key for key in keys if key not in theirs]
        found = [theirs.pop(key) for key in keys if key in theirs]
        ours[name] = found[0] if len(found) == 1 else torch.cat(found) if found else torch.empty(0)
    if "head.weight" not in ours:
        theirs.pop(f"{names['head'][0]}.weight", None)  # the embedding once more
    check_keys(where, missing, (key for key in theirs if not _COMPUTED.search(key)))
    return ours


def _read(source: Source) -> dict[str, Tensor]:
    check_room(source)
    paths = sorted(source.folder.glob("model*.safetensors"))
    if not paths:
        raise UserError(f"{source.name} has no model*.safetensors: save it with save_pretrained of transformers")
    say(f"reading {source.name}", err=True)
    theirs: dict[str, Tensor] = {}
    for path in paths:
        try:
            theirs |= load_file(path)
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path} is no safetensors file: {error}") from None
    return theirs
