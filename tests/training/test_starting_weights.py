"""Training that starts from weights of other people: a causal language model, an SMDM checkpoint."""

import json

import pytest
import torch
from safetensors.torch import save_file

pytest.importorskip("transformers", reason="pip install 'unmask[pretrained]'")

from tests.models.test_adaptation import EOS, SHAPES, save, tiny, tokenizer
from tests.models.test_smdm import checkpoint
from tests.tasks.test_gsm8k import TEST, many, write_jsonl
from unmask import files
from unmask.decoding.generate import generate
from unmask.decoding.policies import Learned
from unmask.errors import UserError
from unmask.models.backbone import BackboneConfig
from unmask.models.importers.causal import adapt_causal
from unmask.models.order_model import MASK_TOKEN, OrderModel
from unmask.recipe import load_recipe
from unmask.training.expected_time import in_words, warn_of_time
from unmask.training.run import load_run, train

RECIPE = """
threads = 1

[task]
name = "gsm8k"
folder = "data"
cache = "cache"
resample = 1
prompt_length = 90
response_length = 40
tokenizer = "llama"

[model]
causal = "llama"
shift = true

[model.selector]
width = 8
heads = 2

[model.scorer]
width = 8
layers = 1
heads = 2

[denoise]
updates = 1
batch = 2

[order]
budget = 2
trajectories = 2
batch = 2
updates = 1
denoiser_rate = 1e-4

[evaluate]
examples = 2
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with a few problems, a tiny Llama and the recipe."""
    home = tmp_path_factory.mktemp("home")
    (home / "data").mkdir()
    write_jsonl(home / "data" / "train.jsonl", many())
    write_jsonl(home / "data" / "test.jsonl", TEST)
    save(tiny(**SHAPES["grouped"]), home / "llama")
    (home / "recipe.toml").write_text(RECIPE)
    return home


@pytest.fixture(autouse=True)
def there(home, monkeypatch):
    monkeypatch.chdir(home)


def recipe(*overrides):
    return load_recipe("recipe.toml", list(overrides))


def test_a_causal_model_is_trained_on_with_its_shift(home, tmp_path):
    """The shift is in every folder that is written, and training, order and generation all read the state before."""
    out = tmp_path / "run"
    train(recipe("denoise.learning_rate=1e-9", "order.denoiser_rate=1e-9"), out, cpu=True)
    model, baseline, _, task = load_run(out)
    for loaded in (model, baseline, OrderModel.from_pretrained(out / "denoiser")):
        assert loaded.config.shift
        assert loaded.config.denoiser.kv_heads == 2
        assert loaded.config.denoiser.max_length == task.length == 130
    assert model.config.scorer.kv_heads == 0
    assert model.tokenizer.encode(f"40-4{MASK_TOKEN}{EOS}").ids[-2:] == [model.denoiser.mask_token_id, 0]

    examples = task.examples(torch.arange(2), "test")
    canvas = torch.where(examples.response, model.denoiser.mask_token_id, examples.tokens)
    start = adapt_causal(tiny(**SHAPES["grouped"]), task.text_tokenizer, shift=True, max_length=130).denoiser
    with torch.no_grad():  # one update at a rate of nearly nothing: still the causal model's function
        wanted = start(canvas, examples.attention_mask)[examples.response]
        assert torch.allclose(model.denoiser(canvas, examples.attention_mask)[examples.response], wanted, atol=1e-3)
    out = generate(
        model.denoiser, canvas, Learned(model.selector), 2, attention_mask=examples.attention_mask, temperature=0.0
    )
    assert (out.tokens[examples.response] < len(task.vocabulary)).all()


def test_the_shift_reaches_the_objective(home, tmp_path):
    losses = []
    for shift in ("true", "false"):
        out = tmp_path / shift
        train(recipe(f"model.shift={shift}", "order.updates=1", "order.denoiser_rate=0.0"), out, cpu=True)
        assert OrderModel.from_pretrained(out).config.shift == (shift == "true")
        losses.append([json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()])
    assert all(abs(one - other) > 1e-4 for one, other in zip(*losses, strict=True))


