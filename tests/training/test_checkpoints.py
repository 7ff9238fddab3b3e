"""Checkpoints as files: whole or not there, and never trusted without their checksum."""

import json
import random
import shutil

import pytest
import torch

from tests.training.small import contents
from unmask import files
from unmask.training import checkpoint as module
from unmask.training.checkpoint import CheckpointError, CheckpointFolder, read_checkpoint

TENSORS = {"weights/a": torch.arange(6.0).reshape(2, 3), "baseline/seen": torch.tensor([True, False])}
FACTS = {"skipped": 2, "recipe": {"seed": 3}, "best": float("-inf")}


@pytest.fixture
def folder(tmp_path):
    return CheckpointFolder(tmp_path / "checkpoints", keep=3)


def save(folder, *updates, stage="order"):
    for update in updates:
        folder.save(stage, update, {**TENSORS, "update": torch.tensor(update)}, FACTS)


def names(folder):
    return sorted(path.name for path in folder.folder.iterdir())


def test_what_was_saved_is_read(folder):
    save(folder, 20)
    found = folder.newest("order")
    assert found.path.name == "order-00000020"
    assert found.tensors.keys() == TENSORS.keys() | {"update"}
    for name, tensor in TENSORS.items():
        assert torch.equal(found.tensors[name], tensor)
        assert found.tensors[name].dtype == tensor.dtype
    assert found.facts["skipped"] == 2
    assert found.facts["recipe"] == {"seed": 3}
    assert found.facts["best"] == float("-inf")
    assert (found.facts["stage"], found.facts["update"]) == ("order", 20)
    assert found.facts["unmask"]


def test_nothing_in_it_can_run_code(folder):
    save(folder, 20)
    assert names(folder) == ["order-00000020"]
    assert sorted(path.name for path in (folder.folder / "order-00000020").iterdir()) == [
        "facts.json",
        "manifest.json",
        "tensors.safetensors",
    ]


def test_the_newest_few_are_kept(folder):
    save(folder, 9, 10, 100, 1000, 20_000_000, 300_000_000)
    assert names(folder) == ["order-00001000", "order-20000000", "order-300000000"]
    assert folder.newest("order").facts["update"] == 300_000_000, "by number, not by name"


def test_stages_do_not_mix(folder):
    save(folder, 5, 6, 7, stage="denoise")
    save(folder, 1)
    assert folder.newest("order").facts["update"] == 1
    assert folder.newest("denoise").facts["update"] == 7
    assert folder.newest("baseline") is None
    folder.remove("denoise")
    assert names(folder) == ["order-00000001"]


FILES = ["tensors.safetensors", "facts.json", "manifest.json"]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("how", ["truncated", "missing"])
def test_a_damaged_one_is_named_and_the_one_before_it_used(folder, name, how, capsys):
    save(folder, 1, 2)
    path = folder.folder / "order-00000002" / name
    data = path.read_bytes()
    if how == "missing":
        path.unlink()
    else:
        path.write_bytes(data[:-3])
    found = folder.newest("order")
    assert found.facts["update"] == 1
    (said,) = capsys.readouterr().err.splitlines()
    assert "order-00000002 is damaged" in said
    assert names(folder) == ["order-00000001", "order-00000002.damaged"], "kept for whoever wants to look at it"


