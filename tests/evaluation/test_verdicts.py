"""Streaming: an evaluation that was interrupted anywhere ends with the same record, order and verdicts."""

import dataclasses
import itertools
import json
import math
import random

import numpy as np
import pytest
import torch

from tests.evaluation.by_hand import flat
from tests.evaluation.test_evaluate import TASK, always, exact_conditionals, learned_model, recorded, same
from tests.training.small import json_lines
from unmask.decoding.generate import Engine
from unmask.decoding.policies import IID, Learned, TopProbability
from unmask.decoding.tokens import TokenChoice
from unmask.evaluation import evaluate as evaluation
from unmask.evaluation.records import append_records, read_run
from unmask.evaluation.verdicts import Chunk, VerdictFile
from unmask.jsonl import ResultsError, append_jsonl, read_jsonl, unsealed
from unmask.tasks.puzzles.groups import Groups
from unmask.tasks.puzzles.latin_square import LatinSquare

EXAMPLES = 47  # 4 chunks of 10 and one of 7


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(evaluation, "CHUNK", 10)


class Crash(Exception):
    pass


def crash_after(sequences):
    """An advance callback that raises when so many sequences are done: the chunk that they belong to is lost."""
    done = 0

    def advance(more):
        nonlocal done
        done += more
        if done >= sequences:
            raise Crash

    return advance


def crash_between(monkeypatch, path, sequences):
    """Raise as soon as so many sequences are on disk: between a chunk and the next."""
    append = VerdictFile.append

    def crashing(self, chunk):
        append(self, chunk)
        if sum(len(line["valid"]) for line in json_lines(path)) >= sequences:
            raise Crash

    monkeypatch.setattr(VerdictFile, "append", crashing)


def run(path, model, policy, budget=2, task=TASK, examples=EXAMPLES, **options):
    """With the file read anew, as a second process would."""
    verdicts = None if path is None else VerdictFile(path)
    return recorded(model, policy, budget, task, examples, verdicts=verdicts, **options)


def assert_same(found, expected):
    assert same(flat(found), flat(expected))
    assert np.array_equal(found.verdicts.valid, expected.verdicts.valid)
    assert np.array_equal(found.verdicts.steps, expected.verdicts.steps)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "verdicts.jsonl"


@pytest.fixture(scope="module")
def model():
    return learned_model(selection="bernoulli")[0]


def counted(monkeypatch):
    """The numbers of sequences that engines are asked for from here on."""
    sizes, generate = [], Engine.generate

    def counting(self, prompts, **options):
        sizes.append(len(prompts))
        return generate(self, prompts, **options)

    monkeypatch.setattr(Engine, "generate", counting)
    return sizes


