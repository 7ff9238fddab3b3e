"""GSM8K with resampled numbers, on a few problems written for these tests in its format."""

from __future__ import annotations

import ast
import json
import logging
import operator
import re
import shutil
import sys
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from unmask.errors import UserError
from unmask.models.importers.vocabulary import vocabulary_of
from unmask.tasks import make_task
from unmask.tasks.gsm8k.arithmetic import Style, decimals_of, exact, parse
from unmask.tasks.gsm8k.byte_pairs import MARKS, train_tokenizer
from unmask.tasks.gsm8k.gsm8k import GSM8K, fingerprint
from unmask.tasks.gsm8k.held_out import HELD_OUT, make_splits
from unmask.tasks.gsm8k.resampling import _choices, find_numbers, template_of
from unmask.tasks.gsm8k.word_problems import Problem, answer_in, read_problems, same_text, without_numbers

THINGS = ("pears", "stamps", "shells", "marbles", "tulips", "bricks", "coins", "kites", "buttons", "candles")
PEOPLE = ("Ada", "Ben", "Cleo", "Dov")


def problem(question, *equations, answer=None):
    """A problem whose solution has a sentence for each equation."""
    lines = [f"That makes {eq.partition('=')[0]} = <<{eq}>>{eq.rpartition('=')[2]} in all." for eq in equations]
    final = answer or equations[-1].rpartition("=")[2]
    return Problem(question, "\n".join([*lines, f"#### {final}"]))


def many():
    """Forty templates with texts of their own."""
    return [
        problem(
            f"{person} had 40 {thing}, bought {i + 13} more and gave away 12. How many {thing} has {person} now?",
            f"40+{i + 13}={i + 53}",
            f"{i + 53}-12={i + 41}",
        )
        for i, (person, thing) in enumerate((person, thing) for person in PEOPLE for thing in THINGS)
    ]


TEST = [
    problem("Eve had 40 plums and ate 4 of them. How many are left?", "40-4=36"),
    problem("A ticket is $1,500.50. How much are 2 tickets?", "2*1500.5=3001", answer="3,001"),
]


def write_jsonl(path, problems):
    path.write_text("".join(json.dumps({"question": p.question, "answer": p.solution}) + "\n" for p in problems))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gsm8k")
    write_jsonl(folder / "train.jsonl", many())
    write_jsonl(folder / "test.jsonl", TEST)
    return folder


@pytest.fixture(scope="module")
def task(folder):
    return GSM8K(str(folder), resample=10, vocab_size=320, prompt_length=90, cache=str(folder / "cache"))


# ---- arithmetic


def test_expressions_are_exact():
    for text, value in (
        ("48/2", "24"),
        ("2+3*4", "14"),
        ("(2+3)*4-1", "19"),
        ("10-4-3", "3"),
        ("24/4/3", "2"),
        ("-5+8", "3"),
        ("+5 - -8", "13"),
        ("1/3", "1/3"),
        (".5*1,200", "600"),
        ("20%*60", "12"),
        ("7//2", "3"),
        ("0.1+0.2", "3/10"),
    ):
        read = parse(text)
        assert read.values([exact(number) for number in read.numbers])[-1] == Fraction(value), text
        assert read.write(read.numbers) == text


def test_what_is_no_expression():
    for text in ("", "2+", "(2", "2)", "2 3", "*2", "two", "__import__('os')", "2**3", "1.2.3"):
        with pytest.raises(UserError):
            parse(text)


def test_numbers_are_written_alike():
    for like, value, written in (
        ("48", "7", "7"),
        ("2.5", "3", "3"),
        ("2.50", "3", "3.00"),
        ("2.50", "3.125", "3.125"),
        (".5", "0.25", ".25"),
        ("0.5", "0.25", "0.25"),
        (".5", "1.25", "1.25"),
        ("1,200", "23456", "23,456"),
        ("1,200", "600", "600"),
        ("1200", "23456", "23456"),
        ("1,200.50", "2000", "2,000.00"),
    ):
        assert Style.of(like).write(exact(value)) == written
        assert Style.of(like).write(exact(like)) == like
    assert [decimals_of(Fraction(1, n)) for n in (1, 2, 3, 4, 6, 8, 40)] == [0, 1, None, 2, None, 3, 3]


# ---- tracing


def changed(template, **values):
    """The template with some of its free numbers, by their place, set anew."""
    numbers = [number.value for number in template.numbers]
    for place, value in values.items():
        for equal in template.free:
            if int(place[1:]) in equal:
                for i in equal:
                    numbers[i] = exact(value)
    return template.write(numbers)