def refused(tmp_path, *overrides):
    with pytest.raises(UserError) as error:
        train(recipe(*overrides), tmp_path / "run", cpu=True)
    assert not (tmp_path / "run").exists()
    return str(error.value)


def test_a_tokenizer_that_does_not_fit_is_one_line(home, tmp_path):
    said = refused(tmp_path, "task.tokenizer=''", "task.vocab_size=300")
    assert "'<eos>', are not tokens of the pretrained tokenizer: set task.tokenizer to" in said
    assert "task groups has none" in refused(tmp_path, "task={name='groups'}")
    assert "no pretrained model 'nowhere'" in refused(tmp_path, "model.causal=nowhere")


def test_a_run_with_another_tokenizer_of_the_same_size_is_refused(home, tmp_path):
    train(recipe(), tmp_path / "first", cpu=True)
    task = load_run(tmp_path / "first")[3]
    said = refused(tmp_path, f"init={tmp_path / 'first'}", "model.causal=''", "model.shift=false", "task.tokenizer=''")
    assert f"knows {len(task.vocabulary)} tokens" in said

    state = json.loads((tmp_path / "first" / "tokenizer.json").read_text())
    vocab = state["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    files.write_listed(tmp_path / "first", "tokenizer.json", json.dumps(state))
    said = refused(tmp_path, f"init={tmp_path / 'first'}", "model.causal=''", "model.shift=false")
    assert "has another tokenizer than task gsm8k" in said
    with pytest.raises(UserError, match="has another tokenizer than task gsm8k: its token"):
        load_run(tmp_path / "first")


def test_training_from_an_smdm_file(home, tmp_path):
    shape = BackboneConfig(width=24, layers=2, heads=4, intermediate=20)
    weights = checkpoint(shape, vocab=tokenizer().get_vocab_size())
    save_file(weights, tmp_path / "mdm.safetensors")
    start = [f"init={tmp_path / 'mdm.safetensors'}", "order.denoiser_rate=0.0"]
    sizes = "model={width=24, layers=2, heads=4, intermediate=20, scorer={heads=2, width=8}, selector={heads=2}}"
    train(recipe(*start, sizes, "denoise.learning_rate=1e-9"), tmp_path / "run", cpu=True)
    model, _, _, task = load_run(tmp_path / "run")
    index = task.vocabulary.index("Ġ")
    there = weights["lm_head.weight"][tokenizer().token_to_id("Ġ")]
    assert torch.allclose(model.denoiser.head.weight[index], there, atol=1e-6)
    (tmp_path / "run").rename(tmp_path / "done")
    assert "does not say its heads" in refused(tmp_path, *start, "model={}")
    assert "is of another size" in refused(tmp_path, *start, sizes.replace("intermediate=20", "intermediate=24"))
    assert "set task.tokenizer to a folder" in refused(tmp_path, *start, sizes, "task.tokenizer=''")


def test_a_recipe_for_a_gpu_tells_the_time_on_a_cpu(home, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("unmask.training.expected_time.WORTH_TELLING", 0)
    train(recipe("compile=true", "order.denoiser_rate=0.0"), tmp_path / "run", cpu=True)
    said = [line for line in capsys.readouterr().err.splitlines() if "meant for a GPU" in line]
    assert len(said) == 1
    assert "6 sequences of 130 tokens" in said[0]  # 1 x 2, and 1 x 2 x k = 2
    model, _, kept, task = load_run(tmp_path / "run")
    warn_of_time(kept, model, task, torch.device("cuda"), "bf16")
    warn_of_time(recipe(), model, task, torch.device("cpu"), "no")
    assert capsys.readouterr().err == ""


def test_times_in_words():
    assert in_words(59.6) == "about 60 seconds"
    assert in_words(3600) == "about 60 minutes"
    assert in_words(36000) == "about 10 hours"
    assert in_words(86400 * 1234.0) == "about 1,234 days"