def test_every_flipped_bit_is_noticed(folder):
    """Or makes no difference: there are bits of the manifest that mean nothing."""
    save(folder, 1, 2)
    whole = read_checkpoint(folder.folder / "order-00000002")
    draw = random.Random(0)
    for name in FILES:
        path = folder.folder / "order-00000002" / name
        data = path.read_bytes()
        noticed = 0
        for _ in range(150):
            flipped = bytearray(data)
            flipped[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
            path.write_bytes(flipped)
            try:
                found = read_checkpoint(path.parent)
            except CheckpointError:
                noticed += 1
            else:
                assert name == "manifest.json"
                assert found.facts == whole.facts
                assert all(torch.equal(found.tensors[key], whole.tensors[key]) for key in whole.tensors)
        path.write_bytes(data)
        assert noticed == 150 or (name == "manifest.json" and noticed > 100)


def test_all_damaged_is_none(folder, capsys):
    save(folder, 1, 2)
    for path in folder.folder.iterdir():
        (path / "facts.json").write_text("{}")
    assert folder.newest("order") is None
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_a_checkpoint_of_another_version_is_not_read(folder):
    save(folder, 1)
    path = folder.folder / "order-00000001"
    facts = json.loads((path / "facts.json").read_text())
    (path / "facts.json").write_text(json.dumps({**facts, "format_version": 99}))
    files.list_files(path, "facts.json")
    with pytest.raises(CheckpointError, match="format version 99"):
        read_checkpoint(path)


def test_one_of_another_version_is_not_taken_for_a_damaged_one(folder, monkeypatch):
    """Begun with a newer unmask: a run is not begun anew for that, nor are its checkpoints touched."""
    with monkeypatch.context() as patch:
        patch.setattr(module, "FORMAT_VERSION", 99)
        save(folder, 1, 2)
    before = contents(folder.folder)
    with pytest.raises(CheckpointError, match="resume with the unmask that wrote it, or start over with --force"):
        folder.newest("order")
    assert contents(folder.folder) == before


def test_what_was_taken_back_is_dropped(folder):
    """A stage that stops for numbers that are not finite saves the state before them: nothing newer may be found."""
    save(folder, 8, 9, 10, 11)
    save(folder, 7)
    assert names(folder) == ["order-00000007"]
    save(folder, 8, stage="denoise")
    assert names(folder) == ["denoise-00000008", "order-00000007"]


@pytest.mark.parametrize("where", ["save_file", "fingerprint", "sync"])
def test_a_full_disk_leaves_the_last_good_one(folder, monkeypatch, where):
    save(folder, 1)
    before = contents(folder.folder)
    owner = module if where == "save_file" else files
    original = getattr(owner, where)

    def full(*arguments):
        original(*arguments)
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(owner, where, full)
        with pytest.raises(CheckpointError) as caught:
            save(folder, 2)
    message = str(caught.value)
    assert "order-00000002 could not be written (No space left on device)" in message
    assert "the last good one is" in message
    assert "order-00000001" in message
    if where != "sync":  # the last sync comes after the rename
        assert contents(folder.folder) == before
    assert folder.newest("order").facts["update"] == 1


def test_a_folder_that_vanished_does_not_come_back_empty(tmp_path):
    (tmp_path / "run").mkdir()
    folder = CheckpointFolder(tmp_path / "run" / "checkpoints")
    save(folder, 1)
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"could not be written \(No such file or directory\)"):
        save(folder, 2)
    assert not (tmp_path / "run").exists()


def test_what_a_crash_left_is_swept_up(folder):
    save(folder, 1)
    leftover = folder.folder / "order-00000002.partial"
    leftover.mkdir()
    (leftover / "tensors.safetensors").write_bytes(b"half")
    assert folder.newest("order").facts["update"] == 1
    save(folder, 2)
    assert names(folder) == ["order-00000001", "order-00000002"]


def test_everything_is_synced_before_it_is_renamed(folder, monkeypatch):
    """The files, the folder that holds them, and after the rename the folder that holds the name."""
    done = []
    original, rename = files.sync, module.Path.rename
    monkeypatch.setattr(files, "sync", lambda path: (done.append(path.name), original(path)))
    monkeypatch.setattr(module.Path, "rename", lambda self, to: (done.append(f"to {to.name}"), rename(self, to))[1])
    save(folder, 1)
    assert done == [
        *("tensors.safetensors", "facts.json", "manifest.json.partial", "to manifest.json", "order-00000001.partial"),
        *("to order-00000001", "checkpoints"),
    ]


def test_a_file_is_replaced_whole(tmp_path, monkeypatch):
    path = tmp_path / "recipe.json"
    files.write_text(path, "old")
    monkeypatch.setattr(module.Path, "rename", lambda self, to: (_ for _ in ()).throw(OSError(5, "no")))
    with pytest.raises(OSError, match="no"):
        files.write_text(path, "new")
    assert path.read_text() == "old"