def test_resampling_by_hand():
    template = template_of(
        problem("Ann sells 48 mugs in May and half as many in June. How many?", "48/2=24", "48+24=72")
    )
    assert template.free == ((0,),)
    assert changed(template, n0="60") == (
        "Ann sells 60 mugs in May and half as many in June. How many?",
        "<<60/2=30>> <<60+30=90>> #### 90",
    )
    assert changed(template, n0="61") is None, "half a mug"


def test_money_and_commas():
    template = template_of(
        problem("A hall costs $1,200 and each of 40 guests $2.50. What is it?", "40*2.5=100", "1200+100=1300.00")
    )
    assert len(template.free) == 3
    question, answer = changed(template, n0="1500", n1="30", n2="3.10")
    assert question == "A hall costs $1,500 and each of 30 guests $3.10. What is it?"
    assert answer == "<<30*3.1=93>> <<1500+93=1593.00>> #### 1593.00"
    assert changed(template, n2="3.11", n1="41") is None, "127.51 has decimals where 100 had none"


def test_insane_draws_are_refused():
    template = template_of(problem("Of 50 eggs 20 break. Boxes hold 6. How many boxes?", "50-20=30", "30/6=5"))
    assert changed(template, n0="30", n1="40") is None, "negative"
    assert changed(template, n1="50") is None, "nothing left where something was"
    assert changed(template, n1="21") is None, "4.8 boxes"
    assert changed(template, n1="26")[1] == "<<50-26=24>> <<24/6=4>> #### 4"


def free_values(*args, **options):
    found = template_of(problem(*args, **options))
    return None if found is None else [str(found.numbers[equal[0]].value) for equal in found.free]


def test_what_is_free():
    for question, equations, free in (
        # a number and an earlier result of the same value: whatever the result came from stays, too
        ("Of 30 men 20 leave and 10 women and 5 boys come.", ["30-20=10", "10+10=20", "20+5=25"], ["5"]),
        # such a number stays even if another equation uses it and nothing else
        ("10 women have 7 bags each, of 30 men 20 leave.", ["10*7=70", "30-20=10", "10+70=80"], ["7"]),
        # two results of the same value that mean different things
        ("20 reds less 5, 32 blues less 17, 7 more.", ["20-5=15", "32-17=15", "15+7=22"], ["7"]),
        # two results of the same meaning are one
        ("20 reds less 5, twice, 7 more.", ["20-5=15", "20-5=15", "15+7=22"], ["20", "5", "7"]),
        # a number and a word of the same value
        ("Tim has 2 cats and twice as many dogs. A dog eats 9 bones.", ["2*2=4", "4*9=36"], ["9"]),
        # constants from somebody's head: 0.2 is the 20%, 80 is what 20% off leaves, 385 = 35 * 11
        ("A $60 coat is 20% off.", ["60*0.2=12", "60-12=48"], ["60"]),
        ("A $50 coat is 20% off.", ["50*80/100=40"], ["50"]),
        ("Jo packs 35 crates of 11 and 17 jars.", ["385+17=402"], ["17"]),
        # 100 is half of 200 here, and no percent; 30 is half of the 60 before it
        ("Jim has 200 figs, 50% more nuts and 7 kiwis.", ["200+100=300", "200+300=500", "500+7=507"], ["7"]),
        ("Ann reads 20 pages more than the 40 of Bob, Cy half of it and 9.", ["20+40=60", "30+9=39"], ["9"]),
        # the number of months is that of the terms, whatever is earned in them
        ("In 3 months he made 60, 50 and 70. On average?", ["60+50+70=180", "180/3=60"], ["60", "50", "70"]),
        # 0, 1, years, ordinals, times, fractions, numbers that nothing uses
        ("Since 1998, on the 3rd day at 5:30, 1 of 40 is 2/5 off.", ["40-1=39", "39+1998=2037", "2037-5=2032"], ["40"]),
        ("On page 77 there are 40 flies and 8 bees.", ["40+8=48"], ["40", "8"]),
        # percents that make a whole
        ("Of 200 birds 30% are owls and 70% are crows.", ["200*30/100=60", "200*70/100=140"], ["200"]),
        # an equation that only repeats a number is no second source
        ("A fox has 11 cubs and 4 dens.", ["11=11", "11*4=44"], ["11", "4"]),
    ):
        assert free_values(question, *equations) == free, question


def test_equal_numbers_stay_equal():
    template = template_of(problem("5 boys eat 5 figs each, 3 girls 4.", "5*5=25", "3*4=12", "25+12=37"))
    assert template.free[0] == (0, 1)
    assert changed(template, n0="8") == (
        "8 boys eat 8 figs each, 3 girls 4.",
        "<<8*8=64>> <<3*4=12>> <<64+12=76>> #### 76",
    )


