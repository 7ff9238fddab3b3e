"""Texts from files: streaming, the cache, the shuffle, and a run that is resumed in the middle of a shard."""

import json
import math
import os
import sys
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing

from tests.training.small import contents
from unmask.errors import UserError
from unmask.recipe import load_recipe
from unmask.tasks import make_task
from unmask.tasks.text import shards as shards_module
from unmask.tasks.text.shards import Hashes, Visits, read_texts
from unmask.tasks.text.text import Text, byte_tokenizer
from unmask.training.run import train

LINES = [f"line {i} " + "x" * (i * 7 % 23) for i in range(40)]


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still, long before any file was written: to `hash_shards`, all of them are new."""
    now = [0]
    monkeypatch.setattr(shards_module.time, "time_ns", lambda: now[0])
    return now


@pytest.fixture
def shards(tmp_path, clock):
    """Two shards of objects and one of plain lines, with empty lines between."""
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": line, "id": 1}) + "\n\n" for line in LINES[:15]))
    (tmp_path / "b.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in LINES[15:30]))
    (tmp_path / "c.txt").write_text("\n".join(LINES[30:]))
    return [tmp_path / name for name in ("a.jsonl", "b.jsonl", "c.txt")]


def text(tmp_path, **options):
    options = {
        "files": str(tmp_path / "[abc].*"),
        "cache": str(tmp_path / "cache"),
        "length": 16,
        "test_every": 5,
        **options,
    }
    return make_task("text", **options)


def test_every_text_in_its_order_and_a_bad_line_is_named(shards):
    assert [found for (found,), _ in read_texts(shards, ["text"])] == LINES
    whole = shards[1].read_text()
    for line in ('{"text": 3}', "[1]", "{", '{"other": "x"}', "null"):
        shards[1].write_text(f"{whole}\n{line}\n")
        with pytest.raises(UserError, match=r"b\.jsonl, line 17: not an object with a text 'text'"):
            list(read_texts(shards, ["text"]))
    shards[1].write_text(whole, encoding="utf-8-sig")  # as Windows writes it
    assert [found for (found,), _ in read_texts(shards, ["text"])] == LINES
    shards[1].write_bytes(b"\xff\xfe\n")
    with pytest.raises(UserError, match=r"b\.jsonl, line 1: not UTF-8"):
        list(read_texts(shards, ["text"]))


def decoded(task, examples):
    return [
        bytes(row[real].tolist()).decode() for row, real in zip(examples.tokens, examples.attention_mask, strict=True)
    ]


def test_the_examples_are_the_texts(shards, tmp_path):
    task = text(tmp_path)
    task.check()
    train_texts = [line for i, line in enumerate(LINES) if i % 5 != 4]
    pieces = [line[i : i + 16] for line in train_texts for i in range(0, len(line), 16)]
    assert decoded(task, task.examples(torch.arange(len(pieces)), "train")) == pieces
    assert "".join(decoded(task, task.examples(torch.arange(task.test_examples), "test"))) == "".join(LINES[4::5])
    examples = task.examples(torch.arange(5), "train")
    assert torch.equal(examples.response, examples.attention_mask)
    assert task.valid(examples.tokens, examples).all()


def test_the_cache_is_made_once_and_never_stale(shards, tmp_path):
    first = text(tmp_path)
    first.check()
    made = contents(tmp_path / "cache")
    text(tmp_path).check()
    assert contents(tmp_path / "cache") == made
    text(tmp_path, length=8).check()
    assert len(list((tmp_path / "cache").glob("*-t*"))) == 4, "other settings, another cache"
    shards[1].write_text(shards[1].read_text().replace("line 19", "LINE 19"))
    os.utime(shards[1], (0, 0))  # as long as before, and no newer
    other = text(tmp_path)
    ids = torch.arange(first.test_examples)
    before, after = ("".join(decoded(task, task.examples(ids, "test"))) for task in (first, other))
    assert after == before.replace("line 19", "LINE 19") != before


def test_a_damaged_cache_is_made_again(shards, tmp_path):
    """For one flipped bit too, though it was whole when it was read before."""
    text(tmp_path).check()
    made = tokens_in(tmp_path / "cache")
    for name in ("tokens.bin", "offsets.bin", "cache.json"):
        path = next((tmp_path / "cache").glob("*-train")) / name
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
        text(tmp_path).check()
        assert tokens_in(tmp_path / "cache") == made


def tokens_in(cache):
    """All but hashes.json, which knows more the older a file is."""
    return {name: data for name, data in contents(cache).items() if name != "hashes.json"}


def test_the_same_bytes_with_another_meaning_are_another_cache(shards, tmp_path):
    """What a line of a.jsonl means is not what it means in a.txt."""
    first = text(tmp_path, files=str(tmp_path / "a.*"), length=64)
    first.check()
    shards[0].rename(tmp_path / "a.txt")
    other = text(tmp_path, files=str(tmp_path / "a.*"), length=64)
    assert decoded(first, first.examples(torch.tensor([0]), "train")) == [LINES[0]]
    assert decoded(other, other.examples(torch.tensor([0]), "train")) == [json.dumps({"text": LINES[0], "id": 1})]


def test_processes_that_start_together_make_one_cache(shards, tmp_path):
    """As torchrun starts them: each would else write into the files of the others."""
    children = []
    for _ in range(4):
        child = os.fork()
        if child == 0:
            code = 70
            try:
                text(tmp_path).check()
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * 4
    made = tokens_in(tmp_path / "cache")
    text(tmp_path, cache=str(tmp_path / "alone")).check()
    assert made == tokens_in(tmp_path / "alone")


def test_what_was_hashed_is_hashed_again_only_if_it_was_touched(shards, tmp_path, clock, monkeypatch):
    read, digest = [], shards_module.files.fingerprint
    monkeypatch.setattr(shards_module.files, "fingerprint", lambda path: (read.append(path.name), digest(path))[1])

    def hashed():
        read.clear()
        hashes = Hashes(tmp_path / "hashes.json")
        found = [hashes.of(path) for path in shards]
        hashes.save()
        return found

    first = hashed()
    assert hashed() == first
    assert len(read) == 3, "just written: a change within the same tick of the clock would not be seen"
    clock[0] = max(path.stat().st_ctime_ns for path in shards) + 10**10
    assert hashed() == hashed() == first
    assert read == []
    for damage in ("", "[]", "{", '{"x": 3}'):
        (tmp_path / "hashes.json").write_text(damage)
        assert hashed() == first
        assert len(read) == 3
    content = shards[1].read_bytes()
    shards[1].write_bytes(content.replace(b"line 19", b"LINE 19"))
    os.utime(shards[1], (0, 0))
    again = hashed()
    assert read == ["b.jsonl"]
    assert [one == other for one, other in zip(again, first, strict=True)] == [True, False, True]


def test_a_cache_that_was_not_touched_is_not_read_at_every_start(shards, tmp_path, monkeypatch, clock):
    clock[0] = 2**62  # long after any file was written
    text(tmp_path).check()
    monkeypatch.setattr(shards_module.files, "fingerprint", None)
    text(tmp_path).check()


def test_every_row_once_per_epoch():
    for rows, window, bucket in ((100, 30, 0), (100, 30, 4), (7, 100, 2), (64, 8, 1), (1, 1, 0)):
        visits = Visits(rows, window, 3, lambda wanted: wanted * 7919 % 13, bucket)
        epochs = visits.at(np.arange(3 * rows)).reshape(3, rows)
        assert (np.sort(epochs, axis=1) == np.arange(rows)).all()
        if rows > 1:
            assert (epochs[0] != epochs[1]).any()
            assert (epochs[0] != np.arange(rows)).any()
    found = Visits(1000, 100, 0, lambda rows: rows, 0).at(np.arange(1000)).reshape(10, 100)
    assert ((found // 100) == (found[:, :1] // 100)).all(), "the shuffle stays in its window"


def test_a_position_can_be_asked_for_alone():
    """So a run is resumed anywhere, and processes need not agree on a state."""
    whole = Visits(100, 30, 3, lambda rows: rows % 7, 4).at(np.arange(250))
    again = Visits(100, 30, 3, lambda rows: rows % 7, 4)
    for position in np.random.default_rng(0).permutation(250)[:40]:
        assert again.at(np.array([position]))[0] == whole[position]
    assert (Visits(100, 30, 4, lambda rows: rows % 7, 4).at(np.arange(250)) != whole).any(), "another seed"


def test_batches_are_buckets_in_every_epoch():
    """An epoch of 103 ends in the middle of a batch of 4: the next one's buckets begin a place later."""
    found = Visits(103, 103, 0, lambda rows: rows, 4).at(np.arange(104, 104 + 64))
    batches = sorted((batch.min(), batch.max()) for batch in found.reshape(16, 4))
    assert all(one[1] < other[0] for one, other in pairwise(batches)), "sorted, cut, and shuffled"


