"""What `unmask sample` shows: word problems as text, step by step, and the same as a picture."""

import io
import re
import xml.dom.minidom
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch
from rich.console import Console
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordPiece
from torch import nn

import unmask
from tests.commands import exit_code
from tests.studies.test_study import DENOISER
from tests.tasks.test_gsm8k import TEST, many, write_jsonl
from tests.test_display import HIDDEN
from unmask.decoding.policies import LeftToRight, TopProbability
from unmask.decoding.tokens import TokenChoice
from unmask.errors import UserError
from unmask.evaluation.records import read_run
from unmask.report.orders import orders_of
from unmask.report.trace import END, MASK, PROMPT, Span, animation, picture, print_legend, spans, wrapped, write
from unmask.tasks.gsm8k.gsm8k import GSM8K
from unmask.tasks.puzzles.groups import Groups
from unmask.tasks.sudoku.sudoku import Sudoku
from unmask.tasks.text.text import Text

ANSWER = "<<40-4=36>> #### 36"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("problems")
    write_jsonl(folder / "train.jsonl", many())
    write_jsonl(folder / "test.jsonl", TEST)
    (folder / "denoiser.toml").write_text(DENOISER)
    return folder


@pytest.fixture(scope="module")
def task(folder):
    # The same as in the recipe.
    options = {"resample": 10, "vocab_size": 300, "prompt_length": 100, "response_length": 40}
    return GSM8K(str(folder), **options, held_out="test", cache=str(folder / "cache"))


class Knowing(nn.Module):
    """Writes the tokens it is given, whatever it sees."""

    def __init__(self, task, tokens):
        super().__init__()
        self.mask_token_id = len(task.vocabulary)
        self.logits_of = nn.functional.one_hot(tokens, len(task.vocabulary)).double() * 20

    def hidden(self, tokens, attention_mask=None):
        padding = (
            0 if attention_mask is None else int((~attention_mask).sum())
        )  # on the left in the task, on the right here
        return self.logits_of.roll(-padding, 0).expand(len(tokens), -1, -1)

    def logits(self, hidden):
        return hidden


def text(frame):
    return "".join(span.text for span in frame)


def written(task, steps=4, rule=None, tokens=None):
    tokens = task.examples(torch.tensor([0]), "test").tokens[0] if tokens is None else tokens
    return write(Knowing(task, tokens), task, rule or LeftToRight(), steps, 0, TokenChoice(), seed=0)


def test_a_problem_reads_as_a_text(task):
    writing = written(task)
    assert (writing.question, writing.wanted) == (TEST[0].question, ANSWER)
    steps = ["<<40-4=36>> #### 3" + MASK * 30, ANSWER + "░" * 9 + MASK * 20, ANSWER + "░" * 19 + MASK * 10]
    assert [text(frame) for frame in writing.frames] == [*steps, f"{ANSWER}░×29"], "of eleven tokens and 29 ends"
    assert text(writing.result) == text(writing.frames[-1])
    assert (writing.num_steps, writing.valid, writing.policy) == (4, True, "left-to-right")


def test_a_wrong_answer_is_not_valid(task):
    other = task.examples(torch.tensor([1]), "test").tokens[0]
    tokens = torch.cat([task.examples(torch.tensor([0]), "test").tokens[0][:100], other[100:]])
    assert not written(task, tokens=tokens).valid


def test_every_token_knows_its_step(task):
    """Ten of forty positions a step, from the left."""
    writing = written(task)
    for i, frame in enumerate(writing.frames):
        steps = [span.step for span in frame for _ in range(int((re.findall(r"×(\d+)", span.text) or [1])[0]))]
        assert len(steps) == 40
        assert steps[:10] == [0] * 10
        assert [step is None for step in steps] == [n >= 10 * (i + 1) for n in range(40)]


def test_how_tokens_are_shown(task):
    """The bytes of the tokenizer never are; a few ends of sequence are marks, many one mark with their number."""
    ids = task.text_tokenizer.encode(" pears\nnow ").ids
    shown = spans(task, [*ids, 0, len(task.vocabulary), 0, 0], [*([2] * len(ids)), 3, PROMPT, 4, 5])
    assert text(shown) == " pears↵now ░·░░"
    assert shown[-2:] == [Span("░", 4, is_end=True), Span("░", 5, is_end=True)]
    assert spans(task, [0] * 9, [1, 3, *([2] * 7)]) == [Span("░×9", 3, is_end=True)]
    puzzle = Groups(groups=2, group_size=2, symbols=3)
    assert text(spans(puzzle, [0, 3, 2, 1], [0, PROMPT, 1, 1])) == "a · c b"
    rows = ["1 ·  3 4", "3 4  1 2", "2 1  4 3", "4 3  2 1"]
    grid = spans(Sudoku(box=2), [0, 4, 2, 3, 2, 3, 0, 1, 1, 0, 3, 2, 3, 2, 1, 0], [0] * 16)
    assert [text(line) for line in wrapped(grid, 40)] == rows


