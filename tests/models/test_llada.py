"""LLaDA's checkpoints against their formula, with small random weights under their names."""

import json

import pytest
import torch
from safetensors.torch import save_file
from torch.nn.functional import silu
from torch.nn.utils.rnn import pad_sequence

import unmask
from unmask.models.importers import llada
from unmask.models.order_model import word_level_tokenizer

V, D, H, K, INNER, LAYERS, MASK = 14, 24, 6, 2, 20, 2, 9
CONFIG = {
    "model_type": "llada", "auto_map": {"AutoConfig": "configuration_llada.LLaDAConfig"}, "d_model": D,
    "n_layers": LAYERS, "n_heads": H, "n_kv_heads": K, "mlp_hidden_size": INNER, "max_sequence_length": 32,
    "rope_theta": 500.0, "rms_norm_eps": 1e-5, "embedding_size": V, "vocab_size": V, "mask_token_id": MASK,
    "eos_token_id": 3, "weight_tying": False, "block_type": "llama", "activation_type": "silu",
    "layer_norm_type": "rms", "rope": True, "alibi": False, "input_emb_norm": False, "scale_logits": False,
}  # fmt: skip
SEQUENCES = [torch.tensor([1, 9, 9, 4]), torch.tensor([9, 2, 9, 9, 7, 13, 9, 9, 0, 5])]


def random_weights(tied=False):
    E = D // H
    shapes = {"wte": (V, D), "ln_f": (D,)} | ({} if tied else {"ff_out": (V, D)})
    for layer in range(LAYERS):
        block = {
            "attn_norm": (D,), "q_proj": (D, D), "k_proj": (K * E, D), "v_proj": (K * E, D), "attn_out": (D, D),
            "ff_norm": (D,), "ff_proj": (INNER, D), "up_proj": (INNER, D), "ff_out": (D, INNER),
        }  # fmt: skip
        shapes |= {f"blocks.{layer}.{name}": shape for name, shape in block.items()}
    generator = torch.Generator().manual_seed(0)
    return {f"model.transformer.{n}.weight": torch.randn(s, generator=generator) * 0.5 for n, s in shapes.items()}


