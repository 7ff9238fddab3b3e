"""Statements: what is collected and what is valid, by hand; splits, spans and metrics on a folder of a few files."""

from __future__ import annotations

import ast
import re
import sysconfig
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from unmask.errors import UserError
from unmask.tasks.statements import CACHE_FILE, Statements, _python_files, is_statement, statements_in

SOURCE = '''"""A docstring."""
import os; import sys
class A(B):
    "One more."
    x: int = 1
    def f(self, a=2):
        if a: return (a +
                      1)
        y = "é"
        z = "\\d" if a is 1 else [a]  # a comment
        while True: pass
        return self.f(z)[0]
        raise
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Three hundred statements, some of them twice, in two files, beside a test, a broken file and a link to none."""
    top = tmp_path_factory.mktemp("source")
    names = [f"value_{number} = call({number}, [{number}])\n" for number in range(300)]
    (top / "b.py").write_text("".join(names[:200]))
    (top / "package").mkdir()
    (top / "package" / "a.py").write_text("".join(names[150:]))
    (top / "package" / "broken.py").write_text("x = (\n")
    (top / "package" / "gone.py").symlink_to(top / "nowhere.py")
    for skipped in ("test", "site-packages"):
        (top / skipped).mkdir()
        (top / skipped / "c.py").write_text("never = 0\n")
    return top


@pytest.fixture
def task(folder, tmp_path):
    return Statements(folder=str(folder), cache=str(tmp_path), length=40)


def row(task, *texts):
    """The tokens [B, L] of statements, with EOS behind them."""
    ids = [task.text_tokenizer.encode(text).ids for text in texts]
    return torch.tensor([some + [0] * (task.length - len(some)) for some in ids])


def texts(task, split):
    rows = task.on_split(split)._splits[split] if split != "train" else task._splits[split]
    return [task.text(tokens) for tokens in rows.tolist()]


# ---- what is a statement


def test_the_simple_statements_of_one_line():
    found = statements_in(SOURCE.encode())
    expected = ["import os", "import sys", "x: int = 1", 'z = "\\d" if a is 1 else [a]', "pass", "raise"]
    assert sorted(found) == sorted([*expected, "return self.f(z)[0]"])
    assert sorted(statements_in(b"\xef\xbb\xbf# -*- coding: utf-8 -*-\r\nx = 1\r\ny = '\xc3\xa9'; z = 2")) == [
        "x = 1",
        "z = 2",
    ]
    assert statements_in("# coding: latin-1\ns = 'é'; t = 3".encode("latin-1")) == ["t = 3"]
    for broken in (b"x = (", b"x = 1\x00", b"# coding: nothing\nx = 1", b"x = '\xff'"):
        assert statements_in(broken) is None


def test_what_is_valid():
    for text in (
        "x = 1",
        "return",
        "yield x",
        "await f()",
        "a, *b = c",
        "x = 1  # why",
        "f(x)",
        "x",
        "break",
        "x = 1;",
    ):
        assert is_statement(text), text
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert is_statement(r'x = "\d"')
        assert is_statement("x = 1or 2")
    for text in (
        *("", "# x", " x = 1", "x = 1; y = 2", "x = (", "x = 'a", "if x: pass", "def f(): pass", "'text'", "1"),
        *("x = 1\x00", "x\ny", "class", "(" * 300 + ")" * 300, "-" * 100_000 + "1", "x" + ".y" * 100_000 + "("),
    ):
        assert not is_statement(text), text[:20]


def test_the_standard_library_without_its_tests():
    top = Path(sysconfig.get_paths()["stdlib"])
    names = [path.relative_to(top).as_posix() for path in _python_files(top)]
    assert {"ast.py", "json/decoder.py"} <= set(names)
    assert not [name for name in names if "/test/" in f"/{name}" or "site-packages" in name]
    source = (top / "ast.py").read_bytes()
    found = statements_in(source)
    assert len(found) > 300
    assert all(text in source.decode() and len(ast.parse(text).body) == 1 for text in found)


# ---- the examples


def test_splits(task, folder):
    splits = {split: texts(task, split) for split in ("train", "dev", "test")}
    everything = [text for some in splits.values() for text in some]
    assert len(everything) == len(set(everything)) == 300
    assert everything != sorted(everything), "the first ones of a split are like the others"
    assert len(splits["train"]) > 250
    assert (task.test_examples, task.on_split("test").test_examples) == (len(splits["dev"]), len(splits["test"]))
    other = replace(task, seed=1)
    assert set(texts(other, "dev")) != set(splits["dev"])
    examples = task.examples(torch.arange(3), "train")
    assert examples.response.all()
    assert examples.attention_mask.all()
    assert [task.text(tokens) for tokens in examples.tokens.tolist()] == splits["train"][:3]
    assert task.text_tokenizer.decode(examples.tokens[0].tolist()).endswith("<eos>")
    assert len(replace(task, length=25)._splits["train"]) < len(splits["train"]), "those that are short enough"


def test_a_span_stands_inside_its_statement(task):
    task = replace(task, form="infill")
    examples = task.examples(torch.arange(400), "train")
    n, size = (examples.tokens > 0).sum(-1), examples.response.sum(-1)
    assert torch.equal(examples.attention_mask, examples.tokens > 0)
    assert (examples.response <= examples.attention_mask).all()
    assert ((size >= 1) & (size <= n // 2)).all()
    assert len(size.unique()) > 8
    first = examples.response.long().argmax(-1)
    assert first.min() == 0
    assert (first + size == n).any()
    assert torch.equal(examples.response.long().diff(dim=-1).abs().sum(-1), 2 - (first == 0).long()), "one piece"
    assert task.valid(examples.tokens, examples).all()
    other = task.examples(torch.arange(400) + len(task._splits["train"]), "train")
    assert torch.equal(other.tokens, examples.tokens)
    assert not torch.equal(other.response, examples.response), "the same statement without another span"


# ---- verdicts


def test_whole_statements_are_read_up_to_their_end(task):
    good, trained = "x = f(1)", texts(task, "train")[0]
    tokens = row(task, good, good, "x = f(1", trained, texts(task, "dev")[0], "", good)
    tokens[1, 12:] = 7  # behind the end
    tokens[6, 30] = len(task.vocabulary)  # a mask that is left
    examples = task.examples(torch.arange(7), "test")
    assert task.valid(tokens, examples).tolist() == [True, True, False, True, True, False, False]
    assert task.metrics(tokens, examples)["novel"].tolist() == [True, True, False, False, True, False, False]
    characters = (2 * len(good) + len(trained) + len(texts(task, "dev")[0])) / 4
    assert task.overall(task.codes(tokens, examples)) == {"unique": 3 / 4, "characters": characters}
    assert task.overall(["", ""]) == {}
    assert task.diverse(["a = 1", "", "b", "a = 1"]) == [0.5, 0, 1, 0.5]


def test_a_span_is_read_in_its_statement(task):
    task = replace(task, form="infill")
    examples = task.examples(torch.arange(1), "test")
    truth = row(task, "x = f(1)")
    examples = replace(examples, tokens=truth, response=truth == truth[0, 6], attention_mask=truth > 0)  # the digit
    assert int(examples.response.sum()) == 1

    def verdicts(text):
        tokens = row(task, text)
        metrics = task.metrics(tokens, examples)
        return bool(task.valid(tokens, examples)), bool(metrics["same"]), bool(metrics["novel"])

    assert verdicts("x = f(1)") == (True, True, True)
    assert verdicts("x = f(y)") == (True, False, True)
    assert verdicts("x = f(()") == (False, False, False)
    assert verdicts("y = f(1)") == (False, False, False), "another prompt"
    truth = row(task, "x = 1 + 2")
    ended = torch.where(torch.arange(task.length) == 5, 0, truth)  # reads x = 1, and loses the rest of its prompt
    examples = replace(examples, tokens=truth, response=ended != truth, attention_mask=truth > 0)
    assert task.valid(truth, examples).all()
    assert not task.valid(ended, examples).any()
    assert task.codes(truth, examples) == [" "]
    assert task.codes(ended, examples) == [""]


# ---- files


def test_statements_are_collected_once(task, tmp_path, monkeypatch, capsys):
    before = task.examples(torch.arange(5), "train").tokens
    assert "300 statements from 3 files, 1 of them do not parse\n" in capsys.readouterr().err
    monkeypatch.setattr("unmask.tasks.statements.statements_in", None)
    assert torch.equal(replace(task).examples(torch.arange(5), "train").tokens, before)
    monkeypatch.undo()
    (file,) = tmp_path.glob(f"*/{CACHE_FILE}")
    file.write_text(file.read_text()[:-1])
    assert torch.equal(replace(task).examples(torch.arange(5), "train").tokens, before)


def test_bad_input_is_one_line(tmp_path):
    (tmp_path / "few" / "empty").mkdir(parents=True)
    (tmp_path / "few" / "a.py").write_text("x = 1")
    for options, said in (
        ({"form": "suffix"}, "set form to whole or infill"),
        ({"held_out": "train"}, "set held_out to dev or test"),
        ({"length": 7}, "set length between 8 and 512"),
        ({"folder": "nowhere"}, "folder 'nowhere' is no folder"),
        ({"folder": str(tmp_path / "few" / "empty")}, "no statement is in the 0 Python files of"),
        ({"folder": str(tmp_path / "few")}, "no statement of at most 64 characters is left for dev: set length higher"),
    ):
        with pytest.raises(UserError, match=re.escape(said)):
            Statements(cache=str(tmp_path / "cache"), **options).examples(torch.arange(1), "train")


@pytest.mark.parametrize("form", ["whole", "infill"])
def test_from_training_to_a_sample(folder, tmp_path, form, ok):
    options = {
        "task.folder": folder, "task.cache": tmp_path / "cache", "task.form": form, "threads": 1,
        "model.width": 16, "model.layers": 1, "model.intermediate": 16, "model.selector.width": 8,
        "denoise.updates": 2, "denoise.batch": 4, "order.updates": 1, "order.batch": 2, "order.trajectories": 2,
    }  # fmt: skip
    overrides = [word for key, value in options.items() for word in ("--set", f"{key}={value}")]
    run = str(tmp_path / "run")
    ok("train", "statements-small-self", "--out", run, "--cpu", *overrides)
    ok("evaluate", run, "--examples", "5", "--policy", "learned", "--policy", "eb:0.5", "--steps", "3", "--cpu")
    out = ok("sample", run, "--policy", "top-prob", "--num", "1", "--steps", "2")
    assert '"diverse": [' in Path(run, "verdicts.jsonl").read_text()
    if form == "infill":  # the characters around the span are shown with it
        task = Statements(form=form, folder=str(folder), cache=str(tmp_path / "cache"), length=32)
        example = task.examples(torch.tensor([0]), "test")
        first = int(example.response[0].long().argmax())
        assert out.splitlines()[1].strip().startswith(task.text(example.tokens[0, :first].tolist()).strip())
