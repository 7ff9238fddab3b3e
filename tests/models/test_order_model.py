import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from unmask.decoding.generate import generate
from unmask.decoding.policies import Learned, Margin
from unmask.errors import UserError
from unmask.models.backbone import BackboneConfig
from unmask.models.networks import SelectorConfig
from unmask.models.order_model import (
    MASK_TOKEN,
    MODEL_FILES,
    ModelFolderError,
    OrderModel,
    OrderModelConfig,
    word_level_tokenizer,
)
from unmask.variational.selection import Bernoulli, NonEmpty

WORDS = ["zero", "one", "two", "+", "="]
SMALL = BackboneConfig(width=8, layers=1, heads=2, intermediate=12, max_length=16, qk_norm=True)
PLAIN = OrderModelConfig(vocab_size=len(WORDS), denoiser=SMALL)
WHOLE = replace(
    PLAIN,
    selector=SelectorConfig(width=4, layers=1, heads=1, budget=5),
    scorer=replace(SMALL, absolute_positions=True, rope_theta=500.0),
    selection="bernoulli",
    tau=0.07,
)
CONFIGS = {
    "denoiser only": PLAIN,
    "tied head": replace(PLAIN, tied_head=True),
    "selector only": replace(WHOLE, scorer=None),
    "all three": WHOLE,
    "a selector with positions": replace(WHOLE, selector=replace(WHOLE.selector, positions=7)),
    "all three, tied head": replace(WHOLE, tied_head=True),
}


def build(config):
    torch.manual_seed(3)
    model = OrderModel(config, word_level_tokenizer(WORDS))
    with torch.no_grad():
        for parameter in model.parameters():  # initial values would come back by themselves from zeros and ones
            parameter.normal_()
    return model


@pytest.fixture
def folder(tmp_path):
    """A whole model, saved, to be damaged."""
    build(WHOLE).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def refused(folder) -> str:
    with pytest.raises(ModelFolderError) as caught:
        OrderModel.from_pretrained(folder)
    message = str(caught.value)
    assert Path(folder).name in message
    return message


def write_config(folder, data):
    """As another program may: a folder without a manifest is not checked against one."""
    (folder / "manifest.json").unlink(missing_ok=True)
    (folder / "config.json").write_bytes(data)


# --- round trip -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_round_trip_is_exact(tmp_path):
    for config in CONFIGS.values():
        saved = build(config)
        saved.save_pretrained(tmp_path / "runs" / "model")
        loaded = OrderModel.from_pretrained(str(tmp_path / "runs" / "model"))
        assert loaded.config == config
        assert (loaded.selector is None) == (config.selector is None)
        assert (loaded.scorer is None) == (config.scorer is None)
        weights = loaded.state_dict()
        assert weights.keys() == saved.state_dict().keys()
        for name, tensor in saved.state_dict().items():
            assert torch.equal(weights[name], tensor), name
        text = "two + one = [MASK]"
        assert loaded.tokenizer.encode(text).ids == saved.tokenizer.encode(text).ids == [2, 3, 1, 4, 5]
        x = torch.tensor([[2, 3, 1, 4, 5]])
        assert torch.equal(loaded.denoiser(x), saved.denoiser(x))
        assert not loaded.training


def test_the_form_of_the_selector_comes_back(tmp_path):
    for form in (NonEmpty, Bernoulli):
        build(replace(WHOLE, selection=form.name)).save_pretrained(tmp_path)
        assert isinstance(OrderModel.from_pretrained(tmp_path).selection, form)


def test_the_folder_holds_the_model_a_manifest_and_no_pickle(folder):
    assert sorted(path.name for path in folder.iterdir()) == sorted([*MODEL_FILES, "manifest.json"])
    for path in folder.iterdir():
        start = path.read_bytes()[:2]
        assert not start.startswith(b"PK")  # torch.save's zip
        assert not start.startswith(b"\x80")  # a bare pickle


def test_saving_again_overwrites(folder):
    plain = build(PLAIN)
    plain.save_pretrained(folder)
    assert OrderModel.from_pretrained(folder).config == PLAIN


def test_an_interrupted_save_is_no_model(folder, monkeypatch):
    """config.json is written last, and the old one is gone before the weights change."""

    def full_disk(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr("unmask.models.order_model.save_file", full_disk)
    with pytest.raises(OSError, match="no space"):
        build(WHOLE).save_pretrained(folder)
    assert "config.json is missing" in refused(folder)


# --- damage -----------------------------------------------------------------------------------------------------------


def test_a_missing_folder_is_refused(tmp_path):
    assert "no such folder" in refused(tmp_path / "nowhere")


def test_a_file_is_not_a_folder(folder):
    assert "a file, not a folder" in refused(folder / "config.json")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_missing_file_is_named(folder, name):
    (folder / name).unlink()
    assert f"{name} is missing" in refused(folder)


def test_a_flipped_bit_anywhere_is_refused(folder):
    for name in MODEL_FILES:
        path, draw = folder / name, random.Random(0)
        intact = path.read_bytes()
        for _ in range(30):
            damaged = bytearray(intact)
            damaged[draw.randrange(len(intact))] ^= 1 << draw.randrange(8)
            path.write_bytes(damaged)
            assert f"{name} is damaged" in refused(folder)
        path.write_bytes(intact)


def test_a_damaged_manifest_is_refused(folder):
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace('"format"', '"forma"'))
    assert "manifest.json is damaged" in refused(folder)
    with pytest.raises(ValueError, match="is not of unmask"):
        build(PLAIN).save_pretrained(folder)
    assert (folder / "config.json").exists(), "nothing was touched"


