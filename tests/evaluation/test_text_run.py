"""What a run of texts answers to texts from anywhere; `tests/test_lm_eval.py` asks through lm-evaluation-harness."""

import json
from itertools import pairwise

import pytest
import torch

from unmask import load_recipe, train
from unmask.errors import UserError
from unmask.evaluation.bound import evaluate_bound
from unmask.evaluation.text_run import TextRun, cut, iid_walks, most_tokens
from unmask.tasks.task import Examples
from unmask.tasks.text.text import Text
from unmask.training.reading import read_denoiser

PAIRS = [{"q": f"say {i}", "a": f"{i} é!"} for i in range(20)]
RECIPE = """
threads = 1
[task]
name = "text"
files = "{folder}/p.jsonl"
cache = "{folder}/cache"
length = 20
test_every = 5
{task}
[model]
width = 16
layers = 1
heads = 2
intermediate = 16
[denoise]
updates = 9
batch = 8
warmup = 1
{order}
"""
OF_PAIRS = 'prompt = "q"\nresponse = "a"\nresponse_length = 8'
ORDER = """
[order]
posterior = "selector"
budget = 4
prices = [0.02, 2.0]
least_budget = 2
updates = 3
batch = 4
trajectories = 2
"""


def make_runs(folder):
    """FOLDER/pairs, with an order, and FOLDER/texts, without prompts and without an order."""
    lines = [json.dumps({**pair, "text": f"{pair['q']}: {pair['a']}"}) + "\n" for pair in PAIRS]
    (folder / "p.jsonl").write_text("".join(lines), encoding="utf-8")
    for name, task, order in (("pairs", OF_PAIRS, ORDER), ("texts", "", "")):
        (folder / f"{name}.toml").write_text(RECIPE.format(folder=folder, task=task, order=order))
        train(load_recipe(folder / f"{name}.toml"), folder / name, cpu=True)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    make_runs(folder := tmp_path_factory.mktemp("runs"))
    return folder


def ask(run, policy="", max_steps=0, **options):
    return TextRun(run, policy, max_steps, device="cpu", **options)


def test_a_text_is_cut_before_the_first_stop_string():
    assert cut("a\nb. c", ["b.", "\n", ""]) == "a"
    assert cut("a\nb", "b") == "a\n"
    assert cut("ab", None) == cut("ab", []) == cut("ab", ["c"]) == "ab"
    assert most_tokens({"max_tokens": 3, "max_gen_toks": "2"}) == 2
    assert most_tokens({"until": ["x"]}) is None


def test_a_pair_has_a_whole_response_and_a_text_as_many_tokens_as_are_asked_for(runs):
    pairs, texts = ask(runs / "pairs"), ask(runs / "texts", "iid", 3)
    assert (pairs.rule.name, pairs.max_steps, texts.max_steps) == ("learned", 4, 3)
    assert ask(runs / "texts").max_steps == 20
    seen = []
    for run in (pairs, texts):
        plain = run._written
        run._written = lambda canvases, *rest, plain=plain: seen.append(canvases) or plain(canvases, *rest)
        run.write([("say 3", {"max_gen_toks": 2}), ("é", {})])
    masks = [
        [int((canvas == run.mask).sum()) for canvas in kept] for run, kept in zip((pairs, texts), seen, strict=True)
    ]
    assert masks == [[8, 8], [2, 18]]
    assert [canvas[:5].tolist() for canvas in (seen[0][0], seen[1][0])] == [list(b"say 3")] * 2


def test_answers_depend_on_neither_the_batch_nor_the_other_options(runs):
    requests = [(f"say {'1' * i}", {"until": ["\n"]}) for i in range(6)]
    alone = ask(runs / "pairs").write(requests)
    assert ask(runs / "pairs", batch_size=4).write(requests) == alone
    sampled = {"do_sample": True, "temperature": 1.0, "top_k": 200}
    mixed = [*requests[:3], ("say 2", sampled), ("say 2", sampled), *requests[3:]]
    found = ask(runs / "pairs", batch_size=3).write(mixed)
    assert found[:3] == alone[:3]
    assert found[3] != found[4], "repeated requests are sampled independently"
    whole = ask(runs / "texts").write([("say", {})])[0]
    assert cut(whole, whole[3]) == ask(runs / "texts").write([("say", {"until": whole[3], "beams": 2})])[0]


