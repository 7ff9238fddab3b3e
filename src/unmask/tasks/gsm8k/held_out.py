"""What is trained on and what is held out of word problems with resampled numbers.

    train            the training problems as they came, and copies of their templates with new numbers
    new-numbers-dev  copies of the same templates with other numbers, to choose settings by
    new-numbers      the same, to report
    new-templates    5% of the templates, held out whole: the problems as they came first, then their copies
    test             the test file, untouched; nothing that trains reads it, so it is not made here

No question of train is in another split, and none of train or of new-numbers is, but for its numbers, in new-templates.
Templates with the same text, but for numbers, are held out or trained on together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch

from unmask.progress import watched
from unmask.rng import Purpose, uniforms
from unmask.tasks.gsm8k.resampling import Template, template_of
from unmask.tasks.gsm8k.word_problems import Problem, same_text, without_numbers

HELD_OUT = ("new-numbers-dev", "new-numbers", "new-templates", "test")
SPLITS = ("train", "new-numbers-dev", "new-numbers", "new-templates")  # what is made of the training file

NEW_TEMPLATES = 0.05  # the share of the templates
NEW_NUMBERS = 6000  # copies, and at most every fifth
NEW_NUMBERS_DEV = 1000  # copies, and at most every twentieth
ATTEMPTS = 16  # draws for each copy that is asked for: a template that rarely gives sane numbers has fewer copies

_TEMPLATES, _COPIES = 4, 5  # the words after DATA: which templates and which copies are held out

Pair = tuple[str, str]  # a question and its answer


@dataclass(frozen=True)
class Splits:
    """The pairs of every split, and what happened on the way."""

    pairs: dict[str, list[Pair]]
    as_they_came: int  # the first pairs of train, which are no copies
    templates: int
    left_out: str  # one line: what of the training file is not used, and why


def make_splits(train: Sequence[Problem], form: str, copies: int, seed: int) -> Splits:
    """The splits with `copies` of every template, fewer where its numbers leave less choice.

    In the `solution` form there are no copies: train and new-templates have the problems as they came.
    """
    texts = [without_numbers(problem.question) for problem in train]
    traced = enumerate(watched(train, "tracing numbers"))
    templates = {i: found for i, problem in traced if (found := template_of(problem)) is not None}
    distinct = sorted({texts[i] for i in templates})
    held_out = _shuffled(len(distinct), seed, _TEMPLATES)[: round(NEW_TEMPLATES * len(distinct))]
    new_texts = {distinct[i] for i in held_out}
    seen: set[str] = set()
    pairs: dict[str, list[Pair]] = {split: [] for split in SPLITS}
    left_out = {"without equations": 0, "twice": 0}
    for text, problem in zip(texts, train, strict=True):
        key = same_text(problem.question)
        if form == "equations" and not problem.equations:
            left_out["without equations"] += 1
        elif key in seen:
            left_out["twice"] += 1
        else:
            split = "new-templates" if text in new_texts else "train"
            pairs[split].append((problem.question, problem.written(form)))
        seen.add(key)
    as_they_came = len(pairs["train"])
    if form == "equations" and copies:
        trained_first = sorted(templates, key=lambda i: texts[i] in new_texts)  # what is seen first is not drawn again
        drawn = {i: _copies(templates[i], i, copies, seed, seen) for i in watched(trained_first, "new numbers")}
        pairs["new-templates"] += _in_turn([drawn[i] for i in drawn if texts[i] in new_texts])
        old = _in_turn([drawn[i] for i in drawn if texts[i] not in new_texts])
        order = _shuffled(len(old), seed, _COPIES)
        first = min(NEW_NUMBERS_DEV, len(old) // 20)
        second = first + min(NEW_NUMBERS, len(old) // 5)
        pairs["new-numbers-dev"] = [old[i] for i in order[:first]]
        pairs["new-numbers"] = [old[i] for i in order[first:second]]
        pairs["train"] += [old[i] for i in sorted(order[second:])]
    reasons = ", ".join(f"{count} {reason}" for reason, count in left_out.items() if count)
    return Splits(pairs, as_they_came, len(templates), reasons)


def _shuffled(count: int, seed: int, word: int) -> list[int]:
    draws = uniforms(seed, Purpose.DATA, word, torch.arange(count), dtype=torch.float64)
    return draws.argsort().tolist()


def _copies(template: Template, name: int, copies: int, seed: int, seen: set[str]) -> list[Pair]:
    """At most `copies` with questions that are not among `seen`, which they join."""
    found: list[Pair] = []
    for pair in template.draws(seed, name, ATTEMPTS * copies):
        key = same_text(pair[0])
        if key not in seen:
            seen.add(key)
            found.append(pair)
            if len(found) == copies:
                break
    return found


def _in_turn(copies: list[list[Pair]]) -> list[Pair]:
    """The first copy of every template, then the second ones, and so on: a beginning is as varied as it can be."""
    return [pair for turn in zip_longest(*copies) for pair in turn if pair is not None]