def test_what_is_no_template():
    for question, equations, answer in (
        ("Split 100 figs among 3.", ["100/3=33.33"], None),  # rounded
        ("Of 5 figs 8 are gone.", ["5-8=-3"], "-3"),  # negative
        ("Take 40 and 8.", ["40+8=48"], "50"),  # the answer is no result
        ("Take some.", ["2+2=4"], None),  # no number
        ("Ann reads 20 pages more than 40, Cy half of it.", ["20+40=60", "30=30"], None),  # where is 30 from?
        ("Take 40 and 8.", [], "48"),
        ("A and B have 40, B 6 more than A.", ["17+6=23"], None),  # where is 17 from?
    ):
        assert template_of(problem(question, *equations, answer=answer)) is None, question


def test_numbers_of_a_question():
    found = find_numbers("$1,234.50 for 50% of 3rd-row mp3s at 7:30 pm, 1/2 of .5 kg in 2012, 40 percent of $2012")
    assert [(str(float(n.value)), n.percent, n.fixed) for n in found] == [
        ("1234.5", False, False),
        ("50.0", True, False),
        ("3.0", False, True),
        ("3.0", False, True),
        ("7.0", False, True),
        ("30.0", False, True),
        ("1.0", False, True),
        ("2.0", False, True),
        ("0.5", False, False),
        ("2012.0", False, True),
        ("40.0", True, False),
        ("2012.0", False, False),
    ]


def test_new_numbers_are_of_the_same_kind_and_size():
    for text, least, most, step in (
        ("48", "24", "96", "1"),
        ("2", "2", "6", "1"),
        ("2000", "1000", "4000", "100"),
        ("120", "60", "240", "10"),
        ("30%", "15", "60", "5"),
        ("80%", "40", "95", "5"),
        ("33%", "17", "66", "1"),
        ("2.50", "1.30", "5.00", "0.10"),
        (".75", "0.38", "1.50", "0.01"),
    ):
        low, count, each, scale = _choices(find_numbers(text))
        values = [Fraction((low + k) * each, scale) for k in range(count)]
        found = (values[0], values[-1], values[1] - values[0])
        assert found == (Fraction(least), Fraction(most), Fraction(step)), text


OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def by_python(node, source):
    """The value of a parsed expression, in fractions, by another reading than the library's."""
    if isinstance(node, ast.BinOp):
        return OPERATORS[type(node.op)](by_python(node.left, source), by_python(node.right, source))
    return Fraction(source[node.col_offset : node.end_col_offset])


SOME = [
    *many()[:2],
    problem("Ann sells 48 mugs in May and half as many in June. How many?", "48/2=24", "48+24=72"),
    problem("A hall costs $1,200 and each of 40 guests $2.50. What is it?", "40*2.5=100", "1200+100=1300"),
    problem("Of 250 eggs 20% break; boxes hold 8. How many?", "250*20/100=50", "250-50=200", "200/8=25"),
    problem("5 boys eat 5 figs each, 3 girls 4.", "5*5=25", "3*4=12", "25+12=37"),
]


def test_every_draw_is_true_and_traceable():
    for some in SOME:
        template = template_of(some)
        assert template.write([n.value for n in template.numbers]) == (some.question, some.written("equations"))
        drawn = list(template.draws(seed=0, name=7, attempts=300))
        assert len(set(drawn)) > 5
        assert drawn == list(template.draws(0, 7, 300)), "pure"
        assert drawn[:5] != list(template.draws(1, 7, 300))[:5]
        for question, answer in drawn:
            assert without_numbers(question) == without_numbers(some.question)
            known = {n.value for n in find_numbers(question)} | {2, 100}
            equations = re.findall(r"<<(.*?)>>", answer)
            assert len(equations) == len(some.equations)
            for equation in equations:
                left, right = equation.split("=")
                assert by_python(ast.parse(left, mode="eval").body, left) == Fraction(right)
                assert {exact(number) for number in parse(left).numbers} <= known
                assert re.fullmatch(r"\d+", right), "whole and not negative, as it was"
                known.add(exact(right))
            assert answer_in(answer, "strict") == exact(right)


# ---- scoring


