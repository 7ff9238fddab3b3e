"""The perplexity of samples, against the loss of a tiny random GPT-2, and how varied they are, by hand."""

import json
import math

import pytest
import torch
from transformers import BertConfig, BertLMHeadModel, GPT2Config, GPT2LMHeadModel

from tests.training.small import TINY_RECIPE
from unmask.evaluation import perplexity
from unmask.evaluation.perplexity import Reader, _log_likelihoods, evaluate_perplexity, read_perplexities
from unmask.models.importers.pretrained import Causal
from unmask.tasks.diversity import distinct, entropy
from unmask.tasks.text.text import Text, byte_tokenizer

CONTEXT = 40


@pytest.fixture(scope="module")
def gpt2():
    """Sharp enough that every token has a probability of its own."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = GPT2Config(
            vocab_size=257, n_positions=CONTEXT, n_embd=16, n_layer=2, n_head=2, bos_token_id=256, eos_token_id=256
        )
        model = GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(8 if weight.dim() > 1 else 1)
    return model


@torch.no_grad()
def own_loss(model, context, text):
    """Minus the sum of log p by the model's own loss, of one sequence alone, and how many tokens were predicted."""
    tokens = torch.tensor([[*context, *text]])
    labels = tokens.clone()
    labels[0, : len(context)] = -100
    counted = int((labels[0, 1:] != -100).sum())
    return float(model(input_ids=tokens, labels=labels).loss) * counted, counted


def row(length, seed):
    return torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def test_the_log_likelihood_is_the_models_own_loss(gpt2, monkeypatch):
    """In padded batches of several lengths, with and without a context."""
    sizes = [(1, 5), (3, 1), (0, 7), (12, 20), (2, 38), (0, 2), *((1, n) for n in range(1, 30))]
    pairs = [(row(c, 2 * i), row(y, 2 * i + 1)) for i, (c, y) in enumerate(sizes)]
    wanted = [own_loss(gpt2, *pair) for pair in pairs]
    monkeypatch.setattr(perplexity, "TOKENS", 16 * CONTEXT)
    batches = list(_log_likelihoods(gpt2, pairs))
    assert len(batches) == 3
    assert sum(count for _, count, _ in batches) == sum(count for _, count in wanted)
    assert -sum(total for total, _, _ in batches) == pytest.approx(sum(loss for loss, _ in wanted), rel=1e-5)
    for pair, (loss, count) in zip(pairs, wanted, strict=True):
        ((total, predicted, texts),) = _log_likelihoods(gpt2, [pair])
        assert (predicted, texts) == (count, 1)
        assert -total == pytest.approx(loss, rel=1e-5)


def test_what_cannot_be_predicted_is_not_counted(gpt2):
    assert list(_log_likelihoods(gpt2, [([], [7]), ([], []), ([9], [])])) == [(0.0, 0, 3)]
    long = ([256], row(CONTEXT + 30, 1))
    ((total, predicted, _),) = _log_likelihoods(gpt2, [long])
    loss, count = own_loss(gpt2, [256], long[1][: CONTEXT - 1])
    assert predicted == count == CONTEXT - 1
    assert -total == pytest.approx(loss, rel=1e-5)


def test_a_model_that_reads_ahead_is_noticed(gpt2):
    assert perplexity._is_causal(gpt2)
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    torch.manual_seed(0)
    assert not perplexity._is_causal(BertLMHeadModel(BertConfig(vocab_size=9, initializer_range=1.0, **shape)).eval())


def test_entropy_and_distinct_n_grams():
    assert entropy([3, 3, 5, 5]) == pytest.approx(math.log(2))
    assert entropy([1, 1]) == entropy([]) == 0
    texts = [[1, 2, 1, 2], [1, 2], [5]]
    assert [distinct(texts, n) for n in (1, 2, 3, 9)] == [3 / 7, 2 / 4, 2 / 2, 0]


def pairs_in(tmp_path, **options):
    lines = [{"q": f"say {i}", "a": f"{i} é!" * (1 + i % 2)} for i in range(20)]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    options = {"prompt": "q", "response": "a", "length": 24, "response_length": 14, **options}
    return Text(files=str(tmp_path / "p.jsonl"), cache=str(tmp_path / "cache"), test_every=5, **options)


def reader(model, task):
    return Reader("tiny", Causal(model, byte_tokenizer(["<eos>"])), task)


def after_prompts(model, texts):
    """The model's own loss of each response that has a token."""
    pairs = zip(("say 4", "say 9", "say 14"), texts, strict=True)
    return [own_loss(model, [256, *prompt.encode()], text.encode())[0] for prompt, text in pairs if text]


