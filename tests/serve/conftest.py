import pytest

from tests.evaluation.test_text_run import make_runs
from tests.serve.serving import served
from tests.training.small import TINY_RECIPE
from unmask.recipe import load_recipe
from unmask.training.run import train


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """FOLDER/puzzle; FOLDER/pairs, with an order for any price and number of steps; FOLDER/texts, without an order."""
    pytest.importorskip("starlette", reason="pip install 'unmask[serve]'")
    folder = tmp_path_factory.mktemp("served")
    (folder / "tiny.toml").write_text(TINY_RECIPE)
    train(load_recipe(folder / "tiny.toml"), folder / "puzzle", cpu=True)
    make_runs(folder)
    return folder


@pytest.fixture(scope="session")
def models(runs):
    return served(runs / "pairs", runs / "texts", runs / "puzzle")