def test_the_picture(task):
    """Well-formed, every step of both rules in it, and nothing of the tokenizer's alphabet."""
    both = [written(task), written(task, rule=TopProbability())]
    drawing = picture(both)
    lines = xml.dom.minidom.parseString(drawing).getElementsByTagName("text")
    shown = ["".join(part.firstChild.data for part in line.childNodes) for line in lines]
    assert shown[1:3] == [TEST[0].question, f"answer: {ANSWER}"]
    assert shown[3] == "left-to-right: 4 steps, right"
    assert shown[4:8] == [f"{i:>2}  {text(frame)}" for i, frame in enumerate(both[0].frames, start=1)]
    assert shown[8] == "top-prob: 4 steps, right"
    assert len(shown) == 13
    assert "Ġ" not in drawing
    long = replace(both[0], frames=[[Span("word ", 0)] * 50], question="words " * 40, wanted="steps " * 40 + "\n#### 4")
    rows = xml.dom.minidom.parseString(picture([long])).getElementsByTagName("text")
    assert max(sum(len(part.firstChild.data) for part in row.childNodes) for row in rows) <= 104
    answer = ["".join(part.firstChild.data for part in row.childNodes) for row in rows][4:8]
    assert answer[0].startswith("answer: steps steps")
    assert answer[-1] == "#### 4"


class Hostile(Groups):
    """Its tokens steer a terminal; with `text` they are shown as a text, after a question."""

    vocabulary = ("\x1b]0;owned\x07", "\u202e\u2028", "\n\x9b2J")


def test_nothing_that_is_written_steers_the_terminal():
    puzzle = Hostile(groups=2, group_size=2, symbols=3)
    assert text(spans(puzzle, [0, 1, 2], [0, 1, 1])) == r"\x1b]0;owned\x07 \u202e\u2028 ↵\x9b2J"
    vars(puzzle)["text"] = lambda tokens: "".join(puzzle.vocabulary[token] for token in tokens)
    writing = written(puzzle, steps=2)
    assert not re.search(HIDDEN, writing.question + writing.wanted + text(writing.result))
    drawing = picture([replace(writing, question="\x1b[2J\x00?", policy="\uffff")])
    xml.dom.minidom.parseString(drawing)
    assert r"\x1b[2J\x00?" in drawing


def test_the_legend_of_many_steps_is_one_line(task, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    print_legend(Console(highlight=False), replace(written(task), budget=72))
    assert capsys.readouterr().out == "step 1 2 3 4 5 6 ... 72  prompt  · mask  ░ end of sequence\n"
    legend = xml.dom.minidom.parseString(picture([replace(written(task), budget=72)])).getElementsByTagName("text")[0]
    shown = "".join(part.firstChild.data for part in legend.childNodes)
    assert shown.startswith("step  1 7 14 20 ")
    assert "72   · masked" in shown
    assert len(shown) <= 104


def test_an_animation_shows_every_step_in_place(task):
    """As it is made: all masks first, then the same frames as those that are kept; in the end nothing of it is left."""
    seen: list[str] = []
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=120, highlight=False)
    denoiser = Knowing(task, task.examples(torch.tensor([0]), "test").tokens[0])
    with animation(console, pause=0) as show:

        def both(writing):
            seen.append(text(writing.result))
            show([writing])

        kept = write(denoiser, task, LeftToRight(), 4, 0, TokenChoice(), seed=0, on_step=both)
    assert seen == [MASK * 40, *map(text, kept.frames)]
    shown = screen.getvalue()
    assert "0 steps" in shown
    assert "4 steps" in shown
    assert shown.count("\x1b[1A\x1b[2K") > 4, "lines above are drawn again, not added"
    assert shown.rstrip().endswith("\x1b[2K"), "and removed"