def test_answers_in_a_text():
    for text, strict, flexible in (
        ("<<48/2=24>> #### 72", 72, 72),
        ("#### 1,000", 1000, 1000),
        ("#### $1000.0.", 1000, 1000),
        ("#### -5", -5, -5),
        ("#### 0.50", Fraction(1, 2), Fraction(1, 2)),
        ("it is 7-3", None, 3),
        ("#### 12 and then 13", 12, 13),
        ("#### about 12", None, 12),
        ("#### ", None, None),
        ("", None, None),
    ):
        assert (answer_in(text, "strict"), answer_in(text, "flexible")) == (strict, flexible), text
    assert SOME[2].written("equations") == "<<48/2=24>> <<48+24=72>> #### 72"
    assert SOME[2].written("solution") == SOME[2].solution
    assert TEST[1].written("equations") == "<<2*1500.5=3001>> #### 3001"


# ---- splits and leaks


def leaks(splits):
    """What is where it must not be: (split, split, by what)."""
    pairs_of = splits.pairs | {"test": [(problem.question, "") for problem in TEST]}
    exactly = {name: {same_text(q) for q, _ in pairs} for name, pairs in pairs_of.items()}
    texts = {name: {without_numbers(q) for q, _ in pairs} for name, pairs in pairs_of.items()}
    found = [("train", other, "question") for other in HELD_OUT if exactly["train"] & exactly[other]]
    found += [("new-numbers", "new-numbers-dev", "question")] * bool(
        exactly["new-numbers"] & exactly["new-numbers-dev"]
    )
    for known in ("train", "new-numbers", "new-numbers-dev"):
        found += [(known, other, "text") for other in ("new-templates", "test") if texts[known] & texts[other]]
    return found


def test_splits_do_not_leak():
    # the same text in train twice, with other numbers, white space and case
    known = many()
    twin = problem(
        "ADA had 40  pears, bought 14 more and gave away 12. How many pears has Ada now?", "40+14=54", "54-12=42"
    )
    splits = make_splits([*known, twin, known[3]], "equations", 10, seed=0)
    assert leaks(splits) == []
    assert splits.templates == 42, "of 41 texts"
    assert splits.left_out == "1 twice"
    sizes = {name: len(pairs) for name, pairs in splits.pairs.items()}
    assert sizes["new-templates"] >= 2 * 11
    assert sizes["new-numbers-dev"] >= 15
    assert sizes["new-numbers"] >= 70
    assert sum(sizes.values()) == 41 + 10 * 42, "as they came but one twice, ten copies of each"
    texts = {without_numbers(q) for q, _ in splits.pairs["train"]}
    assert {without_numbers(q) for q, _ in splits.pairs["new-numbers"]} <= texts, "templates that were seen"
    assert len({q for pairs in splits.pairs.values() for q, _ in pairs}) == sum(sizes.values())
    assert splits == make_splits([*known, twin, known[3]], "equations", 10, seed=0)
    assert splits.pairs != make_splits([*known, twin, known[3]], "equations", 10, seed=1).pairs


def test_planted_leaks_are_found():
    """The check that finds nothing above finds what is put there."""
    splits = make_splits(many(), "equations", 10, seed=0)
    splits.pairs["train"].append(splits.pairs["new-numbers"][0])
    splits.pairs["train"].append((TEST[0].question.replace("40", "60"), ""))
    assert leaks(splits) == [("train", "new-numbers", "question"), ("train", "test", "text")]


def test_solutions_have_no_copies():
    splits = make_splits(many(), "solution", 10, seed=0)
    assert {name: len(pairs) for name, pairs in splits.pairs.items()} == {
        "train": 38, "new-numbers-dev": 0, "new-numbers": 0, "new-templates": 2
    }  # fmt: skip


def test_a_training_problem_that_is_in_test_but_for_its_numbers_is_told(tmp_path):
    again = replace(TEST[0], question="Eve  had 50 plums and ate 5 of them. How many are left?")
    write_jsonl(tmp_path / "test.jsonl", TEST)
    for train, leaks in ((many(), []), ([*many(), again], [again.question])):
        write_jsonl(tmp_path / "train.jsonl", train)
        assert GSM8K(str(tmp_path)).leaks() == leaks


def test_training_does_not_read_the_test_file(tmp_path):
    """Without one, everything but held_out = test works."""
    write_jsonl(tmp_path / "train.jsonl", many())
    task = GSM8K(str(tmp_path), resample=3, vocab_size=300, cache=str(tmp_path / "cache"))
    assert len(task.examples(torch.arange(3), "train")) == len(task.examples(torch.arange(3), "test")) == 3
    with pytest.raises(ValueError, match=r"neither test\.jsonl nor test\.txt"):
        replace(task, held_out="test").examples(torch.arange(1), "test")


# ---- tokens