def test_seeds_stages_and_epochs_differ(shards, tmp_path):
    task = text(tmp_path)
    rows = len(task._splits["train"])
    ids, second = task.order(0, 0, torch.arange(2 * rows)).split(rows)
    assert sorted(ids.tolist()) == sorted(second.tolist()) == list(range(rows)), "every text once an epoch"
    for other in (second, task.order(1, 0, torch.arange(rows)), task.order(0, 1, torch.arange(rows))):
        assert not torch.equal(other, ids)


def test_whatever_the_tokens_depend_on_names_the_cache(tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": "ab ", "other": "ba "}) + "\n" for _ in range(20)))
    words = Tokenizer(WordLevel({"ab": 0, "ba": 1}, unk_token="ba"))
    words.save(str(tmp_path / "words.json"))
    Tokenizer(WordLevel({"ba": 0, "ab": 1}, unk_token="ba")).save(str(tmp_path / "swapped.json"))
    for number, options in enumerate(
        [
            {},
            {"field": "other"},
            {"length": 2},
            {"test_every": 3},
            {"tokenizer": str(tmp_path / "words.json")},
            {"tokenizer": str(tmp_path / "swapped.json")},
        ],
        start=1,
    ):
        text(tmp_path, **options).check()
        assert len(list((tmp_path / "cache").glob("*-train"))) == number, options
        text(tmp_path, **options, window=8, bucket=2).check()
        assert len(list((tmp_path / "cache").glob("*-train"))) == number, "those say nothing about the tokens"


RECIPE = """
threads = 1
[task]
name = "text"
files = "{folder}/[abc].*"
cache = "{folder}/cache"
length = 16
test_every = 5
window = 16
bucket = 4
[model]
width = 16
layers = 1
heads = 2
intermediate = 16
[denoise]
updates = 9
batch = 8
warmup = 1
"""


def test_a_run_is_resumed_in_the_middle_of_an_epoch(shards, tmp_path):
    from tests.training.test_resume import stop_after

    (tmp_path / "text.toml").write_text(RECIPE.format(folder=tmp_path))
    recipe = load_recipe(tmp_path / "text.toml", ["saving.every_updates=2"])
    train(recipe, tmp_path / "alone", cpu=True)
    with pytest.raises(KeyboardInterrupt):
        train(recipe, tmp_path / "run", cpu=True, on_update=stop_after(7)[0])
    train(recipe, tmp_path / "run", cpu=True)
    assert contents(tmp_path / "run")["model.safetensors"] == contents(tmp_path / "alone")["model.safetensors"]


def test_what_cannot_be_used_is_one_line(shards, tmp_path):
    for options, words in (
        ({"files": "nowhere/*.jsonl"}, "no file is called"),
        ({"length": 0}, "length"),
        ({"tokenizer": "nowhere.json"}, "no tokenizer.json"),
        ({"test_every": 1000}, "none is left for the test split: give more, or lower task.test_every"),
    ):
        with pytest.raises(UserError, match=words):
            text(tmp_path, **options).check()
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"\Ano cache can be made in .*file \(.*\): set cache to a folder\Z"):
        text(tmp_path, cache=str(tmp_path / "file")).check()