# --- interrupted ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["learned", "iid"])
def test_after_a_crash_the_rest_is_done(tmp_path, monkeypatch, model, rule):
    """The record, the pictured orders (of which chunks 1 to 3 have a part) and every verdict are the same.

    A crash while a chunk is generated loses that chunk, one after its line is written loses nothing.
    """
    policy = Learned(model.selector) if rule == "learned" else IID()
    whole = run(None, model, policy)
    assert 0 < whole.outcome.distinct < EXAMPLES * whole.outcome.score, "some answers occur twice, in different chunks"
    assert len(whole.verdicts.reveal_step) == evaluation.PICTURED
    assert rule == "iid" or whole.outcome.nothing_selected > 0
    for between, crash in itertools.product((False, True), (1, 11, 35, 47)):
        path = tmp_path / f"{between}-{crash}.jsonl"
        with monkeypatch.context() as patched:
            if between:
                crash_between(patched, path, crash)
            with pytest.raises(Crash):
                run(path, model, policy, advance=crash_after(math.inf if between else crash))
        done = min(EXAMPLES, -(-crash // 10) * 10) if between else (crash - 1) // 10 * 10
        assert [line["first"] for line in (json_lines(path) if path.exists() else [])] == list(range(0, done, 10))
        told = []
        with monkeypatch.context() as patched:
            sizes = counted(patched)
            assert_same(run(path, model, policy, advance=told.append), whole)
        assert sum(sizes) == EXAMPLES - done
        assert not done or told[0] == done, "progress counts what was there"
        assert all(told), "and says nothing of nothing"
        assert sum(told) == EXAMPLES
        assert [line["first"] for line in json_lines(path)] == [0, 10, 20, 30, 40]


def test_a_crash_in_the_middle_of_a_line(path, model):
    """Wherever the last line is cut off: it is dropped silently and written again."""
    policy = Learned(model.selector)
    whole = run(path, model, policy)
    text = path.read_bytes()
    starts = [0, *(i + 1 for i, byte in enumerate(text) if byte == 10)]
    for cut in (1, starts[1] + 1, starts[2] + 200, starts[3] - 2, len(text) - 2):
        path.write_bytes(text[:cut])
        assert_same(run(path, model, policy), whole)
        lines = json_lines(path)
        assert [line["first"] for line in lines] == [0, 10, 20, 30, 40]
        assert [line["valid"] for line in lines] == [json.loads(row)["valid"] for row in text.splitlines()]


def test_a_line_that_lacks_only_its_newline_is_whole(path, monkeypatch, model):
    whole = run(path, model, IID())
    path.write_bytes(path.read_bytes()[:-1])
    sizes = counted(monkeypatch)
    assert_same(run(path, model, IID()), whole)
    assert sizes == []
    run(path, model, TopProbability())
    assert len(json_lines(path)) == 10


def test_the_seconds_are_those_of_all_chunks(path, model):
    with pytest.raises(Crash):
        run(path, model, IID(), advance=crash_after(21))
    lines = json_lines(path)
    assert len(lines) == 2
    path.write_text("".join(json.dumps({**line, "seconds": 1e6}) + "\n" for line in lines))
    assert 2e6 < run(path, model, IID()).outcome.seconds < 3e6


def test_again_evaluates_anew_and_replaces(path, monkeypatch, model):
    first = run(path, model, IID())
    before, sizes = path.read_bytes(), counted(monkeypatch)
    assert run(path, model, IID()) == first, "the seconds too"
    assert (sizes, path.read_bytes()) == ([], before)
    assert_same(run(path, model, IID(), again=True), first)
    assert sum(sizes) == EXAMPLES
    with pytest.raises(Crash):
        run(path, model, IID(), again=True, advance=crash_after(25))
    assert len(VerdictFile(path).of(*ran(first)).valid) == 20, "the old verdicts are void, the new ones unfinished"
    sizes.clear()
    assert_same(run(path, model, IID()), first)
    assert sum(sizes) == EXAMPLES - 20


def test_a_task_with_a_prompt_keeps_no_answers(path):
    task = LatinSquare()
    stub = always([0])
    stub.denoiser.law = lambda row: torch.full((len(row), len(task.vocabulary)), 0.25).double()
    stub.denoiser.mask_token_id = len(task.vocabulary)
    whole = run(None, stub, IID(), task=task, examples=12)
    with pytest.raises(Crash):
        run(path, stub, IID(), task=task, examples=12, advance=crash_after(11))
    assert len(json_lines(path)) == 1
    assert_same(run(path, stub, IID(), task=task, examples=12), whole)
    assert all(line["answers"] is None for line in json_lines(path))


def test_the_exact_sampler_stays_diverse_when_resumed(path):
    """`distinct` is counted over all chunks: as many as in one go, and fewer than the chunks' own numbers together."""
    stub = exact_conditionals(TASK)
    whole = run(None, stub, TopProbability(), 4)
    with pytest.raises(Crash):
        run(path, stub, TopProbability(), 4, advance=crash_after(21))
    assert len(json_lines(path)) == 2
    assert_same(run(path, stub, TopProbability(), 4), whole)
    assert whole.outcome.distinct == 9
    assert sum(len(set(line["answers"])) for line in json_lines(path)) > 9


# --- what is another evaluation ---------------------------------------------------------------------------------------


def test_a_changed_selector_never_meets_old_verdicts(path, monkeypatch):
    """On the same denoiser, with the same form and budget: only the selector's weights tell them apart."""
    model, policy = learned_model()
    first = run(path, model, policy)
    with torch.no_grad():
        model.selector.out.weight.neg_()
    sizes = counted(monkeypatch)
    second = run(path, model, policy)
    assert sum(sizes) == EXAMPLES
    assert second.spec.denoiser == first.spec.denoiser
    assert second.key != first.key
    assert second.verdicts.reveal_step != first.verdicts.reveal_step


def test_whatever_is_asked_otherwise_is_done(path, monkeypatch, uncompiled):
    model, other = learned_model()[0], learned_model()[0]
    with torch.no_grad():
        other.denoiser.head.weight[0, 0] += 1
    run(path, model, IID())
    sizes = counted(monkeypatch)
    for change in (
        {"seed": 1},
        {"examples": 40},
        {"label": "other"},
        {"budget": 3},
        {"policy": TopProbability()},
        {"choice": TokenChoice(temperature=0.5)},
        {"choice": TokenChoice(temperature=1.0, top_p=0.9)},
        {"choice": TokenChoice(temperature=1.0, top_k=2)},
        {"choice": TokenChoice(temperature=1.0, guidance=0.5)},
        {"choice": TokenChoice(temperature=1.0, eos_token_id=0, min_length=1)},
        {"compile": True},
        {"task": Groups(groups=2, group_size=2, symbols=3, seed=1)},
        {"model": other},
    ):
        spec = {"model": model, "policy": IID(), "budget": 2, **change}
        sizes.clear()
        run(path, **spec)
        assert sum(sizes) == change.get("examples", EXAMPLES), change
        sizes.clear()
        run(path, **spec)
        run(path, model, IID())
        assert sizes == [], "both are kept"


def test_a_record_says_all_that_was_asked(model):
    choice = TokenChoice(0.7, 0.9, 2, 0.5, eos_token_id=0, min_length=1, stop_at_eos=True)
    spec = run(None, model, IID(), choice=choice).spec
    assert (spec.temperature, spec.top_p, spec.top_k, spec.guidance) == (0.7, 0.9, 2, 0.5)
    assert spec.eos_policy == "min-length:1,stop"
    keys = [run(None, model, IID(), choice=TokenChoice(temperature)).key for temperature in (1, 1.0)]
    assert keys[0] == keys[1], "a whole number is a number like any other"


# --- the verdicts of a record -----------------------------------------------------------------------------------------


def ran(record):
    """By what the verdicts of a record are found."""
    return record.key, record.outcome.device, record.outcome.compile


def test_the_verdicts_of_a_record(tmp_path, model):
    both = [run(tmp_path / "verdicts.jsonl", model, policy) for policy in (IID(), Learned(model.selector))]
    append_records(tmp_path / "results.jsonl", both)
    for found, expected in zip(read_run(tmp_path), both, strict=True):
        assert_same(found, expected)
        assert found.verdicts.valid.mean() == found.outcome.score
    file, (key, device, compiled) = VerdictFile(tmp_path / "verdicts.jsonl"), ran(both[0])
    assert file.of("0123456789ab", device, compiled) is None
    assert file.of(key, "NVIDIA H200", compiled) is None, "of another machine"
    assert file.of(key, device, not compiled) is None
    (tmp_path / "verdicts.jsonl").unlink()
    assert [record.verdicts for record in read_run(tmp_path)] == [None, None]


def test_the_verdicts_of_an_unfinished_evaluation_belong_to_no_record(path, tmp_path, model):
    append_records(tmp_path / "results.jsonl", [run(path, model, IID())])
    path.write_text("\n".join(path.read_text().splitlines()[:3]) + "\n")
    assert read_run(tmp_path)[0].verdicts is None


def test_chunks_that_do_not_follow_are_passed_over(path, monkeypatch, model):
    """A line taken out by hand, or two processes at once: what follows the gap is done again, nothing counts twice."""
    whole = run(path, model, IID())
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:2], *lines[3:]]) + "\n")
    sizes = counted(monkeypatch)
    assert_same(run(path, model, IID()), whole)
    assert sum(sizes) == EXAMPLES - 20
    path.write_text("\n".join([line for line in lines for _ in range(2)]) + "\n")
    sizes.clear()
    assert_same(run(path, model, IID()), whole)
    assert sizes == []


