"""What is committed under results/ can be read by this version."""

from pathlib import Path

from unmask.evaluation.records import read_records
from unmask.fields import build
from unmask.jsonl import parse_json
from unmask.recipe import Recipe

RESULTS = Path(__file__).parents[1] / "results"


def test_every_committed_record_loads():
    files = [path for path in RESULTS.rglob("*.jsonl") if path.read_text(encoding="utf-8").startswith('{"key": "')]
    files = [path for path in files if not path.stem.endswith("-notes")]
    assert len(files) > 50
    assert sum(len(read_records(path)) for path in files) > 1_700


def test_every_committed_recipe_loads():
    files = [path for path in RESULTS.rglob("*.json") if path.parent.name == "recipes" or path.name == "recipe.json"]
    assert len(files) > 60
    for path in files:
        build(Recipe, parse_json(path.read_text(encoding="utf-8")))
