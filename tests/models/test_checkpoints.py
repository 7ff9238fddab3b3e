"""Folders of other people: the real classes of transformers with small random weights, and LLaDA by its formula."""

import json

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import pre_tokenizers
from torch.nn.functional import silu
from torch.nn.utils.rnn import pad_sequence

import unmask
from unmask.errors import UserError
from unmask.models.importers import checkpoints
from unmask.models.networks import Denoiser
from unmask.models.order_model import word_level_tokenizer

transformers = pytest.importorskip("transformers", reason="pip install 'unmask[pretrained]'")

V, D, H, K, INNER, LAYERS, MASK, CONTEXT = 14, 24, 4, 2, 20, 2, 9, 24
SEQUENCES = [torch.tensor([1, 9, 9, 4]), torch.arange(CONTEXT) * 5 % V]
LLADA = {
    "model_type": "llada", "auto_map": {"AutoConfig": "configuration_llada.LLaDAConfig"}, "d_model": D,
    "n_layers": LAYERS, "n_heads": H, "n_kv_heads": K, "mlp_hidden_size": INNER, "max_sequence_length": CONTEXT,
    "rope_theta": 500.0, "rms_norm_eps": 1e-5, "embedding_size": V, "vocab_size": V, "mask_token_id": MASK,
    "eos_token_id": 3, "weight_tying": False, "block_type": "llama", "activation_type": "silu",
    "layer_norm_type": "rms", "rope": True, "alibi": False, "input_emb_norm": False, "scale_logits": False,
}  # fmt: skip
LLAMA = {
    "vocab_size": V, "hidden_size": D, "num_hidden_layers": LAYERS, "num_attention_heads": H, "num_key_value_heads": K,
    "intermediate_size": INNER, "max_position_embeddings": CONTEXT, "rope_theta": 500.0, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False, "eos_token_id": [3, 4], "bos_token_id": None, "pad_token_id": None,
}  # fmt: skip
# Of the published models: the values that matter, beside the sizes.
DREAM = {
    "model_type": "Dream", "architectures": ["DreamModel"], "auto_map": {"AutoModel": "modeling_dream.DreamModel"},
    "mask_token_id": MASK, "hidden_act": "silu", "rope_scaling": None, "sliding_window": None, "max_window_layers": 28,
    "use_sliding_window": False, "use_mrope": False, "eos_token_id": 3,
}  # fmt: skip


def stretched(kind, **options):
    return {"model_type": "llama", "rope_scaling": {"rope_type": kind, "factor": 4.0, **options}}