# --- files ------------------------------------------------------------------------------------------------------------


def damaged(line, **changes):
    return json.dumps({**unsealed(line), **changes})


def test_a_damaged_line_is_named(path, model):
    run(path, model, IID())
    lines = path.read_text().splitlines()
    for line, expected in [
        (lines[1][: len(lines[1]) // 2], "not a JSON object"),
        ("", "not a JSON object"),
        ("[1]", "must be a table"),
        (damaged(lines[1], colour=1), "unknown key 'colour'"),
        (damaged(lines[1], key=None), "key must be a string"),
        (damaged(lines[1], metrics={"a": "01"}), "not what this version writes"),
        (damaged(lines[1], valid="0102"), "not what this version writes"),
        (damaged(lines[1], steps=[1]), "not what this version writes"),
    ]:
        path.write_text("\n".join([lines[0], line, *lines[2:]]) + "\n")
        before = path.read_bytes()
        with pytest.raises(ResultsError) as caught:
            run(path, model, IID())
        assert f"{path}, line 2: " in str(caught.value)
        assert expected in str(caught.value)
        assert path.read_bytes() == before


@dataclasses.dataclass(frozen=True)
class Row:
    number: int
    text: str = ""


def test_an_unfinished_line_is_passed_over_and_written_over(tmp_path):
    for end in ['{"num', '{"number": 3, "text": "', "{", "1", "\xe9".encode().decode("latin-1")]:
        path = tmp_path / "rows.jsonl"
        path.unlink(missing_ok=True)
        append_jsonl(path, [Row(1), Row(2)])
        with path.open("a") as file:
            file.write(end)
        assert [row.number for row in read_jsonl(path, Row)] == [1, 2]
        append_jsonl(path, [Row(3)])
        assert [row.number for row in read_jsonl(path, Row)] == [1, 2, 3]


def test_a_flipped_bit_is_noticed_and_a_line_without_a_checksum_is_read(tmp_path):
    path, draw = tmp_path / "rows.jsonl", random.Random(0)
    append_jsonl(path, [Row(1, "a"), Row(22, "b")])
    whole, rows = path.read_bytes(), read_jsonl(path, Row)
    for _ in range(200):
        flipped = bytearray(whole)
        flipped[draw.randrange(len(whole) - 1)] ^= 1 << draw.randrange(8)  # not the last newline, which may be missing
        path.write_bytes(flipped)
        with pytest.raises(ResultsError, match=r"rows\.jsonl, line \d: "):
            read_jsonl(path, Row)
    path.write_text("".join(f"{json.dumps(dataclasses.asdict(row))}\n" for row in rows))
    assert read_jsonl(path, Row) == rows


def test_fields_with_defaults_may_be_missing(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"number": 1}\n{"number": 2, "text": "a\\nb"}\n')
    assert read_jsonl(path, Row) == [Row(1), Row(2, "a\nb")]
    path.write_text('{"text": "a"}\n')
    with pytest.raises(ResultsError, match=r"line 1: .*'number' is missing"):
        read_jsonl(path, Row)
    path.write_text("")
    assert read_jsonl(path, Row) == []
    append_jsonl(path, [Row(1)])
    assert read_jsonl(path, Row) == [Row(1)]


def test_every_chunk_is_on_disk_before_the_next(path, model):
    """When a sequence is told to be done, so are all chunks before its own: a crash loses no more than one chunk."""
    done = 0

    def advance(more):
        nonlocal done
        done += more
        lines = json_lines(path) if path.exists() else []
        assert sum(len(line["valid"]) for line in lines) == (done - 1) // 10 * 10

    run(path, model, IID(), advance=advance)
    assert done == EXAMPLES
    assert len(json_lines(path)) == 5
    assert {field.name for field in dataclasses.fields(Chunk)} == set(json_lines(path)[0])