def test_tokenizer_round_trip():
    texts = [text for p in many() for text in (p.question, p.solution)]
    tokenizer = train_tokenizer(texts, 320)
    assert train_tokenizer(texts, 320).to_str() == tokenizer.to_str()
    words = vocabulary_of(tokenizer)
    assert words[: len(MARKS)] == MARKS
    assert len(words) == len(set(words)) == 320
    assert not any(re.search(r"\d.|.\d", word) for word in words), "digits are single"
    for text in (*texts, "<<48/2=24>> <<48+24=72>> #### 72", "naïve  €5 – 日本\n\t<<", " = "):
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    ids = tokenizer.encode("<<4/2=2>> <<2+4=6>> #### 6").ids
    assert [words[i] for i in ids] == ["<<", *"4/2=2", ">> <<", *"2+4=6", ">> #### ", "6"]
    ids = tokenizer.encode("<<4/2=2>>2.\n#### 2").ids
    assert [words[i] for i in ids] == ["<<", *"4/2=2", ">>", *"2.Ċ", "####", *"Ġ2"], "the shorter marks in a solution"


# ---- the task


def test_the_task_keeps_the_contract(task):
    task.check()
    assert (task.eos_token_id, task.vocabulary[0], task.length) == (0, "<eos>", 90 + 72)
    assert make_task("gsm8k", folder=task.folder, resample=2, vocab_size=300).held_out == "new-numbers-dev"
    assert sorted(n for group in task.layout for n in group) == list(range(task.length))


def test_padding_and_filling(task):
    examples = task.examples(torch.arange(30), "train")
    assert examples.tokens.shape == (30, task.length)
    assert examples.tokens.dtype == torch.int64
    assert torch.equal(examples.response, (torch.arange(task.length) >= 90).expand(30, -1))
    for tokens, attention_mask in zip(examples.tokens, examples.attention_mask, strict=True):
        start = int(attention_mask.long().argmax())
        assert start > 0
        assert attention_mask[start:].all()
        assert not attention_mask[:start].any()
        assert (tokens[:start] == 0).all()
        assert (tokens[start:90] != 0).all()
        response = tokens[90:].tolist()
        end = response.index(0)
        assert set(response[end:]) == {0}
    train = read_problems(task.folder, "train")
    shown = {
        task.text(row[mask][:-72].tolist()) for row, mask in zip(examples.tokens, examples.attention_mask, strict=True)
    }
    assert shown <= {p.question for p in train}, "the problems as they came are first"
    assert {task.answer_text(row) for row in examples.tokens} <= {p.written("equations") for p in train}


def test_examples_are_pure_and_go_round(task):
    size = len(task._trained)
    ids = torch.tensor([5, 0, size + 5, 2**40])
    together = task.examples(ids, "train")
    assert torch.equal(together.tokens[0], together.tokens[2])
    for i in range(4):
        alone = replace(task).examples(ids[i : i + 1], "train")
        for field in ("tokens", "response", "attention_mask"):
            assert torch.equal(getattr(alone, field)[0], getattr(together, field)[i])
    assert len(task.examples(torch.arange(0), "test")) == 0
    with pytest.raises(ValueError, match=r"^unknown split 'dev': use train or test$"):
        task.examples(ids, "dev")


def test_an_order_may_learn_from_templates_that_are_new(task):
    """Then what it trains on is that split, and it cannot be evaluated there."""
    new = replace(task, train_on="new-templates")
    ids = torch.arange(7)
    there = task.on_split("new-templates").examples(ids, "test")
    assert new.examples(ids, "train").tokens.tolist() == there.tokens.tolist()
    assert new.examples(ids, "train").tokens.tolist() != task.examples(ids, "train").tokens.tolist()
    assert new.examples(ids, "test").tokens.tolist() == task.examples(ids, "test").tokens.tolist()
    with pytest.raises(UserError, match="new-templates was trained on: evaluate on another split"):
        new.on_split("new-templates")


def test_no_templates_left_to_learn_from(tmp_path, task):
    """Of three problems none is held out."""
    lines = (Path(task.folder) / "train.jsonl").read_text().splitlines()[:3]
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    few = replace(task, folder=str(tmp_path), cache=str(tmp_path), train_on="new-templates")
    with pytest.raises(UserError, match="task gsm8k: new-templates is empty: give more problems"):
        few.examples(torch.arange(1), "train")


def test_held_out_is_the_test_split(task):
    for held_out in HELD_OUT:
        chosen = task.on_split(held_out)
        examples = chosen.examples(torch.arange(chosen.test_examples), "test")
        assert len(examples) == len(chosen._pairs(held_out).prompts) > 0
        assert chosen.valid(examples.tokens, examples).all()
        assert not chosen.metrics(examples.tokens, examples)["overlong"].any()