def test_options_without_a_meaning_are_named(runs, capsys):
    ask(runs / "texts").write([("say", {"num_beams": 4, "until": "x", "max_tokens": 1})])
    assert "unmask: generation options that have no meaning here: num_beams\n" in capsys.readouterr().err


def test_the_bound_of_held_out_pairs_is_that_of_evaluate(runs, capsys):
    """The prompt, the EOS behind the response, the draws and the number of samples: all as there."""
    run = ask(runs / "pairs", samples=5, batch_size=3)
    told = evaluate_bound(run.model, run.model, run.task, 4, 5, seed=0)
    held_out = [(pair["q"], pair["a"]) for pair in PAIRS[4::5]]
    found = run.log_likelihoods(held_out, ids=range(4))
    assert sum(bound for bound, _ in found) / 4 / 8 == pytest.approx(told.many_sample_bound, rel=1e-5)
    assert "log-likelihoods are lower bounds, each from 5 orders" in capsys.readouterr().err
    more = ask(runs / "pairs", samples=64).log_likelihoods(held_out, ids=range(4))
    assert sum(bound for bound, _ in more) != sum(bound for bound, _ in found)


def test_greedy_is_what_is_written_up_to_the_end(runs):
    for name, written, wanted in (
        ("pairs", b"4!\0\0\0\0\0\0", [True, False, False]),
        ("texts", b"4!", [True, True, False]),
    ):
        run = ask(runs / name, "iid", 2)
        row = torch.tensor([run.eos if name == "pairs" and place == 2 else byte for place, byte in enumerate(written)])
        run._written = lambda canvases, *rest, mask=run.mask, row=row: [row[: (one == mask).sum()] for one in canvases]
        found = run.log_likelihoods([("a", "4!"), ("a", "4"), ("a", "4?")], [0, 0, 0])
        assert [greedy for _, greedy in found] == wanted


def test_iid_orders_are_those_of_the_schedule(runs):
    """With two tokens and two steps there are three orders; with one step there is one."""
    run = ask(runs / "texts", "iid", 2)
    tokens, response, _ = run._filled("say", "xy")
    denoiser, one = run.model.denoiser, Examples(tokens[None], response[None], torch.ones_like(response)[None])

    def log_mu(masked):
        masks = response.clone()
        masks[-2:] = torch.tensor(masked)
        with torch.no_grad():
            return read_denoiser(denoiser, tokens[None], masks[None], None).log_mu[0, -2:].double()

    together, left, right = log_mu([True, True]), log_mu([True, False]), log_mu([False, True])
    wanted = {round(float(total), 4) for total in (together.sum(), together[0] + right[1], together[1] + left[0])}
    assert len(wanted) == 3
    with torch.no_grad():
        walks = iid_walks(denoiser, one, torch.tensor([7]), 2, 64, seed=0)
        once = iid_walks(denoiser, one, torch.tensor([7]), 1, 3, seed=0)
    assert walks.shape == (1, 64)
    assert {round(float(total), 4) for total in walks[0]} == wanted
    assert once[0].tolist() == pytest.approx([float(together.sum())] * 3)
    found = run.log_likelihoods([("say", "xy"), ("say", "xy"), ("say", "x")], ids=[7, 7, 8])
    assert found[0] == found[1], "the same draws"


