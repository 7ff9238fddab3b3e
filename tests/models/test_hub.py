"""The Hugging Face hub, without it: what is asked of huggingface_hub, and what becomes of its answers."""

import shutil
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError

from tests.evaluation.by_hand import LEARNED, heuristic
from tests.models.test_order_model import MODEL_FILES, PLAIN, WHOLE, build
from unmask.errors import UserError
from unmask.evaluation.records import append_records
from unmask.models.hub import HOME
from unmask.models.order_model import OrderModel
from unmask.recipe import load_recipe
from unmask.training.run_folder import store_recipe


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub with one owner, which keeps its models in folders."""
    kept = SimpleNamespace(folder=tmp_path / "hub", created=[])

    class Api:
        def __init__(self, **_):
            pass

        def create_repo(self, repo_id, *, private, exist_ok):
            kept.created.append((repo_id, private, exist_ok))
            (kept.folder / repo_id).mkdir(parents=True, exist_ok=True)
            return Address(f"https://huggingface.co/{repo_id}")

        def upload_folder(self, *, repo_id, folder_path, commit_message):
            assert "\n" not in commit_message
            shutil.copytree(folder_path, kept.folder / repo_id, dirs_exist_ok=True)

    class Address(str):
        @property
        def repo_id(self):
            return self.removeprefix("https://huggingface.co/")

    def snapshot_download(repo_id, *, allow_patterns, library_name):
        if not (kept.folder / repo_id).exists():
            response = SimpleNamespace(headers={}, request=None)
            raise RepositoryNotFoundError("404 Client Error.\n\nRepository Not Found", response=response)
        for path in (kept.folder / repo_id).iterdir():
            assert path.name in (*allow_patterns, "README.md")
        return str(kept.folder / repo_id)

    monkeypatch.setattr("huggingface_hub.HfApi", Api)
    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    monkeypatch.chdir(tmp_path)
    return kept


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_model_goes_to_the_hub_and_comes_back(hub):
    saved = build(WHOLE)
    assert saved.push_to_hub("me/small", private=True) == "https://huggingface.co/me/small"
    assert hub.created == [("me/small", True, True)]
    assert names(hub.folder / "me" / "small") == sorted([*MODEL_FILES, "manifest.json", "README.md"])
    loaded = OrderModel.from_pretrained("me/small")
    for name, tensor in saved.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


def test_a_folder_comes_before_the_hub(hub):
    build(WHOLE).push_to_hub("me/small")
    build(PLAIN).save_pretrained("me/small")
    assert OrderModel.from_pretrained("me/small").config == PLAIN


def test_the_card_says_what_it_is_and_its_code_runs(hub):
    for config, what in ((WHOLE, "A masked diffusion model with a learned"), (PLAIN, "A masked diffusion model, of")):
        build(config).push_to_hub("me/small", about="## More")
        card = (hub.folder / "me" / "small" / "README.md").read_text()
        assert card.startswith("---\nlibrary_name: unmask\n")
        assert f"\n# small\n\n{what}" in card
        assert card.endswith("```\n\n## More")
    build(WHOLE).push_to_hub("me/small")
    code = card.split("```python\n")[1].split("```")[0].replace('"..."', '"two +"').replace("=16", "=3")
    shown: dict = {}
    exec(code, shown)
    assert shown["tokens"].shape == (1, 5)
    assert shown["tokens"][0, :2].tolist() == [2, 3]


def test_the_address_is_that_of_the_package():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["urls"]["Homepage"] == HOME


def test_a_run_goes_with_its_recipe_and_records(hub, ok):
    run = Path("runs/order")
    build(WHOLE).save_pretrained(run)
    recipe = load_recipe("groups", ["order.denoiser_rate=0.0"])
    store_recipe(recipe, run)
    address = "model: https://huggingface.co/me/order\n"
    assert ok("push", run, "me/order") == address
    page = hub.folder / "me" / "order"
    assert "It has not been evaluated." in (page / "README.md").read_text()
    append_records(run / "results.jsonl", [LEARNED, heuristic("margin", 2, score=0.25, ci_low=0.22, ci_high=0.28)])
    assert ok("push", run, "me/order", "--private") == address
    assert [private for _, private, _ in hub.created] == [None, True]
    assert {"recipe.json", "results.jsonl"} < set(names(page))
    card = (page / "README.md").read_text()
    assert "has not been evaluated" not in card
    rows = [line.split(" | ") for line in card.splitlines() if line.startswith("| ")]
    assert [row[3] for row in rows if row[0] == "| margin @ 2"] == ["0.250"]
    assert [row[3] for row in rows if row[0] == "| learned, T = 2"] == [f"{LEARNED.outcome.score:.3f}"]
    assert f"Held-out examples: {LEARNED.spec.num_examples:,}." in card
    assert "learned on a frozen denoiser" in card
    assert "unmask train recipe.toml --out order" in card
    Path("recipe.toml").write_text(card.split("```toml\n")[1].split("```")[0])
    assert load_recipe("recipe.toml") == recipe, "the card holds the whole recipe"


def test_what_the_hub_does_not_give_is_one_line(hub, monkeypatch, call):
    def refused(name):
        with pytest.raises(UserError) as caught:
            OrderModel.from_pretrained(name)
        return str(caught.value)

    said = "me/nothing is no folder here, and the Hugging Face hub did not give it (there is none that you may read)"
    assert refused("me/nothing").startswith(said)

    def no_network(*_, **__):
        raise LocalEntryNotFoundError("Got: ConnectError\nPlease check your internet connection")

    monkeypatch.setattr("huggingface_hub.snapshot_download", no_network)
    assert "(Got: ConnectError): check the name (owner/name), the network" in refused("me/nothing")
    for path in (Path("me/nothing"), "nothing", "./nothing", "/nothing", "a/b/c", "../nothing"):  # never asked for
        assert "no such folder" in refused(path)
    build(PLAIN).save_pretrained("run")
    store_recipe(load_recipe("groups"), Path("run"))
    monkeypatch.setattr("huggingface_hub.HfApi.create_repo", no_network)
    code, _, err = call("push", "run", "me/order")
    assert code == 2
    assert err.startswith("unmask: me/order could not be written on the Hugging Face hub (Got: ")


def test_device_and_dtype(tmp_path):
    build(WHOLE).save_pretrained(tmp_path)
    model = OrderModel.from_pretrained(tmp_path, device="meta", dtype=torch.bfloat16)
    assert {(weight.device.type, weight.dtype) for weight in model.parameters()} == {("meta", torch.bfloat16)}
    assert {weight.dtype for weight in OrderModel.from_pretrained(tmp_path).parameters()} == {torch.float32}
    half = OrderModel.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert half.generate(torch.tensor([[2, 3]]), max_new_tokens=4).shape == (1, 6)