def with_answer(task, examples, text):
    ids = task.text_tokenizer.encode(text).ids
    tokens = examples.tokens.clone()
    tokens[:, task.prompt_length :] = task.eos_token_id
    tokens[:, task.prompt_length : task.prompt_length + len(ids)] = torch.tensor(ids)
    return tokens


def test_validity(task):
    task = replace(task, held_out="test")
    flexible = replace(task, scoring="flexible")
    examples = task.examples(torch.arange(2), "test")  # 36 and 3,001
    for text, strict, loose in (
        ("#### 36", [True, False], [True, False]),
        ("<<1+1=3>> #### 36.00", [True, False], [True, False]),
        ("#### 3,001", [False, True], [False, True]),
        ("36", [False, False], [True, False]),
        ("#### 36 or 3001", [True, False], [False, True]),
        ("", [False, False], [False, False]),
    ):
        tokens = with_answer(task, examples, text)
        assert task.valid(tokens, examples).tolist() == strict, text
        assert flexible.valid(tokens, examples).tolist() == loose, text
        assert task.metrics(tokens, examples)["flexible"].tolist() == loose, text
    for place in (0, task.prompt_length - 1, task.length - 1):  # padding, question, response
        for outside in (len(task.vocabulary), -1):
            tokens = examples.tokens.clone()
            tokens[:, place] = outside
            assert not task.valid(tokens, examples).any()
    other = task.examples(torch.tensor([1, 0]), "test")
    assert not task.valid(other.tokens, examples).any(), "another prompt"


def test_what_is_too_long(task, capsys):
    """It is left out of training; held out, it counts, and even its true answer is wrong."""
    lengths = task._pairs("train").prompts.lengths()
    width = int(np.median(lengths))
    short = replace(task, prompt_length=width, held_out="new-numbers")
    kept = int((lengths <= width).sum())
    assert 0 < kept < len(lengths)
    trained = short.examples(torch.arange(kept + 1), "train")
    said = capsys.readouterr().err
    assert f"{len(lengths) - kept} of {len(lengths)} training problems are longer than" in said
    assert said.count("\n") == 1
    assert torch.equal(trained.tokens[0], trained.tokens[kept]), "it begins again"
    assert short.valid(trained.tokens, trained).all()

    ids = torch.arange(short.test_examples)
    asked, whole = short.examples(ids, "test"), replace(task, held_out="new-numbers").examples(ids, "test")
    assert torch.equal(asked.tokens[:, :width], whole.tokens[:, 90 - width : 90]), "cut on the left"
    right = torch.cat([asked.tokens[:, :width], whole.tokens[:, 90:]], dim=1)
    fits = short._pairs("new-numbers").prompts.lengths() <= width
    assert short.valid(right, asked).tolist() == fits.tolist()
    metrics = short.metrics(right, asked)
    assert metrics["flexible"].tolist() == fits.tolist()
    assert metrics["overlong"].tolist() == (~fits).tolist()
    assert 0 < fits.sum() < len(fits)

    answers = replace(task, response_length=12)  # no answer is as short
    examples = answers.examples(torch.arange(2), "test")
    assert answers.metrics(examples.tokens, examples)["overlong"].all()
    with pytest.raises(UserError, match="no training problem is short enough"):
        answers.examples(torch.arange(2), "train")


# ---- the tokenizer of a pretrained model


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    """The tokenizer of a pretrained model in its folder: more tokens than are needed, its end of text not the first."""
    folder = tmp_path_factory.mktemp("pretrained")
    texts = [problem.question + problem.solution for problem in many()] + ["An entirely different matter, zebra."] * 9
    train_tokenizer(texts, 500).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "####"}))  # the fifth of its special ones
    return folder


def test_a_pretrained_tokenizer_is_cut(folder, task, pretrained):
    ours = replace(task, tokenizer=str(pretrained))
    whole = Tokenizer.from_file(str(pretrained / "tokenizer.json"))
    assert ours.vocabulary[ours.eos_token_id] == "####"
    assert len(ours.vocabulary) < whole.get_vocab_size()
    assert set(ours.vocabulary) <= set(vocabulary_of(whole))
    ours.check()
    for split in ("train", "test"):
        examples = ours.examples(torch.arange(4), split)
        assert int(examples.tokens.max()) < len(ours.vocabulary)
        first = examples.tokens[0][examples.attention_mask[0]]
        text = ours.text_tokenizer.decode(first.tolist(), skip_special_tokens=False)
        assert text.startswith(tuple(PEOPLE))