PAIRS = [{"q": f"say {i}", "a": f"{i} é!"} for i in range(20)]


def write_pairs(path, pairs):
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs), encoding="utf-8")


def pairs(tmp_path, **options):
    options = {"files": str(tmp_path / "p.jsonl"), "prompt": "q", "response": "a", "length": 20, **options}
    return text(tmp_path, **{"response_length": 8, **options})


def words_of(tmp_path, *names):
    """A tokenizer.json with a token for each word, which puts <cls> before a whole text."""
    words = Tokenizer(WordLevel({name: i for i, name in enumerate(["?", "<cls>", *names])}, unk_token="?"))
    words.pre_tokenizer = WhitespaceSplit()
    words.post_processor = TemplateProcessing("<cls> $A", special_tokens=[("<cls>", 1)])
    words.save(str(tmp_path / "words.json"))
    return str(tmp_path / "words.json")


def test_a_byte_is_a_token_and_every_text_comes_back():
    for marks in ((), ("<eos>",)):
        tokenizer = byte_tokenizer(marks)
        every = "".join(map(chr, range(0x250))) + "\u4e2d\U0001f600"
        assert tokenizer.encode(every).ids == list(every.encode())
        assert tokenizer.decode(list(every.encode()), skip_special_tokens=False) == every
        assert tokenizer.get_vocab_size() == 256 + len(marks)


