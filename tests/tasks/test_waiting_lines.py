"""Waiting lines: every operation by hand, all answers of small lines listed, and the exact posterior in few steps."""

from __future__ import annotations

import itertools
import math
import re

import pytest
import torch

from unmask.decoding.generate import generate
from unmask.decoding.policies.rule import Decision, Policy
from unmask.errors import UserError
from unmask.evaluation.plan import evaluate
from unmask.recipe import load_recipe
from unmask.tasks import make_task
from unmask.tasks.diversity import binned, overlap_parts, total_variation
from unmask.tasks.exact import ExactDenoiser
from unmask.tasks.puzzles.groups import Groups
from unmask.tasks.puzzles.waiting_lines import NAMES, OPERATIONS, WaitingLines
from unmask.tasks.task import Examples
from unmask.training.build import build_model

SMALL = {operation: WaitingLines(operations=operation, min_n=3, max_n=3, names=5) for operation in OPERATIONS}
SIXTEEN = WaitingLines(operations="remove-random", min_n=16, max_n=16)


def asked(task, text, size):
    """The prompt of this text, with a response of this size: Examples of one row, whose response is not yet right."""
    tokens = torch.tensor([[task.vocabulary.index(word) for word in text.split()]])
    tokens = torch.nn.functional.pad(tokens, (0, task.length - tokens.shape[1]), value=len(task.vocabulary) - 1)
    start = 3 + task.max_n
    response = (torch.arange(task.length) >= start) & (torch.arange(task.length) < start + size)
    return Examples(tokens, response[None], torch.ones_like(response)[None])


def every_answer(task, example):
    """All responses of names [A, L] to one prompt, and the prompt as often."""
    where = example.response[0]
    answers = torch.tensor(list(itertools.product(range(task.names), repeat=int(where.sum()))))
    tokens = example.tokens.repeat(len(answers), 1)
    tokens[:, where] = answers
    return tokens, example.rows(torch.zeros(len(answers), dtype=torch.int64))


@pytest.mark.parametrize(
    ("prompt", "right"),
    [
        ("copy . . Asa Ada Anna", ["Asa Ada Anna"]),
        ("reverse . . Asa Ada Anna", ["Anna Ada Asa"]),
        ("sort . . Asa Ada Anna", ["Ada Anna Asa"]),
        ("insert-index 1 Abel Asa Ada Anna", ["Abel Asa Ada Anna"]),
        ("insert-index 4 Abel Asa Ada Anna", ["Asa Ada Anna Abel"]),
        ("remove-index 2 . Asa Ada Anna", ["Asa Anna"]),
        ("replace-index 3 Abel Asa Ada Anna", ["Asa Ada Abel"]),
        ("remove-random . . Asa Ada Anna", ["Ada Anna", "Asa Anna", "Asa Ada"]),
        ("replace-random . Abel Asa Ada Anna", ["Abel Ada Anna", "Asa Abel Anna", "Asa Ada Abel"]),
        (
            "insert-random . Abel Asa Ada Anna",
            ["Abel Asa Ada Anna", "Asa Abel Ada Anna", "Asa Ada Abel Anna", "Asa Ada Anna Abel"],
        ),
        (
            "shuffle . . Asa Ada Anna",
            ["Asa Anna Ada", "Ada Asa Anna", "Ada Anna Asa", "Anna Asa Ada", "Anna Ada Asa"],
        ),
    ],
)
def test_the_right_answers_by_hand_among_all(prompt, right):
    """In a task of this operation alone, and with room for longer lines in one of all operations."""
    size, operation = len(right[0].split()), prompt.split()[0]
    for task, filler in (
        (WaitingLines(operations=operation, min_n=3, max_n=3, names=6), ""),
        (WaitingLines(min_n=3, max_n=5, names=6), " . ."),
    ):
        tokens, examples = every_answer(task, asked(task, prompt + filler, size))
        found = {task.text(row) for row in tokens[task.valid(tokens, examples)][:, examples.response[0]].tolist()}
        assert found == set(right)
        log_p = task.log_likelihood(tokens, examples)
        assert torch.equal(log_p.isfinite(), task.valid(tokens, examples))
        assert log_p.exp().sum() == pytest.approx(1, abs=1e-12)
        assert -log_p.max() == pytest.approx(math.log(len(right)), abs=1e-12)