def test_right_answers_are_valid_with_a_pretrained_tokenizer(folder, task, tmp_path):
    """The one that it trains itself, in a folder: the same examples under other ids, and the same verdicts."""
    task.text_tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 0}))
    ours = replace(task, tokenizer=str(tmp_path))
    for split in ("train", "test"):
        examples, same = ours.examples(torch.arange(30), split), task.examples(torch.arange(30), split)
        assert ours.valid(examples.tokens, examples).all()
        assert [ours.answer_text(row) for row in examples.tokens] == [task.answer_text(row) for row in same.tokens]
        wrong = examples.tokens.clone()
        wrong[:, -ours._response_length] = ours.eos_token_id
        assert not ours.valid(wrong, examples).any()


def test_the_cache_knows_the_tokenizer_by_its_content(task, pretrained, tmp_path):
    ours = replace(task, tokenizer=str(pretrained))
    assert fingerprint(ours) != fingerprint(task)
    elsewhere = shutil.copytree(pretrained, tmp_path / "elsewhere")
    assert fingerprint(replace(task, tokenizer=str(elsewhere))) == fingerprint(ours)
    (elsewhere / "tokenizer_config.json").write_text(json.dumps({"eos_token": ">>"}))
    assert fingerprint(replace(task, tokenizer=str(elsewhere))) != fingerprint(ours)
    with pytest.raises(ValueError, match="no pretrained model 'nowhere'"):
        _ = replace(task, tokenizer="nowhere").vocabulary


def test_solutions(folder, task):
    whole = replace(task, answers="solution", held_out="test")
    assert whole.length == 90 + 320
    examples = whole.examples(torch.arange(2), "test")
    assert whole.valid(examples.tokens, examples).all()
    assert whole.answer_text(examples.tokens[0]) == TEST[0].solution


# ---- the cache