def test_the_samples_of_a_task_after_their_prompts(gpt2, tmp_path, capsys):
    """Perplexity is of all tokens together; the prompt and BOS are read, and not counted."""
    task, written = pairs_in(tmp_path), ["aaaa", "", "ab"]
    true, found = evaluate_perplexity(reader(gpt2, task), {"x": written})
    losses = after_prompts(gpt2, written)
    assert (found.key, found.causal, found.tokens) == ("x", "tiny", 6)
    assert found.perplexity == pytest.approx(math.exp(sum(losses) / 6), rel=1e-5)
    assert found.token_entropy == pytest.approx(math.log(2) / 3)
    assert found.distinct == [2 / 6, 2 / 4, 1 / 2]
    answers = ["4 é!", "9 é!9 é!", "14 é!"]
    losses = after_prompts(gpt2, answers)
    assert "are cut" not in capsys.readouterr().err
    evaluate_perplexity(reader(gpt2, task), {"x": ["x" * CONTEXT] * 3})
    assert "3 of 6 texts are cut to the context of tiny, 40 tokens" in capsys.readouterr().err
    assert true.key == "held-out"
    assert true.tokens == sum(len(text.encode()) for text in answers)
    assert true.perplexity == pytest.approx(math.exp(sum(losses) / true.tokens), rel=1e-5)


def test_the_text_behind_a_span_must_follow_from_it(gpt2, tmp_path):
    task = pairs_in(tmp_path, prompt="", response="", response_length=0, field="q", form="infill", length=8)
    examples = task.examples(torch.arange(1), "test")
    first, last = (int(found) for found in examples.response[0].nonzero()[[0, -1], 0])
    whole = b"say 4"
    loss, count = own_loss(gpt2, [256, *whole[:first]], b"xy" + whole[last + 1 :])
    _, found = evaluate_perplexity(reader(gpt2, task), {"x": ["xy"]})
    assert found.tokens == count == 2 + len(whole) - last - 1
    assert found.perplexity == pytest.approx(math.exp(loss / count), rel=1e-5)
    assert found.distinct[0] == 1, "of the span alone"
    _, none = evaluate_perplexity(reader(gpt2, task), {"x": [""]})
    assert (none.tokens, none.perplexity) == (0, None), "no answer, or one that is not valid"


TINY = {
    "denoise": {"updates": 2, "batch": 4},
    "order": {"updates": 2, "batch": 4, "trajectories": 2, "budget": 4},
    "model": {"width": 16, "layers": 1, "intermediate": 16, "selector.width": 16},
    "task": {"length": 16},
}


def test_the_recipe_text_from_a_file_to_the_report(gpt2, tmp_path, ok, refused):
    """Trained on lines made on the spot: the bound in bits per character, perplexity, and samples."""
    (tmp_path / "mine.txt").write_text("".join(f"line {i} says {'é' * (i % 5)}\n" for i in range(60)), encoding="utf-8")
    folder, run = tmp_path / "tiny-gpt2", tmp_path / "run"
    gpt2.save_pretrained(folder)
    byte_tokenizer(["<eos>"]).save(str(folder / "tokenizer.json"))
    given = [f"task.files={tmp_path / 'mine.txt'}", f"task.cache={tmp_path / 'cache'}"]
    given += [f"{table}.{key}={value}" for table, values in TINY.items() for key, value in values.items()]
    ok("train", "text", "--out", run, "--cpu", *(word for value in given for word in ("--set", value)))
    shown = ok("evaluate", run, "--cpu", "--bound", "--examples", "6", "--samples", "3")
    assert "bits/char" in shown
    words = ("evaluate", run, "--cpu", "--examples", "6", "--policy", "iid", "--policy", "learned", "--steps", "4")
    shown = ok(*words, "--perplexity", folder)
    assert "samples as read by tiny-gpt2" in shown
    assert "held-out texts" in shown
    lines = read_perplexities(run)
    assert len(lines) == 3
    ok(*words, "--perplexity", folder)
    assert [line.perplexity for line in read_perplexities(run)] == [line.perplexity for line in lines]
    ok("report", run)
    page = (run / "report.html").read_text(encoding="utf-8")
    assert f"{lines[0].perplexity:.2f}" in page
    assert "bits/char" in page
    assert "no pretrained model" in refused(*words, "--perplexity", tmp_path / "nowhere", begun=True)
    assert "--perplexity takes no --curve" in refused("evaluate", run, "--curve", "--perplexity", folder)
    assert "--bound takes no" in refused("evaluate", run, "--bound", "--perplexity", folder)


def test_a_task_without_texts_is_refused_before_anything_is_generated(tmp_path, ok, refused):
    (tmp_path / "tiny.toml").write_text(TINY_RECIPE)
    ok("train", tmp_path / "tiny.toml", "--out", tmp_path / "run", "--cpu")
    said = refused("evaluate", tmp_path / "run", "--cpu", "--perplexity", "nowhere")
    assert "task groups keeps none of its samples: it is for task text" in said
    assert not (tmp_path / "run" / "verdicts.jsonl").exists()