def reference(weights, tokens):
    """Logits [L, V] of one sequence [L].  A rotary pair (x_j, x_{j + E/2}) is a complex number that turns."""
    w = {name.removeprefix("model.transformer.").removesuffix(".weight"): x for name, x in weights.items()}
    L, E = len(tokens), D // H
    speed = 500.0 ** (-torch.arange(E // 2) * 2 / E)
    turn = torch.polar(torch.ones(L, E // 2), torch.arange(L)[:, None] * speed)  # [L, E/2]

    def norm(x, name):
        return w[name] * x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()

    def turned(x):  # [heads, L, E]
        z = torch.complex(x[..., : E // 2], x[..., E // 2 :]) * turn
        return torch.cat([z.real, z.imag], dim=-1)

    x = w["wte"][tokens]
    for layer in range(LAYERS):
        block = f"blocks.{layer}."
        seen = norm(x, block + "attn_norm")
        q, k, v = ((seen @ w[f"{block}{name}_proj"].T).view(L, -1, E).transpose(0, 1) for name in "qkv")
        k, v = (states.repeat_interleave(H // K, dim=0) for states in (turned(k), v))
        mixed = (turned(q) @ k.mT / E**0.5).softmax(-1) @ v
        x = x + mixed.transpose(0, 1).reshape(L, D) @ w[block + "attn_out"].T
        seen = norm(x, block + "ff_norm")
        x = x + (silu(seen @ w[block + "ff_proj"].T) * (seen @ w[block + "up_proj"].T)) @ w[block + "ff_out"].T
    return norm(x, "ln_f") @ w.get("ff_out", w["wte"]).T


@pytest.fixture
def saved(tmp_path):
    def save(weights, **config):
        names = sorted(weights)  # in two files, as large models are
        for number, part in enumerate((names[::2], names[1::2])):
            save_file({name: weights[name] for name in part}, tmp_path / f"model-{number}.safetensors")
        (tmp_path / "config.json").write_text(json.dumps(CONFIG | config))
        return tmp_path

    return save


@pytest.mark.parametrize("tied", [False, True])
def test_it_equals_the_formula(saved, tied):
    """On a sequence alone, and padded on either side next to a longer one."""
    weights = random_weights(tied)
    denoiser = unmask.load_denoiser(saved(weights, weight_tying=tied))
    assert (denoiser.mask_token_id, denoiser.eos_token_id, denoiser.context_length) == (MASK, 3, 32)
    others = torch.arange(V) != MASK
    with torch.no_grad():
        for side in ("left", "right"):
            tokens, attended = (
                pad_sequence(each, batch_first=True, padding_side=side)
                for each in (SEQUENCES, [torch.ones_like(each, dtype=torch.bool) for each in SEQUENCES])
            )
            hidden = denoiser.hidden(tokens, attended)
            for row, sequence in enumerate(SEQUENCES):
                expected = reference(weights, sequence)
                for got in (denoiser.hidden(sequence[None])[0], hidden[row, attended[row]]):
                    logits = denoiser.logits(got)
                    torch.testing.assert_close(logits[:, others], expected[:, others], rtol=0, atol=1e-5)
                    assert (logits[:, MASK] == -torch.inf).all()


@pytest.mark.parametrize("policy", ["threshold:0.5", "top-prob"])
def test_generation(saved, policy):
    denoiser = unmask.load_denoiser(saved(random_weights()))
    out = unmask.generate(denoiser, SEQUENCES, policy, 3)
    assert (out.tokens != MASK)[out.attention_mask].all()


def test_weights_keep_their_precision(saved):
    half = {name: tensor.bfloat16() for name, tensor in random_weights().items()}
    denoiser = unmask.load_denoiser(saved(half))
    assert {parameter.dtype for parameter in denoiser.parameters()} == {torch.bfloat16}
    assert torch.isfinite(denoiser.hidden(SEQUENCES[1][None])).all()


def test_its_tokenizer_needs_no_code_of_its_own(saved):
    transformers = pytest.importorskip("transformers", reason="pip install 'unmask[pretrained]'")
    folder = saved(random_weights())
    words = word_level_tokenizer([f"w{index}" for index in range(9)])
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    assert unmask.load_denoiser(folder).tokenizer.decode([1, 2]) == "w1 w2"


def test_bad_folders(saved, monkeypatch):
    weights = random_weights()
    first = "model.transformer.blocks.0.attn_norm.weight"
    short = {name: tensor for name, tensor in weights.items() if "blocks.1" not in name}
    for message, kept, config in (
        ("lacks 9 weights: model.transformer.blocks.1.attn_norm.weight, ", short, {}),
        ("has also 1 weights: model.transformer.x.bias", {**weights, "model.transformer.x.bias": torch.ones(1)}, {}),
        (r"attention_norm.weight is \[3\], not \[24\]", {**weights, first: torch.ones(3)}, {}),
        ("has scale_logits True, not False", weights, {"scale_logits": True}),
        ("mask_token_id 14 is not one of the 14 tokens", weights, {"mask_token_id": 14}),
    ):
        with pytest.raises(ValueError, match=message):
            unmask.load_denoiser(saved(kept, **config))
    folder = saved(weights)
    (folder / "config.json").write_text(json.dumps({"model_type": "llada"}))
    with pytest.raises(ValueError, match=r"config\.json does not say 'n_heads'"):
        unmask.load_denoiser(folder)
    monkeypatch.setattr(llada, "available_memory", lambda: 1000)
    with pytest.raises(MemoryError, match=r"0\.0 GB are available: take a smaller model"):
        unmask.load_denoiser(saved(weights))