def test_a_config_that_cannot_be_used_is_refused(folder):
    intact = (folder / "config.json").read_bytes()
    for text in (b"", b"{", b"[]", b"3", b"{}", b"\xff\xfe\x00{"):
        write_config(folder, text)
        assert "is not the config of an unmask model" in refused(folder)
    for part, field, value, said in (
        (None, "format_version", 3, "has format version 3, this unmask reads version 4"),
        (None, "format_version", "4", "has format version 4, this unmask reads version 4"),
        (None, "dropout", 0.1, "dropout"),
        ("selector", "dropout", 0.1, "dropout"),
        ("denoiser", "width", 9, "config.json does not fit this version"),
        ("denoiser", "width", 8.0, "config.json does not fit this version"),
        ("selector", "budget", 0, "config.json does not fit this version"),
        ("selector", "heads", 3, "config.json does not fit this version"),
        (None, "vocab_size", -3, "config.json does not fit this version"),
        (None, "selection", "greedy", "config.json does not fit this version"),
        (None, "denoiser", [8, 1, 2, 12], "config.json does not fit this version"),
        ("denoiser", "width", 16, "does not fit config.json"),
        ("selector", "positions", 9, "does not fit config.json"),
        (None, "tied_head", True, "does not fit config.json"),
        (None, "scorer", None, "does not fit config.json"),
    ):
        fields = json.loads(intact)
        (fields[part] if part else fields)[field] = value
        write_config(folder, json.dumps(fields).encode())
        assert said in refused(folder), (part, field, value)
    for missing in ("denoiser", "vocab_size"):
        fields = json.loads(intact)
        del fields[missing]
        write_config(folder, json.dumps(fields).encode())
        assert missing in refused(folder)


# --- tokenizer --------------------------------------------------------------------------------------------------------


def test_word_level_ids_are_the_places_in_the_vocabulary():
    tokenizer = word_level_tokenizer(WORDS)
    assert tokenizer.get_vocab_size() == len(WORDS) + 1
    assert [tokenizer.token_to_id(word) for word in WORDS] == list(range(len(WORDS)))
    assert tokenizer.token_to_id(MASK_TOKEN) == len(WORDS) == OrderModel(PLAIN, tokenizer).denoiser.mask_token_id
    assert tokenizer.encode(" one +\ttwo = [MASK]\n").ids == [1, 3, 2, 4, 5]
    assert tokenizer.decode([2, 0], skip_special_tokens=False) == "two zero"


# --- generate ---------------------------------------------------------------------------------------------------------


def test_generate_gives_prompt_and_new_tokens():
    model, prompt = build(WHOLE).eval(), torch.tensor([[2, 3, 1], [0, 3, 2]])
    canvas = torch.cat([prompt, torch.full((2, 6), model.denoiser.mask_token_id)], dim=-1)
    rules = {"learned": Learned(model.selector), "margin": Margin(), Margin(): Margin()}
    for given, rule in rules.items():
        out = model.generate(prompt, max_new_tokens=6, policy=given, max_steps=5, seed=3, temperature=1.0)
        expected = generate(model.denoiser, canvas, rule, 5, seed=3, temperature=1.0)
        assert torch.equal(out, expected.tokens)
        assert torch.equal(out[:, :3], prompt)
    assert torch.equal(
        model.generate(prompt, max_new_tokens=6), generate(model.denoiser, canvas, rules["learned"], 5).tokens
    )
    one_by_one = generate(model.denoiser, canvas, "margin", 6).tokens
    assert torch.equal(model.generate(prompt, max_new_tokens=6, policy="margin"), one_by_one)


def test_generate_leaves_padding_out():
    model, prompt, other = build(WHOLE).eval(), [0, 1, 2, 3, 4], [1, 1, 1, 1, 1, 1]
    expected = model.generate(torch.tensor([prompt]), max_new_tokens=8, policy="margin")[0]
    for padded, mask in (([0, *prompt], [0, 1, 1, 1, 1, 1]), ([*prompt, 0], [1, 1, 1, 1, 1, 0])):
        tokens, attended = torch.tensor([padded, other]), torch.tensor([mask, [1] * 6])
        out = model.generate(tokens, attended, max_new_tokens=8, policy="margin")
        assert torch.equal(out[:, :6], tokens)
        kept = torch.tensor([*mask, *[1] * 8]).bool()
        assert torch.equal(out[0, kept], expected)
        assert not torch.equal(model.generate(tokens, max_new_tokens=8, policy="margin")[0, kept], expected)


def test_generate_refuses_in_one_line():
    model = build(PLAIN)
    for options, said in (
        ({"input_ids": torch.tensor([2, 3])}, r"input_ids must be \[B, L\], got shape \[2\]"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
        ({"policy": "learned"}, "learned needs a learned order, and there is none"),
        ({"max_new_tokens": 15}, "16"),
    ):
        with pytest.raises(UserError, match=said):
            model.generate(**{"input_ids": torch.tensor([[2, 3]]), "max_new_tokens": 2, "policy": "margin", **options})