def test_watching_on_the_command_line(run, ok, refused, monkeypatch):
    """On a terminal: rules one below the other, what is finished stays; then the result, once."""
    frames: list[list[tuple[str, int]]] = []
    monkeypatch.setattr("rich.console.Console", partial(Console, force_interactive=True))
    shown = nullcontext(lambda written: frames.append([(w.policy, w.num_steps) for w in written]))
    monkeypatch.setattr("unmask.report.trace.animation", lambda console: shown)
    words = ["sample", run, "--split", "test", "--policy", "left-to-right", "--policy", "top-prob", "--steps", "2"]
    out = ok(*words, "--num", "1", "--watch")
    first = [[("left-to-right", i)] for i in range(3)]
    assert frames == [*first, *([("left-to-right", 2), ("top-prob", i)] for i in range(3)), []]
    assert out == ok(*words, "--num", "1")
    assert "leave out --watch" in refused(*words, "--watch", "--find", "wrong,wrong")


@pytest.fixture(scope="module")
def run(folder):
    options = ["--set", f"task.folder={folder}", "--set", f"task.cache={folder / 'cache'}"]
    assert exit_code("train", folder / "denoiser.toml", "--out", folder / "run", *options, "--cpu") == 0
    return folder / "run"


def test_problems_in_the_viewer(run, task):
    """The padded prompt is a text of its own, the response has the tokens, with those of the right answer beside it."""
    unmask.evaluate(run, policies=["top-prob"], steps=[2], examples=2, split="test", cpu=True)
    (problem, _), heat = (found := orders_of(run, read_run(run), 2))["examples"], found["heat"]
    assert problem["prompt"] == TEST[0].question
    assert problem["given"] == [False] * 40
    assert "".join(problem["reference"]).startswith(f"{ANSWER}{END}")
    (policy,) = problem["policies"]
    model = unmask.OrderModel.from_pretrained(run)
    written = write(model.denoiser, task, TopProbability(), 2, 0, TokenChoice(temperature=0.0), 0)
    tokens = [
        now if now != 0 else before for before, now in zip(*(step["tokens"] for step in policy["steps"]), strict=True)
    ]
    assert "".join(tokens).rstrip(END) == text(written.result).partition(END)[0].replace("↵", "\n")
    assert (heat["first"], heat["groups"]) == (100, [list(range(100, 140))])


def test_on_the_command_line(run, tmp_path, ok, monkeypatch):
    words = ["sample", run, "--split", "test", "--example", "1", "--policy", "left-to-right", "--policy", "top-prob"]
    shown = ok(*words, "--steps", "3", "--trace", "--svg", tmp_path / "deep" / "a.svg")
    assert TEST[1].question in " ".join(shown.split())
    assert TEST[0].question not in " ".join(shown.split())
    assert shown.count("3 steps, wrong") == 2
    assert "Ġ" not in shown
    assert "░ end of sequence" in shown
    assert len(re.findall(r"^  [123]   ", shown, flags=re.M)) == 6
    monkeypatch.setenv("COLUMNS", "40")
    narrow = ok(*words, "--steps", "3", "--trace").splitlines()[1:]
    told = narrow[narrow.index("left-to-right:") :]
    assert max(map(len, told)) <= 40
    assert len(told) > 2 * 5, "the response of 40 tokens takes two lines"
    assert all(line.startswith("  ") or line.endswith(":") for line in told), "lines that go on are indented too"
    assert "left-to-right: </tspan>" in (tmp_path / "deep" / "a.svg").read_text()


def test_a_picture_replaces_only_a_picture(run, tmp_path, ok, refused):
    words, path = ["sample", run, "--num", "1", "--steps", "1", "--svg"], tmp_path / "a.svg"
    for _ in range(2):
        ok(*words, path)
    path.write_text("<svg>a drawing of my own</svg>")
    assert f"{path} exists and is no picture of unmask" in refused(*words, path)
    assert path.read_text() == "<svg>a drawing of my own</svg>"