CASES = {
    "llada": LLADA,
    "llada, tied": LLADA | {"weight_tying": True},
    "dream": LLAMA | DREAM,
    "qwen2": LLAMA | {"model_type": "qwen2"},
    "qwen2, tied": LLAMA | {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": LLAMA | {"model_type": "qwen3", "head_dim": 10},
    "llama": LLAMA | {"model_type": "llama"},
    "linear": LLAMA | stretched("linear"),
    "dynamic": LLAMA | stretched("dynamic"),
    "llama3": LLAMA
    | stretched("llama3", low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64),
    "yarn": LLAMA | stretched("yarn", original_max_position_embeddings=16),
    "mistral": LLAMA | {"model_type": "mistral", "max_position_embeddings": 64, "sliding_window": CONTEXT},
}


def random_weights(config):
    """By their names; norms around one."""
    if config["model_type"] == "llada":
        kv = K * D // H
        shapes = {"wte": (V, D), "ln_f": (D,)} | ({} if config["weight_tying"] else {"ff_out": (V, D)})
        for layer in range(LAYERS):
            block = {
                "attn_norm": (D,), "q_proj": (D, D), "k_proj": (kv, D), "v_proj": (kv, D), "attn_out": (D, D),
                "ff_norm": (D,), "ff_proj": (INNER, D), "up_proj": (INNER, D), "ff_out": (D, INNER),
            }  # fmt: skip
            shapes |= {f"blocks.{layer}.{name}": shape for name, shape in block.items()}
        shapes = {f"model.transformer.{name}.weight": shape for name, shape in shapes.items()}
    else:
        tied = ("lm_head.weight",) if config["tie_word_embeddings"] else ()
        shapes = {name: x.shape for name, x in real(config).state_dict().items() if name not in tied}
    generator = torch.Generator().manual_seed(0)
    return {n: torch.randn(s, generator=generator) * 0.3 + n.endswith("norm.weight") for n, s in shapes.items()}


def real(config):
    """The class of transformers; Dream is a Qwen2 that is not causal."""
    kind = "qwen2" if config["model_type"] == "Dream" else config["model_type"]
    kinds = transformers.AutoConfig.for_model(kind, **{k: v for k, v in config.items() if k != "model_type"})
    return transformers.AutoModelForCausalLM.from_config(kinds).eval()


def reference(config, weights, shift=True):
    """A function from one sequence [L] to its logits [L, V]."""
    if config["model_type"] == "llada":
        return lambda tokens: llada(weights, tokens)
    model = real(config)
    model.load_state_dict(weights, strict=not config["tie_word_embeddings"])

    def logits(tokens):
        everybody = torch.zeros(1, 1, len(tokens), len(tokens))
        out = model(tokens[None], attention_mask=everybody).logits[0]
        return torch.cat([out[:1], out[:-1]]) if shift else out

    return logits


def llada(weights, tokens):
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
    def save(config, weights=None):
        weights = random_weights(config) if weights is None else weights
        names = sorted(weights)  # in two files, as large models are
        for number, part in enumerate((names[::2], names[1::2])):
            save_file({name: weights[name] for name in part}, tmp_path / f"model-{number}.safetensors")
        (tmp_path / "config.json").write_text(json.dumps(config))
        return tmp_path

    return save


def load(folder, **options):
    return unmask.load_denoiser(folder, **{"bidirectional": True, "shift": True, "mask_token_id": MASK} | options)


@torch.no_grad()
@pytest.mark.parametrize("config", CASES.values(), ids=CASES)
def test_it_equals_the_models_own_forward(saved, config):
    """On a sequence alone, on chosen positions of it, and padded on either side next to a longer one."""
    expected = list(map(reference(config, random_weights(config)), SEQUENCES))
    denoiser = load(saved(config))
    assert (denoiser.mask_token_id, denoiser.eos_token_id, denoiser.context_length) == (MASK, 3, CONTEXT)
    assert expected[1].std() > 0.3
    others = torch.arange(V) != MASK

    def check(hidden, wanted):
        logits = denoiser.logits(hidden)
        torch.testing.assert_close(logits[:, others], wanted[:, others], rtol=0, atol=1e-5)
        assert (logits[:, MASK] == -torch.inf).all()

    for side in ("left", "right"):
        tokens, attended = (
            pad_sequence(each, batch_first=True, padding_side=side)
            for each in (SEQUENCES, [torch.ones_like(each, dtype=torch.bool) for each in SEQUENCES])
        )
        for row, hidden in enumerate(denoiser.hidden(tokens, attended)):
            check(hidden[attended[row]], expected[row])
    for sequence, wanted in zip(SEQUENCES, expected, strict=True):
        alone = denoiser.hidden(sequence[None])[0]
        check(alone, wanted)
        check(alone[1:3], wanted[1:3])


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "dream"])
def test_a_causal_model_need_not_be_shifted(saved, name):
    """Dream always is."""
    config = CASES[name]
    denoiser = unmask.load_denoiser(saved(config), bidirectional=True, mask_token_id=MASK)  # as a recipe: by default
    wanted = reference(config, random_weights(config), shift=name == "dream")(SEQUENCES[1])
    torch.testing.assert_close(denoiser(SEQUENCES[1][None])[0, :, :MASK], wanted[:, :MASK], rtol=0, atol=1e-5)


@pytest.mark.parametrize("policy", ["threshold:0.5", "top-prob"])
@pytest.mark.parametrize("name", ["llada", "dream", "mistral"])
def test_generation_does_not_depend_on_the_batch(saved, name, policy):
    denoiser = load(saved(CASES[name])).double()
    together = unmask.generate(denoiser, SEQUENCES, policy, 3)
    for row, sequence in enumerate(SEQUENCES):
        alone = unmask.generate(denoiser, sequence[None], policy, 3)
        assert torch.equal(together.tokens[row, -len(sequence) :], alone.tokens[0])
        assert (alone.tokens != MASK).all()


@pytest.mark.parametrize("name", ["llada", "dream"])
def test_weights_keep_their_precision(saved, name):
    half = {key: tensor.bfloat16() for key, tensor in random_weights(CASES[name]).items()}
    denoiser = load(saved(CASES[name], half))
    assert {parameter.dtype for parameter in denoiser.parameters()} == {torch.bfloat16}
    assert torch.isfinite(denoiser.hidden(SEQUENCES[1][None])).all()


def test_weights_that_others_can_compute_are_left_aside(saved):
    """A tied head beside the embedding, the frequencies in files of old versions, the same weights in another form."""
    config = CASES["qwen2, tied"]
    more = {"lm_head.weight": torch.ones(V, D), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(3)}
    folder = saved(config, random_weights(config) | more)
    save_file({"layers.0.attention.wq.weight": torch.ones(1)}, folder / "consolidated.safetensors")
    load(folder)


def test_the_published_sizes():
    """Dream 7B, which has the weights of Qwen2.5 7B, and LLaDA 8B."""
    dream = transformers.Qwen2Config(
        hidden_size=3584, num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4, intermediate_size=18_944
    )
    llada = {"d_model": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 32, "mlp_hidden_size": 12_288}
    llada_shape, _, tied = checkpoints._llada_shape(LLADA | llada, "LLaDA")
    for shape, size, weights in (
        (checkpoints.llama_shape(dream), 152_064, 7_615_616_512),
        (llada_shape, 126_464, 8_015_581_184),
    ):
        with torch.device("meta"):
            denoiser = Denoiser(shape, size, tied, mask_token_id=0)
        assert sum(parameter.numel() for parameter in denoiser.parameters()) == weights


# --- tokenizers -------------------------------------------------------------------------------------------------------