def test_whole_texts_are_the_sum_of_their_pieces(runs):
    run = ask(runs / "texts", "iid", 1, batch_size=2)
    long = "abcdefghijklmnopqrstuvwxyz"
    pieces = run.log_likelihoods([("", long[:19]), ("", long[20:])], [0, 0])
    assert run.text_log_likelihoods([long[:19], long[20:]]) == pytest.approx([bound for bound, _ in pieces], rel=1e-5)
    whole, first, second, nothing = run.text_log_likelihoods([long, long[:20], long[20:], ""])
    assert nothing == 0
    assert whole == pytest.approx(first + second, rel=1e-5)
    assert all(one > other for one, other in pairwise((second, first, whole)))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda runs: ask(runs / "nowhere"), "no such folder"),
        (lambda runs: ask(runs / "pairs", "margni"), "unknown policy 'margni'; did you mean 'margin'"),
        (lambda runs: ask(runs / "texts", "learned"), "learned needs a learned order, and there is none"),
        (lambda runs: ask(runs / "pairs", "iid", -1), "max_steps must be a whole number from 1 on, got -1"),
        (lambda runs: ask(runs / "pairs", samples=0), "samples must be a whole number from 1 on, got 0"),
        (
            lambda runs: ask(runs / "pairs").write([("ok", {}), ("x" * 13, {})]),
            r"\Arequest 1: the prompt has 13 tokens, and task text has room for 12: give a shorter prompt\Z",
        ),
        (lambda runs: ask(runs / "pairs").write([("\ud800", {})]), r"request 0: '\\ud800' cannot be encoded \("),
        (lambda runs: ask(runs / "pairs").write([("a", {"max_gen_toks": 0})]), "max_gen_toks must be at least 1"),
        (
            lambda runs: ask(runs / "pairs").log_likelihoods([("a", "b"), ("\udfff", "b")], [0, 0]),
            r"request 1: '\\udfff' cannot be encoded",
        ),
        (lambda runs: ask(runs / "pairs").log_likelihoods([("a", "")], [0]), "the response '' has no tokens"),
        (
            lambda runs: ask(runs / "pairs").log_likelihoods([("a", "x" * 8)], [0]),
            "the response has 8 tokens, and behind this prompt is room for 7",
        ),
        (
            lambda runs: ask(runs / "pairs", "margin").log_likelihoods([("a", "b")], [0]),
            "no log-likelihood is known of the policy margin: give policy=learned",
        ),
        (
            lambda runs: ask(runs / "pairs", "learned(cap=1)").log_likelihoods([("a", "b")], [0]),
            r"no log-likelihood is known of the policy learned\(cap=1\)",
        ),
        (lambda runs: ask(runs / "pairs", "iid").text_log_likelihoods(["a"]), "this run was trained on pairs"),
    ],
)
def test_what_cannot_be_answered_is_one_line(runs, wrong, message):
    with pytest.raises(UserError, match=message):
        wrong(runs)


def test_a_block_causal_model_writes_and_knows_no_log_likelihood(runs):
    """Whatever the policy: what one message tells to give, the next one must not refuse."""
    recipe = RECIPE.format(folder=runs, task=OF_PAIRS, order=ORDER).replace("[model]", "[model]\nblock_size = 4")
    (runs / "blocks.toml").write_text(recipe)
    train(load_recipe(runs / "blocks.toml"), runs / "blocks", cpu=True)
    for policy in ("learned", "blocks(4,iid)", "blocks(4,margin)"):
        run = ask(runs / "blocks", policy)
        assert run.write([("say 3", {})])
        for asked in (
            lambda run=run: run.log_likelihoods([("a", "b")], [0]),
            lambda run=run: run.text_log_likelihoods(["a"]),
        ):
            with pytest.raises(UserError, match=r"writes block by block: use unmask evaluate --bound\Z"):
                asked()


def test_it_needs_none_of_its_data(runs, monkeypatch, ok):
    """As on another machine: neither the file that it was trained on nor the tokens of it."""
    monkeypatch.setattr(Text, "_splits", property(lambda task: pytest.fail("it reads its data")))
    for name in ("pairs", "texts"):
        assert ask(runs / name).write([("say 3", {"max_gen_toks": 2})])
        assert "0  say 3\n" in ok("sample", runs / name, "--prompt", "say 3", "--cpu")


def test_a_puzzle_takes_no_texts(tmp_path):
    small = ["denoise.updates=1", "order.updates=1", "model.width=8", "model.heads=2", "model.intermediate=8"]
    train(load_recipe("groups", small), tmp_path / "run", cpu=True)
    with pytest.raises(UserError, match=r"is a run of task groups, which takes no texts: give one of task text"):
        ask(tmp_path / "run")