def test_examples_are_found_by_what_comes_of_them(run, ok, refused, monkeypatch):
    """The first ones where the two rules are as asked; the model is untrained, so the verdict is planted."""
    words = ["sample", run, "--split", "test", "--policy", "top-prob", "--policy", "left-to-right", "--steps", "2"]
    shown = ok(*words, "--find", "wrong,wrong", "--num", "1")
    assert shown.count("2 steps, wrong") == 2
    assert "in none of 2 examples are top-prob, left-to-right right,wrong" in refused(*words, "--find", "right,wrong")

    def verdict(self, tokens, examples):
        seen.append(str(examples.tokens.tolist()))
        return torch.tensor([seen.count(seen[-1]) > 1])

    seen: list[str] = []
    monkeypatch.setattr(GSM8K, "valid", verdict)  # the first rule is wrong, the second right
    shown = ok(*words, "--find", "wrong,right")
    assert shown.count("answer:") == 2
    seen.clear()
    refused(*words, "--find", "right,wrong")
    assert len(seen) == 2, "a rule that is not as asked is the last one tried"
    for wrong in ("right", "right,right,right", "right,maybe"):
        assert "--find takes right or wrong for each --policy" in refused(*words, "--find", wrong)
    assert "examples are numbered from 0 to 1, got 7" in refused(*words, "--example", "7")
    assert "no held-out split 'tset'; did you mean 'test'?" in refused("sample", run, "--split", "tset")


def test_bytes_are_shown_as_text():
    """The bytes of a letter are one span; where one is missing they are no letter."""
    task, mask = Text(prompt="q", response="a"), 257
    e, t = list("é".encode()), list(b"t")
    assert spans(task, [*t, *e, *t, 256], [0, 2, 1, 0, 3]) == [
        *(Span("t", 0), Span("é", 2), Span("t", 0), Span("░", 3, is_end=True)),
    ]
    for broken, shown in (([e[0], mask], "\ufffd·"), ([mask, e[1]], "·\ufffd"), ([e[0], 256], "\ufffd░")):
        assert text(spans(task, [*t, *broken, *t], [0] * 4)) == f"t{shown}t"
    smile = list("\U0001f600".encode())
    assert text(spans(task, smile + smile[:3], [0] * 7)) == "\U0001f600" + "\ufffd" * 3


def test_words_keep_the_spaces_between_them(tmp_path):
    words = Tokenizer(WordPiece({"un": 0, "##mask": 1, "it": 2}, unk_token="it"))
    words.decoder = decoders.WordPiece()
    words.save(str(tmp_path / "words.json"))
    task = Text(tokenizer=str(tmp_path / "words.json"))
    assert text(spans(task, [0, 1, 2, 2, 3, 2], [0] * 6)) == "unmask it it·it"


def test_a_prompt_of_the_users_own(run, ok, refused, task):
    """As if it were that of a held-out problem, but that nobody knows the answer."""
    question = TEST[0].question
    words = ["sample", run, "--policy", "top-prob", "--steps", "2", "--split", "test"]
    shown = ok(*words, "--prompt", question, "--prompt", "How many?")
    assert question in " ".join(shown.split())
    assert "1  How many?" in shown
    assert shown.count("2 steps\n") == 2
    assert "answer:" not in shown
    as_held_out = ok(*words, "--example", "0")
    assert as_held_out.splitlines()[-1].replace(", wrong", "") in shown
    long = refused(*words, "--prompt", "why " * 200)
    assert re.search(r"the prompt has \d+ tokens, and task gsm8k has room for 100: give a shorter prompt", long)
    for other in (["--find", "right"], ["--example", "0"]):
        assert "--prompt takes the place of examples" in refused(*words, "--prompt", "x", *other)
    with pytest.raises(UserError, match="'x' is no prompt of task groups: write 16 of a b c d e f g h and _ with"):
        Groups().prompted("x")
    clues = Groups().prompted("a _ " * 8)
    assert clues.tokens[:, ::2].eq(0).all()
    assert clues.response.tolist() == [[False, True] * 8]
    drawing = picture([replace(written(task), valid=None, wanted="")])
    assert "left-to-right: </tspan>" in drawing
    assert "answer:" not in drawing


def test_a_prompt_of_a_text(tmp_path):
    """With pairs it stands before the response, in texts without prompts it is their beginning."""
    pair = Text(prompt="q", response="a", length=6, response_length=2).prompted("hé")
    assert pair.tokens.tolist() == [[256, *"hé".encode(), 256, 256]]
    assert pair.response.tolist() == [[False] * 4 + [True] * 2]
    assert pair.attention_mask.tolist() == [[False] + [True] * 5]
    whole = Text(length=4).prompted("abc")
    assert whole.tokens.tolist() == [[*b"abc", 0]]
    assert whole.response.tolist() == [[False] * 3 + [True]]
    assert whole.attention_mask.all()
    for task in (Text(length=4), Text(prompt="q", response="a", length=4, response_length=1)):
        with pytest.raises(UserError, match="the prompt has 4 tokens, and task text has room for 3"):
            task.prompted("abcd")
