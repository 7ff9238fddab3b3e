"""Denoisers of other people: the real classes of transformers with small random weights, and functions."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.utils.rnn import pad_sequence

import unmask
from tests.training.small import randomised
from unmask.errors import UserError
from unmask.models.backbone import BackboneConfig
from unmask.models.importers.masked import HEADS, LogitsDenoiser
from unmask.models.order_model import OrderModel, OrderModelConfig, word_level_tokenizer

transformers = pytest.importorskip("transformers", reason="pip install 'unmask[pretrained]'")

WORDS, MASK, CONTEXT = ["[PAD]", "[CLS]", "[SEP]", *"abcdefg"], 10, 24
SEQUENCES = [torch.tensor([2, 5, 10, 10, 3]), torch.tensor([2, 10, 7, 8, 10, 10, 6, 10, 4, 9, 3, 10, 5])]
SIZES = {"vocab_size": 12, "pad_token_id": 0, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24}
KINDS = {
    "bert": {"type_vocab_size": 2},
    "camembert": {"max_position_embeddings": CONTEXT + 1},  # positions count from padding_idx + 1 on
    "distilbert": {"dim": 16, "n_heads": 2, "hidden_dim": 24},
    "electra": {"embedding_size": 8},  # its head is not known apart
    "modernbert": {"local_attention": 4, "global_attn_every_n_layers": 2},
    "roberta": {"max_position_embeddings": CONTEXT + 1},
    "xlm-roberta": {"max_position_embeddings": CONTEXT + 1},
}


def build(kind, cls="AutoModelForMaskedLM", **options):
    layers = {"n_layers" if kind == "distilbert" else "num_hidden_layers": 2}
    sizes = {"max_position_embeddings": CONTEXT, **({} if kind == "distilbert" else SIZES), **layers}
    sizes |= {"vocab_size": 12, "pad_token_id": 0} | KINDS[kind] | options
    model = getattr(transformers, cls).from_config(transformers.AutoConfig.for_model(kind, **sizes))
    return randomised(model.requires_grad_(False)).train()  # dropout would show


def tokenizer(mask="[MASK]"):
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=word_level_tokenizer(WORDS), mask_token=mask, sep_token="[SEP]", pad_token="[PAD]"
    )


@pytest.fixture
def folder(tmp_path):
    build("bert").save_pretrained(tmp_path / "bert")
    tokenizer().save_pretrained(tmp_path / "bert")
    return tmp_path / "bert"


def refused(source, **options) -> str:
    with pytest.raises(UserError) as caught:
        unmask.load_denoiser(source, **options)
    return str(caught.value)


# --- masked language models of transformers ---------------------------------------------------------------------------


def test_every_head_is_tested():
    assert set(HEADS) < set(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_it_equals_the_models_own_forward(kind):
    """On a sequence alone, and on the same one padded on either side next to a longer one."""
    model = build(kind)
    denoiser = unmask.load_denoiser(model, mask_token_id=MASK)
    assert denoiser.context_length == CONTEXT
    others = torch.arange(12) != MASK
    with torch.no_grad():
        alone = [model(sequence[None]).logits[0] for sequence in SEQUENCES]
        for side in ("left", "right"):
            tokens, attended = (
                pad_sequence(each, batch_first=True, padding_value=value, padding_side=side)
                for each, value in ((SEQUENCES, MASK), ([torch.ones_like(each) for each in SEQUENCES], 0))
            )
            hidden = denoiser.hidden(tokens, attended.bool())
            assert hidden.shape[-1] == (16 if kind in HEADS else 12)
            for row, expected in enumerate(alone):
                got = denoiser.logits(hidden[row, attended[row].bool()])
                torch.testing.assert_close(got[:, others], expected[:, others], rtol=0, atol=1e-5)
                assert (got[:, MASK] == -torch.inf).all()
        for sequence, expected in zip(SEQUENCES, alone, strict=True):
            got = denoiser.logits(denoiser.hidden(sequence[None])[0, 2:4])  # chosen positions
            torch.testing.assert_close(got[:, others], expected[2:4, others], rtol=0, atol=1e-5)


@pytest.mark.parametrize("policy", ["threshold:0.5", "top-prob"])
@pytest.mark.parametrize("kind", KINDS)
def test_generation_does_not_depend_on_the_batch(kind, policy):
    denoiser = unmask.load_denoiser(build(kind).double(), mask_token_id=MASK)
    together = unmask.generate(denoiser, SEQUENCES, policy, 3)
    for row, sequence in enumerate(SEQUENCES):
        alone = unmask.generate(denoiser, sequence[None], policy, 3)
        assert torch.equal(together.tokens[row, -len(sequence) :], alone.tokens[0])
        assert torch.equal(together.reveal_step[row, -len(sequence) :], alone.reveal_step[0])
        assert (alone.tokens != MASK).all()


def test_a_folder_says_its_special_tokens(folder):
    denoiser = unmask.load_denoiser(folder)
    assert (denoiser.mask_token_id, denoiser.eos_token_id, denoiser.vocab_size) == (MASK, 2, 12)
    assert denoiser.tokenizer.decode([3, 4]) == "a b"
    given = unmask.load_denoiser(build("bert"), tokenizer=tokenizer())
    with torch.no_grad():
        assert torch.equal(denoiser.hidden(SEQUENCES[1][None]), given.hidden(SEQUENCES[1][None]))


def test_weights_of_other_objectives_are_left_aside(folder):
    """As in the published checkpoints of BERT."""
    change(folder, {"bert.pooler.dense.bias": torch.zeros(16), "cls.seq_relationship.bias": torch.zeros(2)})
    unmask.load_denoiser(folder)


# --- others -----------------------------------------------------------------------------------------------------------


class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.logits = nn.Embedding(12, 12)

    def forward(self, tokens, attention_mask):
        return self.logits(tokens)


def test_any_module_or_function():
    module = Table()
    for source in (module, lambda tokens, attention_mask: module(tokens, attention_mask)):
        denoiser = unmask.load_denoiser(source, mask_token_id=MASK)
        out = unmask.generate(denoiser, SEQUENCES, "top-prob", 2)
        row = module.logits.weight[MASK].clone()
        row[MASK] = -torch.inf
        assert (out.tokens[out.reveal_step >= 0] == row.argmax()).all()
    assert len(list(unmask.load_denoiser(module, mask_token_id=MASK).parameters())) == 1
    assert not module.training
    wrong = LogitsDenoiser(lambda tokens, attention_mask: tokens, MASK)
    with pytest.raises(ValueError, match=r"must give logits \[B, L, V\] for tokens \[1, 5\], got \[1, 5\]"):
        unmask.generate(wrong, SEQUENCES[:1], "top-prob", 2)


def test_a_run_folder(tmp_path):
    config = OrderModelConfig(len(WORDS), BackboneConfig(8, 1, 2, 12, max_length=CONTEXT))
    model = OrderModel(config, word_level_tokenizer(WORDS))
    model.save_pretrained(tmp_path / "run")
    denoiser = unmask.load_denoiser(tmp_path / "run")
    assert (denoiser.mask_token_id, denoiser.context_length) == (MASK, CONTEXT)
    assert denoiser.tokenizer.decode([3, 4]) == "a b"
    assert torch.equal(denoiser(SEQUENCES[0][None]), model.denoiser(SEQUENCES[0][None]))
    assert unmask.load_denoiser(model) is model.denoiser
    (tmp_path / "run" / "config.json").unlink()
    assert "config.json is missing" in refused(tmp_path / "run")


# --- bad input --------------------------------------------------------------------------------------------------------


def change(folder, more=(), without=""):
    """Add weights to a checkpoint, or take away those with such names."""
    weights = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in weights.items() if not without or without not in name}
    save_file(kept | dict(more), folder / "model.safetensors", metadata={"format": "pt"})


def test_what_is_no_model(tmp_path):
    assert "holds no model" in refused(tmp_path)
    assert "holds no model" in refused(str(tmp_path / "nowhere"))
    assert "a folder, a module or a function, got int" in refused(3)


def test_no_mask_token(folder):
    assert "add_special_tokens({'mask_token': '[MASK]'})" in refused(build("bert"), tokenizer=tokenizer(mask=None))
    assert "give mask_token_id=" in refused(build("bert"))
    assert "give mask_token_id=" in refused(Table())
    (folder / "tokenizer.json").unlink()
    assert "give mask_token_id=" in refused(folder), "transformers would make a tokenizer up"


def test_more_tokens_than_the_model_knows():
    assert "ids up to 12, the model knows 12" in refused(build("bert"), mask_token_id=12)
    assert "ids up to 10, the model knows 8" in refused(build("bert", vocab_size=8), tokenizer=tokenizer())


def test_causal_models_are_refused(tmp_path):
    config = transformers.GPT2Config(vocab_size=12, n_embd=16, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=1)
    gpt = transformers.GPT2LMHeadModel(config)
    gpt.save_pretrained(tmp_path)
    decoder = build("bert", "AutoModelForCausalLM", is_decoder=True)
    masked_decoder = build("bert", is_decoder=True)
    for source in (tmp_path, gpt, decoder, masked_decoder, build("bert", "AutoModel")):
        assert "no masked language model: load one with" in refused(source, mask_token_id=MASK)


def test_a_model_without_positions_is_refused():
    config = transformers.FNetConfig(vocab_size=12, hidden_size=16, num_hidden_layers=1, intermediate_size=24)
    assert "takes no position_ids" in refused(transformers.FNetForMaskedLM(config), mask_token_id=MASK)


def test_missing_and_surplus_weights(folder):
    change(folder, {"bert.encoder.layer.2.bias": torch.zeros(1)})
    assert "has 1 weights that have no place: bert.encoder.layer.2.bias" in refused(folder)
    change(folder, without="layer.1.")
    message = refused(folder)
    assert "lacks 16 weights: bert.encoder.layer.1.attention.output.LayerNorm.bias, " in message
    assert message.endswith(", ...; give the whole checkpoint, with its own config")
    assert message.count("bert.encoder") == 10


def test_weights_of_another_shape(folder):
    change(folder, {"cls.predictions.bias": torch.zeros(40)})
    assert refused(folder).endswith("bert does not fit its config.json: cls.predictions.bias is [40], not [12]")


def test_a_config_may_say_the_mask_token(folder):
    """Where the tokenizer does not."""
    tokenizer(mask=None).save_pretrained(folder)
    assert "give mask_token_id= (in a folder: in config.json), or add one" in refused(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"mask_token_id": MASK}))
    assert unmask.load_denoiser(folder).mask_token_id == MASK
    (folder / "config.json").write_text(json.dumps(config | {"mask_token_id": 0}))  # as XLM's always does
    tokenizer().save_pretrained(folder)
    assert unmask.load_denoiser(folder).mask_token_id == MASK


def test_a_model_larger_than_the_memory(folder, monkeypatch):
    """It is read in float32, from files that may be in bfloat16."""
    build("bert").bfloat16().save_pretrained(folder)
    size = sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())
    monkeypatch.setattr("unmask.runtime.available_memory", lambda device: 2 * size - 1)
    for load in (unmask.load_denoiser, unmask.load_causal):
        with pytest.raises(MemoryError, match=r"bert take at least 0\.0 MB of memory, of which 0\.0 MB are available"):
            load(folder)
    monkeypatch.setattr("unmask.runtime.available_memory", lambda device: 2 * size)
    unmask.load_denoiser(folder)


def test_a_sequence_beyond_the_context():
    for kind in ("bert", "roberta"):
        denoiser = unmask.load_denoiser(build(kind), mask_token_id=MASK)
        unmask.generate(denoiser, torch.full((1, CONTEXT), MASK), "top-prob", 1)
        with pytest.raises(ValueError, match=f"{CONTEXT + 1} tokens is longer than the model's context of {CONTEXT}"):
            unmask.generate(denoiser, torch.full((1, CONTEXT + 1), MASK), "top-prob", 1)


def test_code_that_comes_with_a_model_is_not_run(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "evil.py").write_text(f"open({str(folder / 'ran')!r}, 'w')\nclass C: pass\n")
    config |= {"model_type": "evil", "auto_map": {"AutoConfig": "evil.C", "AutoModelForMaskedLM": "evil.C"}}
    (folder / "config.json").write_text(json.dumps(config))
    assert "transformers cannot read" in refused(folder)
    assert not (folder / "ran").exists()