def test_the_cache_is_read_and_never_stale(tmp_path, monkeypatch):
    from unmask.tasks.gsm8k import gsm8k

    write_jsonl(tmp_path / "train.jsonl", many())
    write_jsonl(tmp_path / "test.jsonl", TEST)
    made = []
    make = gsm8k._make
    monkeypatch.setattr(gsm8k, "_make", lambda folder, *rest: (made.append(folder), make(folder, *rest))[1])
    cache = tmp_path / "cache"
    task = GSM8K(str(tmp_path), resample=3, vocab_size=300, cache=str(cache), held_out="test")

    def tokens(task):
        return replace(task).examples(torch.arange(5), "train").tokens

    first = tokens(task)
    assert torch.equal(tokens(task), first)
    tokens(replace(task, held_out="new-templates", scoring="flexible", prompt_length=150, response_length=99))
    assert len(made) == 1
    (folder,) = (path for path in cache.iterdir() if path.is_dir())
    assert {path.name for path in folder.iterdir()} == {"tokenizer.json", "tokens.safetensors", "manifest.json"}

    for count, other in enumerate(({"seed": 1}, {"resample": 2}, {"vocab_size": 301}, {"answers": "solution"}), 2):
        tokens(replace(task, **other))
        assert len(made) == count
    write_jsonl(tmp_path / "train.jsonl", many()[::-1])
    assert not torch.equal(tokens(task), first)
    assert len(made) == 6
    write_jsonl(tmp_path / "train.jsonl", many())
    assert torch.equal(tokens(task), first)
    assert len(made) == 6

    # A flipped bit in the tokens, and the files of another cache under this name: both are made again.
    data = bytearray((folder / "tokens.safetensors").read_bytes())
    data[len(data) // 2] ^= 1
    (folder / "tokens.safetensors").write_bytes(data)
    assert torch.equal(tokens(task), first)
    assert len(made) == 7
    other = next(path for path in cache.iterdir() if path.is_dir() and path != folder)
    for path in other.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    assert torch.equal(tokens(task), first)
    assert len(made) == 8
    monkeypatch.setattr(gsm8k, "CACHE_VERSION", gsm8k.CACHE_VERSION + 1)
    tokens(task)
    assert len(made) == 9


# ---- files and errors


def test_gsm8k_aug_is_read(tmp_path):
    (tmp_path / "train.txt").write_text(
        "Ann has 48 mugs and buys 4.||<<48+4=52>> <<52*2=104>> #### 104\nWhy?|| #### 26\n"
    )
    (tmp_path / "test.txt").write_text("What is 2 and 3?||<<2+3=5>> #### 5\n")
    first, second = read_problems(str(tmp_path), "train")
    assert first.question == "Ann has 48 mugs and buys 4."
    assert first.written("equations") == "<<48+4=52>> <<52*2=104>> #### 104"
    assert second.written("equations") == "#### 26"
    assert [p.question for p in read_problems(str(tmp_path), "test")] == ["What is 2 and 3?"]


GOOD = '{"question": "What is 2 and 3?", "answer": "<<2+3=5>>5\\n#### 5"}\n'


def test_bad_files_are_named_in_one_line(tmp_path):
    for name, text, parts in (
        ("train.jsonl", GOOD + "{\n", ["train.jsonl, line 2", "not JSON"]),
        ("train.jsonl", GOOD + '{"question": "Why?"}', ["line 2", 'no text under "answer"']),
        ("train.jsonl", '{"question": 3, "answer": "#### 5"}', ["line 1", 'no text under "question"']),
        ("train.jsonl", "[1]", ["line 1", 'no text under "question"']),
        ("train.jsonl", '{"question": " ", "answer": "#### 5"}', ["line 1", "the question is empty"]),
        ("train.jsonl", GOOD + "\n" + GOOD.replace("####", "##"), ["line 3", "no '#### number'"]),
        ("train.jsonl", GOOD.replace("2+3=5", "2+=5"), ["line 1", "<<2+=5>> does not evaluate", "a number is due"]),
        ("train.jsonl", GOOD.replace("2+3=5", "2/0=5"), ["line 1", "<<2/0=5>>", "divides by zero"]),
        ("train.jsonl", GOOD.replace("2+3=5", "2+3"), ["line 1", "<<2+3>>", "no '='"]),
        ("train.jsonl", GOOD.replace("2+3=5", "2+3=five"), ["line 1", "<<2+3=five>>", "'f' is no part"]),
        ("train.jsonl", GOOD.replace("2+3=5", "(" * 9999 + "=5"), ["line 1", "does not evaluate", "nested too deeply"]),
        ("train.jsonl", GOOD + "[" * 99999, ["line 2", "not JSON"]),
        ("train.jsonl", "", ["train.jsonl is empty"]),
        ("train.txt", "What is 2? #### 2", ["train.txt, line 1", "no '||'"]),
        ("test.jsonl", GOOD, ["neither train.jsonl nor train.txt"]),
    ):
        for path in tmp_path.iterdir():
            path.unlink()
        (tmp_path / name).write_text(text)
        with pytest.raises(UserError) as error:
            read_problems(str(tmp_path), "train")
        assert all(part in str(error.value) for part in parts), error.value


def test_bad_options_are_one_line():
    for options, parts in (
        ({"answers": "prose"}, ["set answers to equations or solution, not 'prose'"]),
        ({"held_out": "dev"}, ["set held_out to new-numbers-dev, new-numbers, new-templates or test, not 'dev'"]),
        ({"scoring": "lenient"}, ["set scoring to strict or flexible"]),
        ({"vocab_size": 100}, ["set vocab_size between 263 and 1000000, not 100"]),
        ({"answers": "solution"}, ["new-numbers-dev needs copies", "set held_out to new-templates or test"]),
        ({"resample": 0}, ["new-numbers-dev needs copies"]),
    ):
        with pytest.raises(UserError) as error:
            make_task("gsm8k", **options)
        assert all(part in str(error.value) for part in parts), error.value


def test_folders_and_the_hub(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"^no folder 'nowhere': give one with train.jsonl and test.jsonl[^\n]*$"):
        GSM8K("nowhere").examples(torch.arange(1), "train")
    monkeypatch.setitem(sys.modules, "datasets", None)  # as where it is not installed
    with pytest.raises(ValueError, match=r"^openai/gsm8k needs the package datasets: [^\n]*pass a folder[^\n]*$"):
        GSM8K().examples(torch.arange(1), "train")

    class Hub:
        def load_dataset(self, name, config, split):
            if split == "test":
                logging.getLogger("huggingface_hub.utils._http").warning("retrying in 1 s")
                raise ConnectionError("no route\nto the hub")
            return [{"question": "What is 2 and 3?", "answer": "<<2+3=5>>5\n#### 5"}]

    monkeypatch.setitem(sys.modules, "datasets", Hub())
    (found,) = read_problems("openai/gsm8k", "train")
    assert found.written("equations") == "<<2+3=5>> #### 5"
    with pytest.raises(
        ValueError, match=r"^openai/gsm8k cannot be loaded \(no route to the hub\): pass a folder[^\n]*$"
    ):
        read_problems("openai/gsm8k", "test")
    assert caplog.text == "", "one line is enough"


def test_making_the_tokens_is_told(folder, tmp_path, capsys):
    """A line says that it is done once, and where; a second time there is nothing to say."""
    for said in (True, False):
        _ = GSM8K(str(folder), cache=str(tmp_path / "cache"), resample=3, vocab_size=300).vocabulary
        assert (f"made once and kept in {tmp_path / 'cache'}" in capsys.readouterr().err) == said
