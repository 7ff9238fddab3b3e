"""Molecules from small files; what needs rdkit says so."""

from __future__ import annotations

import gzip
import itertools
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

import unmask
from unmask.errors import UserError
from unmask.runtime import Processes, chosen_device
from unmask.tasks.molecules.chemistry import Gaussian, canonical, described, frechet_distance
from unmask.tasks.molecules.molecules import CACHE_FILE, Molecules
from unmask.tasks.molecules.smiles import parts_of

CHAINS = [f"{a}C{b}{c}N{d}" for a in "CNO" for b in ("", "(C)", "C", "(=O)") for c in "CNO" for d in ("", "C", "CBr")]


@pytest.fixture
def rdkit():
    return pytest.importorskip("rdkit", reason="pip install 'unmask[molecules]'")


def task_of(folder, text, name="mine.csv", **options):
    path = folder / name
    if name.endswith(".gz"):
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text, encoding="utf-8")
    return Molecules(file=str(path), cache=str(folder), **{"length": 12} | options)


def texts_of(task, split):
    """The molecules of a split, as they read."""
    chosen = task if split == "train" else task.on_split(split)
    rows = chosen.examples(torch.arange(len(chosen._rows(split))), "train" if split == "train" else "test")
    return [chosen.text(row) for row in rows.tokens.tolist()]


def rows_of(task, *texts):
    """[M, L]: these SMILES as tokens."""
    rows = [[task._ids[part] for part in parts_of(text)] for text in texts]
    return torch.tensor([row + [0] * (task.length - len(row)) for row in rows])


@pytest.fixture
def task(tmp_path):
    """All in train, but for two."""
    lines = "".join(f"{text},train\n" for text in [*CHAINS, "C" * 12, "CCl", "c1ccccc1"])
    return task_of(tmp_path, f"SMILES,SPLIT\n{lines}CCO,test\nC1CC1,test_scaffolds\n")


# ---- files and tokens


def test_tokens_by_hand():
    for text, parts in [
        ("C[C@@H](N)Br", ["C", "[C@@H]", "(", "N", ")", "Br"]),
        ("ClC%12=c1[nH]%121", ["Cl", "C", "%12", "=", "c", "1", "[nH]", "%12", "1"]),
        ("BrB/C\\C#N.[Na+]", ["Br", "B", "/", "C", "\\", "C", "#", "N", ".", "[Na+]"]),
        ("C[C é\n", ["C", "[", "C", " ", "é", "\n"]),
    ]:
        assert parts_of(text) == parts


def test_files_of_every_form_say_the_same(tmp_path):
    rows = [*((text, "train") for text in CHAINS), ("CCO", "test")]
    table = [("id", "SMILES", "SPLIT"), *(("C", *row) for row in rows)]
    for number, (name, text) in enumerate(
        [
            ("a.csv", "\n".join(["\ufeffid, Split ,smiles", *(f'"1,2",{split},{text}' for text, split in rows)])),
            ("b.csv.gz", "\r\n".join(["SMILES,SPLIT", *map(",".join, rows), ",train", ""])),
            ("b.tsv", "\n".join(map("\t".join, table))),
            ("s.csv", "\n".join(map(";".join, table))),
            ("c.smi", "\n".join(f"{text}\tname of it" for text in CHAINS)),
            ("d.txt.gz", "\n\n".join(CHAINS)),
        ]
    ):  # fmt: skip
        (folder := tmp_path / str(number)).mkdir()
        found = task_of(folder, text, name)
        train, test = (texts_of(found, split) for split in ("train", "test"))
        if "sv" in name:
            assert (train, test) == (CHAINS, ["CCO"])
        else:
            assert 0 < len(test) < 30
            assert sorted([*train, *test]) == sorted(CHAINS)


def test_splits_follow_from_the_molecule(tmp_path):
    many = ["".join(atoms) for atoms in itertools.product("CNOS", repeat=6)]
    task = task_of(tmp_path, "\n".join(many), "all.txt")
    splits = {split: set(texts_of(task, split)) for split in ("train", "dev", "test")}
    assert sum(map(len, splits.values())) == len(set().union(*splits.values())) == len(many)
    assert len(splits["dev"]) == pytest.approx(41, abs=20)  # five standard deviations or so
    assert len(splits["test"]) == pytest.approx(410, abs=100)
    (tmp_path / "half").mkdir()
    half = task_of(tmp_path / "half", "\n".join(many[::-2]), "half.txt")
    for split, found in splits.items():
        assert set(texts_of(half, split)) == found & set(many[::-2])