def test_a_prompt_is_given_and_a_response_is_written(tmp_path):
    write_pairs(tmp_path / "p.jsonl", PAIRS)
    task = pairs(tmp_path)
    task.check()
    assert (task.test_examples, task.eos_token_id, len(task.vocabulary)) == (4, 256, 257)
    assert task.layout == (tuple(range(12)), tuple(range(12, 20)))
    kept = [pair for i, pair in enumerate(PAIRS) if i % 5 != 4]
    for split, wanted in (("train", kept), ("test", PAIRS[4::5])):
        examples = task.examples(torch.arange(len(wanted)), split)
        assert examples.response.tolist() == [[False] * 12 + [True] * 8] * len(wanted)
        for row, pair in enumerate(wanted):
            prompt = examples.attention_mask[row] & ~examples.response[row]
            assert prompt.nonzero()[-1] == 11, "padded on the left"
            assert task.text(examples.tokens[row][prompt].tolist()) == pair["q"]
            response = examples.tokens[row][12:].tolist()
            assert task.text(response) == pair["a"]
            size = len(pair["a"].encode())
            assert response[size:] == [256] * (8 - size)


def test_pairs_through_a_tokenizer_have_nothing_around_them(tmp_path):
    write_pairs(tmp_path / "p.jsonl", [{"q": "a b", "a": "b a"}] * 10)
    path = words_of(tmp_path, "a", "b", "</s>")
    examples = pairs(tmp_path, tokenizer=path, length=6, response_length=4).examples(torch.tensor([0]), "train")
    assert examples.tokens.tolist() == [[2, 3, 3, 2, 4, 4]]
    with pytest.raises(UserError, match=r"\Atask text: the tokenizer has no end: set eos to its token"):
        pairs(tmp_path, tokenizer=path, eos="end").check()


def test_pairs_that_do_not_fit_are_counted_and_left_out(tmp_path, capsys):
    fitting = {"q": "q" * 12, "a": "a" * 7}
    write_pairs(tmp_path / "p.jsonl", [fitting, {"q": "q" * 13, "a": "a"}, {"q": "q", "a": "a" * 8}, fitting, fitting])
    for _ in range(2):  # made, and read again
        task = pairs(tmp_path)
        assert [task._count(split) for split in ("train", "test")] == [2, 1]
        said = "2 of the train pairs left out as too long (prompts have 12 tokens, responses 8 with EOS)"
        assert capsys.readouterr().err == f"task text: {said}\n"
    write_pairs(tmp_path / "p.jsonl", [fitting] * 9)
    with pytest.raises(UserError, match=r"none is left for the train split: 8 of the train pairs left out as too long"):
        pairs(tmp_path, response_length=7).check()