def test_choices_are_uniform_and_every_length_and_operation_is_met():
    for operation, task in SMALL.items():
        examples = task.examples(torch.arange(6000), "train")
        assert task.entropy == pytest.approx(-float(task.log_likelihood(examples.tokens, examples).mean()), abs=1e-12)
        if operation == "shuffle":
            order = examples.tokens[:, 6:, None].eq(examples.tokens[:, None, 3:6]).int().argmax(-1)
            counts = (order * torch.tensor([9, 3, 1])).sum(-1).unique(return_counts=True)[1]
            assert len(counts) == 5
            assert counts.min() > 1050
        elif operation.endswith("random"):
            assert task.overall(task.codes(examples.tokens, examples))["TV"] < 0.02
    task = WaitingLines()
    examples = task.examples(torch.arange(4000), "test")
    assert task._n(examples.tokens).unique().tolist() == list(range(4, 33))
    assert (examples.tokens[:, 0] - task.names).unique().tolist() == list(range(10))
    exact = -task.log_likelihood(examples.tokens, examples)
    assert task.entropy == pytest.approx(float(exact.mean()), abs=5 * float(exact.std()) / math.sqrt(4000))


def test_held_out_are_each_operation_and_each_at_one_length():
    task = WaitingLines()
    trained = task.examples(torch.arange(200), "train")
    for split, operation, lengths in (("insert-random", 6, set(range(4, 33))), ("remove-random-16", 7, {16})):
        held_out = task.on_split(split)
        examples = held_out.examples(torch.arange(1000), "test")
        assert (examples.tokens[:, 0] - task.names).unique().tolist() == [operation]
        assert set(task._n(examples.tokens).tolist()) == lengths
        assert held_out.valid(examples.tokens, examples).all()
        assert trained.tokens.equal(held_out.examples(torch.arange(200), "train").tokens)
    with pytest.raises(UserError, match="no held-out split 'remove-random-17'; did you mean"):
        task.on_split("remove-random-17")


def test_steps():
    one = {name: WaitingLines(operations=name, min_n=16, max_n=16).min_steps for name in OPERATIONS}
    random = {"remove-random": 4, "insert-random": 5, "replace-random": 16, "shuffle": 16}
    assert one == dict.fromkeys(OPERATIONS, 1) | random
    assert WaitingLines(operations="copy, remove-random", max_n=17).min_steps == 5
    assert WaitingLines(operations="insert-random", max_n=6).min_steps == 3  # 7 places: 3, 1 and the settled rest
    held_out = {split: WaitingLines(held_out=split) for split in ("test", "copy", "remove-random", "remove-random-16")}
    assert [task.min_steps for task in held_out.values()] == [32, 1, 5, 4]
    assert held_out["copy"].entropy == 0
    assert held_out["remove-random-16"].entropy == pytest.approx(math.log(16))


def test_total_variation_by_hand():
    def variation(place, places, bins):
        return total_variation(binned(torch.tensor(place), torch.tensor(places), bins))

    assert variation([0, 1, 2, 3], [4] * 4, 4) == 0
    assert variation([0] * 9, [4] * 9, 4) == 0.75
    assert variation([0, 0, 1], [2] * 3, 2) == pytest.approx(1 / 6, abs=1e-6)
    assert variation(range(5), [5] * 5, 3) == 0, "a uniform choice in any bins"
    assert variation([0, 1], [4, 4], 2) == 0.5, "the first half"


def test_the_overlap_by_hand_and_by_its_definition():
    """Of 8 answers 6 are right: 4 in the first of 3 places, 2 in the second.  min(4/8, 1/3) + min(2/8, 1/3) = 7/12."""
    share = torch.cat([binned(torch.tensor([0, 0, 1, 0, 0, 1]), torch.tensor([3] * 6), 3), torch.zeros(2, 3)])
    parts = overlap_parts(share)
    assert parts.tolist() == pytest.approx([1 / 3, 1 / 3, 4 / 3, 1 / 3, 1 / 3, 4 / 3, 1 / 3, 1 / 3])
    assert parts.mean() == pytest.approx(7 / 12)
    draws = torch.Generator().manual_seed(0)
    for bins in (2, 3, 7):
        places = torch.randint(bins, 12, (40,), generator=draws)
        share = binned((torch.rand(40, generator=draws) ** 2 * places).long(), places, bins)
        share = torch.cat([share, torch.zeros(10, bins)])

        def overlap(weights, share=share, bins=bins):  # [50] of the answers
            h = torch.cat([weights @ share, 1 - (weights @ share).sum()[None]])
            return float(1 - (h - torch.tensor([1 / bins] * bins + [0])).abs().sum() / 2)

        weights, parts = torch.full((50,), 1 / 50, dtype=torch.float64), overlap_parts(share)
        assert parts.mean() == pytest.approx(overlap(weights))
        for e in (0, 17, 49):  # what a little more of one answer changes
            more = 1e-6 * torch.eye(50, dtype=torch.float64)[e] + (1 - 1e-6) * weights
            assert (overlap(more) - overlap(weights)) / 1e-6 == pytest.approx(float(parts[e] - parts.mean()), abs=1e-6)