def test_an_example_is_a_molecule_with_eos_behind_it(task, monkeypatch):
    assert task.vocabulary == ("<eos>", "(", ")", "1", "=", "Br", "C", "Cl", "N", "O", "c")
    assert (task.test_examples, task.eos_token_id, task.unconditional) == (1, 0, False)
    examples = task.examples(torch.arange(3), "test")
    assert examples.tokens.tolist() == [[6, 6, 9] + [0] * 9] * 3
    assert examples.response.all()
    assert examples.attention_mask.all()
    assert texts_of(task, "scaffolds") == ["C1CC1"]
    ids = torch.tensor([5, 2**40 + 1, 0])
    together, again = task.examples(ids, "train").tokens, replace(task)
    for i in range(3):
        assert torch.equal(again.examples(ids[i : i + 1], "train").tokens[0], together[i])
    monkeypatch.setattr("unmask.tasks.molecules.molecules.canonical", list)  # rdkit need not be there
    task.check()


def test_what_is_unknown_or_too_long_is_left_out_and_said_once(tmp_path, capfd):
    lines = "C&C,train\nCCS,test\nCCC,train\nNCN,train\nCCCC,test\nCCCCCCCCCC,train\n[,train\n"
    task = task_of(tmp_path, f"SMILES,SPLIT\n{lines}", length=4)
    assert sorted(texts_of(task, "train")) == ["CCC", "NCN"]
    assert texts_of(task, "test") == ["CCCC"]
    said = capfd.readouterr().err
    unknown = "left out: 3 with characters or atoms that are unknown"
    assert said.count(unknown) == 1, "S is in no training molecule"
    assert said.count("1 of 4 molecules are longer than length 4 and left out") == 1
    assert task.vocabulary == ("<eos>", "C", "N")
    assert replace(task).vocabulary == task.vocabulary
    said = capfd.readouterr().err
    assert said.count(unknown) == 1, "from the cache too"
    assert "made once" not in said


def test_tokens_are_bytes(tmp_path):
    task = task_of(tmp_path, "".join(f"[{n}C]\n" * (1 + (n < 200)) for n in range(400)), "many.txt")
    assert len(task.vocabulary) == 256
    assert task._tokens[1]["train"].ids.dtype == np.uint8
    assert set(texts_of(task, "train")) == set(task.vocabulary[1:]), "the most frequent ones"


def test_a_damaged_cache_is_made_again(tmp_path, task):
    before = task.examples(torch.arange(5), "train").tokens
    (file,) = tmp_path.glob(f"*/{CACHE_FILE}")
    file.write_bytes(file.read_bytes()[:-1])
    assert torch.equal(replace(task).examples(torch.arange(5), "train").tokens, before)


def test_moses_is_read_from_its_package(tmp_path, monkeypatch):
    data = tmp_path / "moses" / "dataset" / "data"
    data.mkdir(parents=True)
    (tmp_path / "moses" / "__init__.py").write_text("import what_nobody_has")
    monkeypatch.syspath_prepend(tmp_path)
    for split, text in {"train": "CC\nNC\nCN", "test": "CCC"}.items():
        (data / f"{split}.csv.gz").write_bytes(gzip.compress(f"SMILES\n{text}".encode()))
    with pytest.raises(UserError, match=r"task molecules: MOSES .* pip install --no-deps molsets==0\.3\.1"):
        Molecules(cache=str(tmp_path)).examples(torch.arange(1), "train")
    (data / "test_scaffolds.csv.gz").write_bytes(gzip.compress(b"SMILES\nCCN"))
    task = Molecules(cache=str(tmp_path))
    found = [texts_of(task, split) for split in ("train", "test", "scaffolds")]
    assert found == [["CC", "NC", "CN"], ["CCC"], ["CCN"]]
    assert "moses" not in sys.modules