def test_bad_pairs_are_one_line(shards, tmp_path):
    for pair, words in (
        ({"q": "x", "a": " "}, r"p\.jsonl, line 21: the response 'a' is empty: give it a text, or drop the line"),
        ({"q": "x"}, r"p\.jsonl, line 21: not an object with a text 'a' \(its keys: q\): name the right key"),
        ({"a": "x"}, r"p\.jsonl, line 21: not an object with a text 'q'"),
    ):
        write_pairs(tmp_path / "p.jsonl", [*PAIRS, pair])
        with pytest.raises(UserError, match=words):
            pairs(tmp_path).check()
    with pytest.raises(UserError, match="set both, or none"):
        pairs(tmp_path, response="")
    with pytest.raises(UserError, match=r"c\.txt has no keys: pairs are read from \.jsonl files and folders"):
        pairs(tmp_path, files=str(tmp_path / "c.txt")).check()


def test_the_options_of_pairs_name_the_cache(tmp_path):
    write_pairs(tmp_path / "p.jsonl", [{"q": "x", "a": "y", "text": "z"}] * 20)
    words = {"tokenizer": words_of(tmp_path, "x", "y", "z", "</s>")}
    swapped = {"prompt": "a", "response": "q"}
    for number, options in enumerate(
        [{}, swapped, {"response_length": 9}, {"prompt": "", "response": ""}, words], start=1
    ):
        pairs(tmp_path, **options).check()
        assert len(list((tmp_path / "cache").glob("*-train"))) == number, options