def test_the_overlap_of_several_operations():
    """Of copies every right one counts, of a removed name only as many as a uniform choice has of each place."""
    task = WaitingLines(operations="copy,remove-random", min_n=4, max_n=4)
    examples = task.examples(torch.arange(400), "test")
    copies = examples.tokens[:, 0] == task.vocabulary.index("copy")
    prompt = examples.tokens[:, : task._start]
    first = torch.cat([prompt, task._written(prompt, torch.zeros(400, 1, dtype=torch.long))[:, 0]], dim=-1)
    first[:7] = 0
    parts = torch.tensor(task.diverse(task.codes(first, examples)))
    assert parts[:7][copies[:7]].tolist() == [0] * int(copies[:7].sum())
    assert parts[7:][copies[7:]].tolist() == [1] * int(copies[7:].sum())
    assert parts[~copies].tolist() == [1 / 4] * int((~copies).sum()), "one place of four, however often"
    assert WaitingLines(operations="copy,sort").diverse([0, 1]) is None, "nothing is random"
    assert WaitingLines(operations="remove-random").diverse([60_400, 60_400]) == [0, 0], "none is right"


def test_what_a_whole_evaluation_comes_to():
    task = SIXTEEN
    examples = task.examples(torch.arange(400), "test")
    wrong = examples.tokens.clone()
    wrong[:100, -1] = wrong[:100, -2]
    first = torch.cat([examples.tokens[:, :19], examples.tokens[:, 4:19]], dim=-1)  # always without the first name
    assert task.overall(task.codes(first, examples)) == {"TV": 15 / 16}
    assert task.overall(task.codes(wrong, examples)) == task.overall(
        task.codes(wrong[100:], examples.rows(torch.arange(100, 400)))
    )
    assert task.overall(task.codes(first.flip(-1), examples)) == {}, "nothing is right"

    task = WaitingLines().on_split("remove-random-16")  # the lines asked for decide, not the shortest of the task
    examples = task.examples(torch.arange(400), "test")
    places = torch.tensor([0, 4, 8, 12])[torch.arange(400) % 4, None]
    prompt = examples.tokens[:, : task._start]
    written = torch.cat([prompt, task._written(prompt, places)[:, 0]], dim=-1)
    assert task.overall(task.codes(written, examples))["TV remove-random"] == 0.75

    task = WaitingLines(operations="shuffle", min_n=8, max_n=8)
    examples = task.examples(torch.arange(2000), "test")
    assert task.overall(task.codes(examples.tokens, examples))["TV"] < 0.05
    reversed_lines = torch.cat([examples.tokens[:, :11], examples.tokens[:, 3:11].flip(-1)], dim=-1)
    assert task.overall(task.codes(reversed_lines, examples)) == {"TV": 7 / 8}, "valid, and always the same"

    task = WaitingLines(operations="copy,insert-random,copy", min_n=4, max_n=6)
    examples = task.examples(torch.arange(2000), "test")
    copies = examples.tokens[:, 0] == task.vocabulary.index("copy")
    wrong = torch.where(copies[:, None] & (torch.arange(2000) % 2 == 0)[:, None], 0, examples.tokens)
    figures = task.overall(task.codes(wrong, examples))
    assert list(figures) == ["valid copy", "valid insert-random", "TV insert-random"]
    assert figures["valid copy"] == pytest.approx(0.5, abs=0.05)
    assert figures["valid insert-random"] == 1
    assert figures["TV insert-random"] < 0.05