def tokenizer(mask="[MASK]", size=9):
    words = word_level_tokenizer([f"w{index}" for index in range(size)])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, mask_token=mask, eos_token="w3")


@pytest.mark.parametrize("name", ["llada", "qwen3"])
def test_its_tokenizer_says_the_mask(saved, name):
    folder = saved({key: value for key, value in CASES[name].items() if key not in ("mask_token_id", "eos_token_id")})
    tokenizer().save_pretrained(folder)
    denoiser = unmask.load_denoiser(folder, bidirectional=True)
    assert (denoiser.mask_token_id, denoiser.eos_token_id) == (MASK, 3)
    assert denoiser.tokenizer.decode([1, 2]) == "w1 w2"


def test_dreams_tokenizer_needs_no_code_of_its_own(saved):
    """It is Qwen2's, under another name."""
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab"]
    special = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    config = CASES["dream"] | {"vocab_size": 260, "mask_token_id": 258}
    folder = saved(config)
    (folder / "vocab.json").write_text(json.dumps({word: index for index, word in enumerate(words)}))
    (folder / "merges.txt").write_text("#version: 0.2\na b\n")
    values = {
        "added_tokens_decoder": {"257": special | {"content": "<|end|>"}, "258": special | {"content": "<|mask|>"}},
        "auto_map": {"AutoTokenizer": ["tokenization_dream.DreamTokenizer", None]},
        "tokenizer_class": "DreamTokenizer", "eos_token": "<|end|>", "pad_token": "<|end|>", "mask_token": "<|mask|>",
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(values))
    read = unmask.load_denoiser(folder).tokenizer
    ids = read("abc<|mask|>").input_ids
    assert ids == [256, words.index("c"), 258]
    assert read.decode(ids) == "abc<|mask|>"


# --- bad input --------------------------------------------------------------------------------------------------------


def refused(folder, error=UserError, **options):
    with pytest.raises(error) as caught:
        load(folder, **options)
    return str(caught.value)


@pytest.mark.parametrize("name", ["llada", "dream", "qwen3"])
def test_missing_and_surplus_weights(saved, name):
    config = CASES[name]
    weights = random_weights(config)
    norm = next(key for key in weights if key.endswith(("attn_norm.weight", "input_layernorm.weight")))
    short = {key: tensor for key, tensor in weights.items() if ".1." not in key}
    message = refused(saved(config, short))
    assert f"lacks {len(weights) - len(short)} weights: model." in message
    assert message.count("model.") == min(10, len(weights) - len(short))
    more = weights | {"model.x.bias": torch.ones(1)}
    assert "has 1 weights that have no place: model.x.bias" in refused(saved(config, more))
    assert "attention_norm.weight is [3], not [24]" in refused(saved(config, weights | {norm: torch.ones(3)}))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("llada", {"scale_logits": True}, "has scale_logits True, not False"),
        ("llada", {"d_model": D + 8}, "is [14, 24], not [14, 32]"),
        ("dream", {"architectures": ["DreamForCausalLM"]}, "has architectures ['DreamForCausalLM'], not"),
        ("dream", {"hidden_act": "gelu"}, "has hidden_act 'gelu', not 'silu'"),
        ("llama", {"rope_scaling": {"rope_type": "yarn"}}, "transformers cannot read"),
        ("llama", {"num_hidden_layers": "two"}, "transformers cannot read"),
    ],
)
def test_another_config(saved, name, changes, message):
    weights = random_weights(CASES[name])
    assert message in refused(saved(CASES[name] | changes, weights))


def test_a_config_that_does_not_say_its_shape(saved):
    folder = saved(LLADA)
    (folder / "config.json").write_text(json.dumps({"model_type": "llada"}))
    assert "config.json does not say 'n_heads'" in refused(folder)


def test_the_mask_token_and_the_vocabulary(saved):
    folder = saved(CASES["llama"])
    assert "give mask_token_id=, or tokenizer=" in refused(folder, mask_token_id=None)
    assert "add_special_tokens({'mask_token'" in refused(folder, mask_token_id=None, tokenizer=tokenizer(mask=None))
    assert "ids up to 14, the model knows 14: give the tokenizer" in refused(folder, mask_token_id=14)
    assert "ids up to 20, the model knows 14" in refused(folder, mask_token_id=None, tokenizer=tokenizer(size=20))


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3"])
def test_a_causal_model_must_be_meant_to_see_both_ways(saved, name):
    message = refused(saved(CASES[name]), bidirectional=False)
    assert "give bidirectional=True" in message
    assert "unmask.adapt_causal" in message


def test_files(saved, monkeypatch):
    folder = saved(LLADA)
    with monkeypatch.context() as small:
        small.setattr("unmask.runtime.available_memory", lambda device: 1000)
        message = refused(folder, MemoryError)
        assert "take at least 0.0 MB of memory, of which 0.0 MB are available: take a smaller model" in message
    (folder / "model-1.safetensors").write_bytes(b"nothing")
    assert "model-1.safetensors is no safetensors file" in refused(folder)
    for path in folder.glob("*.safetensors"):
        path.unlink()
    assert "has no model*.safetensors" in refused(folder)