def test_what_is_wrong_with_a_file_is_said_in_one_line(tmp_path, monkeypatch):
    for name, text, said in [
        ("a.csv", "id,smile\n1,C", "a.csv has no column SMILES, only id, smile: name the column so"),
        ("b.csv", "", "b.csv has no column SMILES, only none"),
        (
            "c.csv",
            "SMILES,SPLIT\nC,train\nC,valid",
            "c.csv, line 3: unknown SPLIT 'valid': use train, test, test_scaff",
        ),
        ("d.txt", "&\n?\n", "has no molecule to train on: all 2 have unknown characters: write them as SMILES"),
        ("h.txt", "\n", "has no molecule to train on: give more molecules"),
        ("e.csv", "SMILES\n" + '"' + "C" * 200_000, "e.csv cannot be read (field larger"),
        ("f.txt", "CCCCCCCCCCCCCCCCCCCC\n" * 20, "no molecule is left for train: set length higher"),
    ]:
        with pytest.raises(UserError, match=r"\Atask molecules: [^\n]+\Z") as error:
            task_of(tmp_path, text, name).examples(torch.arange(1), "train")
        assert said in str(error.value)
    (tmp_path / "g.csv.gz").write_bytes(b"no gzip")
    for name, said in [("g.csv.gz", "Not a gzipped file"), ("nowhere.csv", "No such file"), ("", "Is a directory")]:
        with pytest.raises(UserError, match=rf"\Atask molecules: .*{said}.*: correct file\Z"):
            Molecules(file=f"{tmp_path}/{name}", cache=str(tmp_path)).examples(torch.arange(1), "train")
    task = task_of(tmp_path, "SMILES,SPLIT\nCC,train\nCN,train\n")
    with pytest.raises(UserError, match=r"no molecule is left for scaffolds: give more molecules\Z"):
        task.on_split("scaffolds").examples(torch.arange(1), "test")
    monkeypatch.setattr("unmask.tasks.molecules.molecules.canonical", list)  # rdkit need not be there
    with pytest.raises(UserError, match=r"no molecule is left for test: give more molecules\Z"):
        task.check()  # before anything is trained
    task = task_of(tmp_path, f"SMILES,SPLIT\nCC,train\n{'C' * 13},test\nCC,test_scaffolds\n")
    with pytest.raises(UserError, match=r"left for test: set length higher, or choose another held_out\Z"):
        task.check()
    for options, said in [({"held_out": "tset"}, "set held_out to dev, test or scaffolds"), ({"fcd": 1}, "at least 2")]:
        with pytest.raises(UserError, match=said):
            Molecules(**options)


# ---- with rdkit, and without


def test_valid_by_hand(task, rdkit, capfd):
    examples = task.examples(torch.arange(1), "test")
    tokens = rows_of(task, "CCO", "c1ccccc1", "C1CC", "C(C", "COC(=O)=O", "", "OC(C)(C)(C)C", "c1cc1", "CC", "CC")
    tokens[8, 3:] = 5  # what stands behind the first EOS does not count
    tokens[9, 5] = len(task.vocabulary)  # a mask does
    right = [True, True, False, False, False, False, False, False, True, False]
    assert task.valid(tokens, examples).tolist() == right
    assert "Error" not in capfd.readouterr().err, "rdkit is silent"
    assert task.codes(tokens, examples)[-3:] == ["c1cc1", "CC", ""]


def test_training_molecules_that_rdkit_cannot_read_are_told(task, tmp_path, rdkit, capfd):
    task.check()
    assert "rdkit" not in capfd.readouterr().err
    task_of(tmp_path, "SMILES,SPLIT\nCC,train\nC(C,train\nCCC(,train\nCCC,test\n").check()
    assert "rdkit cannot read 2 of the first 3 training molecules, such as C(C: they" in capfd.readouterr().err


def test_molecules_count_not_their_spellings(task, rdkit):
    """OCC is CCO, which is in test only; NCCNC is in train as it is written, C1=CC=CC=C1 in its canonical form."""
    assert canonical(["NCCNC"])[0] not in CHAINS
    figures = task.overall(["OCC", "CCO", "C(C)O", "C(", "", "NCCNC", "CBr", "C1CC1", "c1ccccc1", "C1=CC=CC=C1"])
    assert figures == {"valid x unique": 0.5, "unique": 0.625, "novel": 0.6, "characters": 5.375}
    assert task.overall(["C1=CC=CC=C1"])["novel"] == 0
    assert task.overall(["C("]) == {"valid x unique": 0.0}
    assert task.diverse(["OCC", "C(C)O", "C(", "CBr", "CCO"]) == [1 / 3, 1 / 3, 0, 1, 1 / 3]
    assert [task.overall([text])["novel"] for text in ("S", "C" * 12, "C" * 13)] == [1, 0, 1]