CHECKER = """
import json
from pathlib import Path

Path("imported").touch()
number = 3


def check(prompt, response, reference):
    return (prompt, response, reference) == ("say 4", "4 é!", "4 é!")


def broken(prompt, response, reference):
    return json.loads(response)["a"]


def unsure(prompt, response, reference):
    return 1
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """The current folder has pairs, and a module with checkers."""
    write_pairs(tmp_path / "p.jsonl", PAIRS)
    (tmp_path / "my_checks.py").write_text(CHECKER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    yield tmp_path
    sys.modules.pop("my_checks", None)


def test_a_checker_is_given_the_three_texts(own):
    task = pairs(own, checker="my_checks:check")
    assert not (own / "imported").exists(), "a task that is only named runs no code"
    task.check()
    assert task.has_checker
    assert not pairs(own).has_checker
    examples = task.examples(torch.arange(2), "test")
    assert task.valid(examples.tokens, examples).tolist() == [True, False]
    other = examples.tokens.clone()
    other[0, 12] += 1
    assert task.valid(other, examples).tolist() == [False, False]
    other = examples.tokens.clone()
    other[0, 11] += 1
    assert not task.valid(other, examples).any(), "the prompt was changed"


def test_a_bad_checker_is_one_line(own):
    line = CHECKER.splitlines().index('    return json.loads(response)["a"]') + 1
    examples = pairs(own).examples(torch.arange(1), "test")
    for name, words in (
        ("my_checks:number", "checker 'my_checks:number' is no function"),
        ("my_checks:nothing", "checker 'my_checks:nothing' cannot be imported"),
        ("my_checks", "write a checker of your own as module:function, such as my_module:check"),
        ("my_checks:unsure", "checker 'my_checks:unsure' must return True or False, got 1"),
        ("my_checks:broken", rf"raised JSONDecodeError: .* \({own / 'my_checks.py'}, line {line}\)\Z"),
    ):
        task = pairs(own, checker=name)
        with pytest.raises(UserError, match=words):
            (task.check(), task.valid(examples.tokens, examples))


def test_how_varied_texts_are(tmp_path):
    task = Text()
    assert task.overall(["a b", "a b"]) == {"distinct-2": 0.5, "entropy": round(math.log(2), 6)}
    assert task.overall(["a", "a", ""]) == {"entropy": 0.0}
    examples = task.prompted("abc")
    assert task.codes(torch.full((1, 128), ord("x")), examples) == ["x" * 125]


# --- folders of the package datasets ----------------------------------------------------------------------------------


class Rows(list):
    """As much of datasets.Dataset as is used; its folder has the rows as JSON."""

    @property
    def column_names(self):
        return list(self[0])

    def select_columns(self, names):
        return Rows({name: row[name] for name in names} for row in self)


@pytest.fixture
def saved(tmp_path, monkeypatch):
    """Saves rows to a folder, which a stand-in for the package reads."""

    def load_from_disk(folder):
        return Rows(json.loads((tmp_path / folder / "data-00000-of-00001.arrow").read_text()))

    def save(rows, name="rows"):
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
        (tmp_path / name / "data-00000-of-00001.arrow").write_text(json.dumps(rows))
        (tmp_path / name / "state.json").write_text("{}")
        return str(tmp_path / name)

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_from_disk=load_from_disk))
    return save


def test_the_rows_of_a_dataset_are_pairs(tmp_path, saved):
    write_pairs(tmp_path / "p.jsonl", PAIRS)
    folder, lines = saved([{**pair, "id": 3} for pair in PAIRS]), pairs(tmp_path)
    task, ids = pairs(tmp_path, files=folder), torch.arange(16)
    for split in ("train", "test"):
        assert torch.equal(task.examples(ids, split).tokens, lines.examples(ids, split).tokens)
    saved([{"q": "other", "a": "x"}] * 20)
    assert task.text(pairs(tmp_path, files=folder).examples(ids[:1], "train").tokens[0, 7:12].tolist()) == "other"
    both = text(tmp_path, files=str(tmp_path / "*"), field="q", test_every=2)  # a folder beside other files
    assert {path.name for path in both.shards} == {"p.jsonl", "rows"}


def test_a_dataset_that_cannot_be_used_is_one_line(tmp_path, saved, monkeypatch):
    for rows, words in (
        ([*PAIRS, {"q": "x", "a": ""}], r"rows, row 21: the response 'a' is empty"),
        ([*PAIRS, {"q": "x", "a": None}], r"rows, row 21: not an object with a text 'a'"),
        ([{"q": "x", "b": "y"}], r"rows has no column 'a': it has q, b\Z"),
    ):
        with pytest.raises(UserError, match=words):
            pairs(tmp_path, files=saved(rows)).check()
    (tmp_path / "rows" / "data-00000-of-00001.arrow").write_text("{")
    with pytest.raises(UserError, match=r"datasets cannot read .*rows: "):
        pairs(tmp_path, files=str(tmp_path / "rows")).check()
    saved(PAIRS, "both/train")
    saved(PAIRS, "both/test")
    with pytest.raises(UserError, match="both has the splits test, train: give one of these folders"):
        pairs(tmp_path, files=str(tmp_path / "both")).check()
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"is read by the package datasets: pip install 'unmask\[datasets\]'\Z"):
        pairs(tmp_path, files=str(tmp_path / "both" / "train")).check()


def test_a_folder_that_the_package_itself_saved(tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list(PAIRS).save_to_disk(str(tmp_path / "rows"))
    write_pairs(tmp_path / "p.jsonl", PAIRS)
    tasks = [pairs(tmp_path, files=str(tmp_path / name)) for name in ("rows", "p.jsonl")]
    rows, lines = (task.examples(torch.arange(16), "train").tokens for task in tasks)
    assert torch.equal(rows, lines)


# --- chat templates ---------------------------------------------------------------------------------------------------

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}> {{ m.content }} {% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"
)


def chat_folder(tmp_path, template, **more):
    """A folder as transformers saves a tokenizer, with a chat template where there is one."""
    folder = tmp_path / "chat"
    folder.mkdir(exist_ok=True)
    words = Tokenizer.from_file(words_of(tmp_path, "<user>", "<bot>", "a", "b", "</s>", "<end>"))
    words.save(str(folder / "tokenizer.json"))
    values = {"eos_token": "<end>", **({"chat_template": template} if template else {}), **more}
    (folder / "tokenizer_config.json").write_text(json.dumps(values))
    return str(folder)


def test_a_prompt_goes_through_the_chat_template(tmp_path):
    write_pairs(tmp_path / "p.jsonl", [{"q": "a b", "a": "b a"}] * 10)
    folder = chat_folder(tmp_path, TEMPLATE)
    for tokenizer in (folder, f"{folder}/tokenizer.json"):
        task = pairs(tmp_path, tokenizer=tokenizer, chat=True, length=9, response_length=4)
        examples = task.examples(torch.tensor([0]), "train")
        assert task.eos_token_id == 7, "the chat's own, though the tokenizer also has </s>"
        assert examples.tokens.tolist() == [[7, 2, 4, 5, 3, 5, 4, 7, 7]], "<user> a b <bot> | b a <end> <end>"
        given = task.prompted("b")
        assert given.tokens[0][given.attention_mask[0] & ~given.response[0]].tolist() == [2, 5, 3]
    plain = pairs(tmp_path, tokenizer=folder, eos="<end>", length=9, response_length=4)
    assert plain.examples(torch.tensor([0]), "train").tokens.tolist() == [[7, 7, 7, 4, 5, 5, 4, 7, 7]]
    chat_folder(tmp_path, TEMPLATE.replace("<bot>", "<bot> <bot>"))
    other = pairs(tmp_path, tokenizer=folder, chat=True, length=9, response_length=4)
    assert other.examples(torch.tensor([0]), "train").tokens[0, :5].tolist() == [2, 4, 5, 3, 3], "another cache"


def test_a_chat_without_a_template_is_one_line(tmp_path):
    write_pairs(tmp_path / "p.jsonl", PAIRS)
    for template, words in (
        ("", r"\Atask text: no chat template lies beside .*chat: give a chat model's tokenizer, or no chat\Z"),
        ("{{ raise_exception('no system') }}", "the chat template beside .* fails: no system"),
    ):
        with pytest.raises(UserError, match=words):
            pairs(tmp_path, tokenizer=chat_folder(tmp_path, template), chat=True).check()
    with pytest.raises(UserError, match="chat = true is for pairs: set prompt and response"):
        pairs(tmp_path, chat=True, prompt="", response="", tokenizer="x")
    with pytest.raises(UserError, match=r"chat = true needs a chat model's tokenizer: set task\.tokenizer"):
        pairs(tmp_path, chat=True).check()


# --- infilling --------------------------------------------------------------------------------------------------------


def test_a_span_is_written_and_the_text_around_it_is_given(shards, tmp_path):
    task, whole = text(tmp_path, form="infill"), text(tmp_path)
    task.check()
    count = task._count("train")
    ids = torch.arange(count)
    found, plain = task.examples(ids, "train"), whole.examples(ids, "train")
    assert torch.equal(found.tokens, plain.tokens)
    assert torch.equal(found.attention_mask, plain.attention_mask)
    assert len(list((tmp_path / "cache").glob("*-train"))) == 1, "bytes have nothing around them: the same cache"
    n, size = found.attention_mask.sum(-1), found.response.sum(-1)
    assert (size >= 1).all()
    assert (size <= (n // 2).clamp(min=1)).all()
    assert (found.response & ~found.attention_mask).sum() == 0
    edges = found.response.long().diff(dim=-1, prepend=torch.zeros(count, 1), append=torch.zeros(count, 1))
    assert (edges.abs().sum(-1) == 2).all(), "one span"
    given = found.attention_mask & ~found.response
    assert given[:, 0].any(), "some have a text on their left"
    assert not given[:, 0].all()
    again = task.examples(ids + count, "train")
    assert torch.equal(again.tokens, found.tokens)
    assert not torch.equal(again.response, found.response), "another span in the next epoch"
    order, plain_order = (task.order(0, 0, torch.arange(2 * count)) for task in (task, whole))
    assert torch.equal(order % count, plain_order)
    assert order[count:].min() >= count


def test_a_text_with_gaps_of_the_users_own(tmp_path):
    task = Text(form="infill", length=8)
    asked = task.prompted("a<mask><mask>é<mask>")
    assert asked.response.int().tolist() == [[0, 1, 1, 0, 0, 1, 0, 0]]
    assert asked.attention_mask.int().tolist() == [[1] * 6 + [0] * 2]
    assert task.text(asked.tokens[0][asked.attention_mask[0] & ~asked.response[0]].tolist()) == "aé"
    with pytest.raises(UserError, match=r"\Awrite <mask> in --prompt for each token"):
        task.prompted("abc")
    with pytest.raises(UserError, match="the prompt has 9 tokens, and task text has room for 8"):
        task.prompted("abcdefgh<mask>")
    with pytest.raises(UserError, match="for texts without a prompt"):
        pairs(tmp_path, form="infill")
    with pytest.raises(UserError, match="set form to whole or infill"):
        Text(form="fill")


def test_a_span_is_never_one_of_the_marks_of_a_tokenizer(tmp_path):
    (tmp_path / "a.txt").write_text("a b\n" * 10)
    path = words_of(tmp_path, "a", "b")
    for form, tokens in (("whole", [1, 2, 3, 0]), ("infill", [2, 3, 0, 0])):
        task = text(tmp_path, tokenizer=path, length=4, form=form)
        assert task.examples(torch.tensor([0]), "train").tokens.tolist() == [tokens], "<cls> is before a whole text"


def test_the_checker_of_a_span_sees_where_it_stands(own):
    (own / "p.txt").write_text("abcdef\n" * 10)
    (own / "my_checks.py").write_text("seen = []\ndef check(*texts):\n    seen.append(texts)\n    return True\n")
    task = text(own, files="p.txt", form="infill", length=6, checker="my_checks:check")
    examples = task.examples(torch.arange(2), "test")
    assert task.valid(examples.tokens, examples).all()
    for (prompt, response, reference), row in zip(sys.modules["my_checks"].seen, examples.response, strict=True):
        assert response == reference == "".join(letter for letter, here in zip("abcdef", row, strict=True) if here)
        assert prompt == "abcdef".replace(response, "<mask>")


def test_from_training_to_the_report(own, call, ok, refused):
    """Without a checker nothing is said of validity; with one, only who trusts it runs it."""
    recipe = RECIPE.replace("[abc].*", "p.jsonl").replace("length = 16", 'length = 20\nprompt = "q"\nresponse = "a"')
    (own / "pairs.toml").write_text(recipe.format(folder=own), encoding="utf-8")
    ok("train", "pairs.toml", "--out", "free", "--cpu")
    options = ["--cpu", "--policy", "iid", "--policy", "top-prob", "--steps", "2", "--examples", "4"]
    shown = ok("evaluate", "free", *options)
    assert "task.checker" in shown
    assert "entropy" in shown
    assert "valid" not in shown
    assert "area" not in shown
    assert "2 steps\n" in ok("sample", "free", "--num", "1", "--steps", "2")
    for page in ("html", "md"):
        ok("report", "free", "--format", page)
        text = (own / "free" / f"report.{page}").read_text(encoding="utf-8")
        assert "valid" not in text.partition("<script")[0] + text.rpartition("</script>")[2]
    code, _, err = call("evaluate", "free", "--cpu", "--curve", "--examples", "4")
    assert code == 2
    assert "has no checker: give it one" in err
    assert "--find needs a checker" in refused("sample", "free", "--find", "right")
    checked = ["--set", "task.checker=my_checks:check"]
    shown = ok("train", "pairs.toml", "--out", "checked", "--cpu", *checked)
    assert "--trust-task" in shown
    (own / "imported").unlink()
    sys.modules.pop("my_checks")
    for command in (["evaluate", "checked", *options], ["sample", "checked"]):
        assert "names 'my_checks:check', which would import" in refused(*command)
    assert not (own / "imported").exists()
    shown = ok("evaluate", "checked", *options, "--trust-task")
    assert " valid " in shown
    assert "task.checker" not in shown