def test_errors_are_one_line():
    for options, said in (
        ({"operations": "copy, remove-randm"}, "unknown operation 'remove-randm'; did you mean 'remove-random'"),
        ({"operations": ""}, "unknown operation ''"),
        ({"max_n": len(NAMES)}, "set max_n between 3 and 63, not 64"),
        ({"min_n": 33}, "min_n = 33 must be at most max_n = 32"),
        ({"names": 32}, "set names between 33 and 64, not 32"),
    ):
        with pytest.raises(UserError, match=re.escape(said)):
            WaitingLines(**options)
    for task, said in (
        (WaitingLines(), "shuffle is not known: leave it out of task.operations, as --set task"),
        (Groups(), "task groups is not known: choose from chain, waiting-lines"),
    ):
        with pytest.raises(UserError, match=rf"\A[^\n]*exact posterior of {said}[^\n]*\Z"):
            ExactDenoiser(task)


def test_longer_lines_than_a_model_has_room_for(tmp_path):
    """Said before anything else that does not fit: longer lines also have more places, and so more tokens."""
    small = ["model.width=16", "model.layers=1", "model.intermediate=16", "task.max_n=8", "task.min_n=8"]
    recipe = load_recipe("waiting-lines-small-self", small)
    model = build_model(recipe, make_task(**recipe.task), copies=1)
    model.save_pretrained(tmp_path / "run")
    longer = load_recipe("waiting-lines-small-self", [*small, f"init={tmp_path / 'run'}", "task.max_n=12"])
    short = load_recipe("waiting-lines-small-self", [*small, "model.max_length=9"])
    task = make_task(**longer.task)
    for refused, said in (
        (lambda: build_model(longer, task, copies=1), "26 tokens, longer than the model's context of 18: start from"),
        (lambda: build_model(short, make_task(**short.task), copies=1), "context of 9: raise model.max_length"),
        (lambda: evaluate(model, task), "26 tokens, longer than the model's context of 18: give a model"),
    ):
        with pytest.raises(UserError, match=re.escape(said)):
            refused()


# ---- the exact posterior


@pytest.mark.parametrize("operation", [name for name in OPERATIONS if name != "shuffle"])
def test_the_posterior_is_that_of_all_answers(operation):
    """Against a plain sum over every response, for every set of masks."""
    task, mask = SMALL[operation], len(SMALL[operation].vocabulary)
    example = task.examples(torch.tensor([1]), "test")
    where = example.response[0].nonzero()[:, 0].tolist()
    tokens, examples = every_answer(task, example)
    p = task.log_likelihood(tokens, examples).exp()
    for size in range(1, len(where) + 1):
        for masked in itertools.combinations(where, size):
            state = example.tokens.clone()
            state[0, list(masked)] = mask
            agrees = p * ((tokens == state) | (state == mask)).all(-1)
            expected = torch.stack(
                [(agrees[:, None] * (tokens[:, n, None] == torch.arange(mask))).sum(0) for n in masked]
            )
            found = ExactDenoiser(task).hidden(state)[0, list(masked)].exp().double()
            assert torch.allclose(found, expected / agrees.sum(), atol=1e-6)


class Bisection(Policy):
    """The middles of all gaps, of which the true tokens leave one unsettled: j + 1 a multiple of 2^(S - 1 - i)."""

    def decide(self, step):
        return Decision((step.place() + 1) % 2 ** (step.max_steps - 1 - step.index)[:, None] == 0)


Bisection.key = "bisection"  # set afterwards, so that it does not join the rules of unmask


@pytest.mark.parametrize(
    "task", [SIXTEEN, WaitingLines(operations="insert-random", min_n=14, max_n=14)], ids=lambda task: task.operations
)
def test_bisection_is_exact_in_as_few_steps_as_possible(task):
    """Fifteen tokens in four steps; with these steps other rules, and with fewer steps bisection, break many lines."""
    denoiser, examples = ExactDenoiser(task), task.examples(torch.arange(1000), "test")
    canvas = torch.where(examples.response, denoiser.mask_token_id, examples.tokens)

    def written(rule, steps):
        tokens = generate(denoiser, canvas, rule, steps, temperature=1.0).tokens
        return float(task.valid(tokens, examples).double().mean()), task.overall(task.codes(tokens, examples))["TV"]

    valid, variation = written(Bisection(), task.min_steps)
    assert (valid, task.min_steps) == (1, 4)
    assert variation < 0.1
    assert written(Bisection(), 3)[0] < 0.9
    assert all(written(rule, 4)[0] < 0.75 for rule in ("top-prob", "margin", "iid"))