def test_a_run_needs_rdkit_and_says_so_before_training(task, monkeypatch, tmp_path):
    recipe = unmask.load_recipe(
        "molecules-small-self",
        [
            *(f"task.file={task.file}", f"task.cache={tmp_path}", "task.length=12", "task.held_out=scaffolds"),
            *("model.width=16", "model.layers=1", "model.intermediate=16", "model.selector.width=8", "threads=1"),
            *("denoise.updates=2", "denoise.batch=4", "order.updates=2", "order.batch=2", "order.budget=4"),
            *("evaluate.examples=1", "evaluate.policies=['iid']", "evaluate.budgets=[2]"),
        ],
    )
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        for module in ("rdkit", "fcd_torch"):
            patch.setitem(sys.modules, module, None)  # to import it is an ImportError
        examples = task.examples(torch.arange(1), "test")
        for use in (lambda: unmask.train(recipe, run, cpu=True), lambda: task.valid(examples.tokens, examples)):
            with pytest.raises(UserError, match=r"\Atask molecules: rdkit .*: pip install 'unmask\[molecules\]'\Z"):
                use()
        assert not run.exists()
        patch.delitem(sys.modules, "rdkit")
        patch.setattr("unmask.tasks.molecules.molecules.canonical", lambda texts: texts)  # as if it were there
        for use in (lambda: described(["CC", "CN"]), replace(task, fcd=2).check):
            with pytest.raises(UserError, match=r"FCD: pip install 'unmask\[molecules\]', or leave fcd out\Z"):
                use()
    pytest.importorskip("rdkit", reason="pip install 'unmask[molecules]'")
    unmask.train(recipe, run, cpu=True)
    for record in unmask.evaluate(run, cpu=True):
        assert (record.outcome.distinct, record.spec.split) == (None, "scaffolds")
        assert 0 <= record.outcome.metrics["valid x unique"] <= record.outcome.score


def test_the_distance_of_gaussians():
    """Of diagonal ones in closed form: sum (m_a - m_b)^2 + (s_a - s_b)^2; of any to itself, 0; both ways alike."""
    generator = np.random.default_rng(0)
    m, n, s, t = generator.random((4, 5))
    a, b = Gaussian(m, np.diag(s**2)), Gaussian(n, np.diag(t**2))
    assert frechet_distance(a, b) == pytest.approx(((m - n) ** 2 + (s - t) ** 2).sum())
    c, d = (Gaussian(generator.random(5), np.cov(generator.random((5, 9)))) for _ in range(2))
    assert frechet_distance(c, d) == pytest.approx(frechet_distance(d, c)) != pytest.approx(frechet_distance(a, b))
    assert frechet_distance(c, c) == pytest.approx(0, abs=1e-12)


def test_fcd_is_that_of_the_package(rdkit, tmp_path):
    fcd = pytest.importorskip("fcd_torch", reason="pip install 'unmask[molecules]'").FCD(canonize=False)
    with pytest.MonkeyPatch.context() as patch:  # with --cpu a GPU is left alone
        patch.setattr("torch.cuda.is_available", lambda: True)
        assert Processes(cpu=True).device == chosen_device() == torch.device("cpu")
        assert Processes().device == chosen_device() == torch.device("cuda")
    theirs = fcd.precalc(CHAINS[:6])
    ours = described(CHAINS[:6])
    assert ours.mean == pytest.approx(theirs["mu"], abs=1e-6)
    assert ours.covariance == pytest.approx(theirs["sigma"], abs=1e-6)
    lines = "".join(f"{text},{split}\n" for split in ("train", "test") for text in CHAINS[:6])
    again = task_of(tmp_path, f"SMILES,SPLIT\n{lines}", "again.csv", fcd=1000)
    near, far = again.overall(CHAINS[5::-1])["FCD"], again.overall(["CCl", "c1ccccc1"])["FCD"]
    assert near == pytest.approx(0, abs=1e-3)
    assert far > 1
    # Of as many true ones, which are not among those of the reference.
    lines = "".join(f"{text},{split}\n" for split in ("train", "test") for text in CHAINS[:4])
    some = task_of(tmp_path, f"SMILES,SPLIT\n{lines}", "some.csv", fcd=2)
    texts = [some.text(row) for row in some.examples(torch.arange(4), "test").tokens.tolist()]
    assert sorted(texts) == sorted(CHAINS[:4])
    figures = some.overall(CHAINS[:2])
    expected = frechet_distance(described(texts[2:]), described(texts[:2]))
    assert figures["FCD of true ones"] == pytest.approx(expected, abs=1e-5)
    assert "FCD of true ones" not in some.overall(CHAINS[:3])


def test_held_out_molecules_are_not_in_the_order_of_their_file(tmp_path):
    """The files of MOSES are sorted; an evaluation of some of them would be one of those that stand first."""
    chains = ["C" * n for n in range(1, 11)]
    task = task_of(tmp_path, "SMILES,SPLIT\n" + "".join(f"{text},test\n{text},train\n" for text in chains), "long.csv")
    ids = torch.arange(10)
    written = [len(task.text(row)) for row in task.examples(ids, "test").tokens.tolist()]
    assert written == [8, 6, 3, 7, 9, 5, 2, 4, 10, 1]
    trained = [len(task.text(row)) for row in task.examples(ids, "train").tokens.tolist()]
    assert trained == list(range(1, 11)), "those are drawn at random anyway"
