"""The real command of lm-evaluation-harness, offline, on a task of two local files."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tomllib
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

import pytest

from tests.evaluation.test_text_run import PAIRS, make_runs
from unmask.evaluation.text_run import TextRun

PYPROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))
TASKS = {
    "says": """
output_type: generate_until
doc_to_target: "{{a}}"
generation_kwargs: {until: ["!"], max_gen_toks: 6, do_sample: false}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
""",
    "chooses": """
output_type: multiple_choice
doc_to_choice: "{{[a, 'no']}}"
doc_to_target: 0
target_delimiter: ""
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
""",
}
COMMON = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/p.jsonl}}}}
test_split: test
doc_to_text: "{{{{q}}}}"
"""

needs_harness = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="needs lm-evaluation-harness: pip install 'unmask[lm-eval]'"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    make_runs(folder := tmp_path_factory.mktemp("harness"))
    for name, lines in TASKS.items():
        (folder / f"{name}.yaml").write_text(COMMON.format(name=name, folder=folder) + lines)
    return folder


@pytest.fixture
def command():
    """`lm_eval` itself, if it looks for model types in other packages and unmask is installed with its own."""
    from lm_eval.api import registry

    installed = "unmask" in entry_points(group="lm_eval.models").names
    found = shutil.which("lm_eval", path=Path(sys.executable).parent)
    by_name = hasattr(registry, "import_plugins") and installed and found
    return [found] if by_name else [sys.executable, "-m", "unmask.lm_eval"]


@needs_harness
def test_the_command_writes_what_the_run_writes(folder, command):
    """Without a network, and with caches of its own."""
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "home")}
    model = ["--model", "unmask", "--model_args", f"pretrained={folder}/pairs,policy=learned,max_steps=3,samples=3"]
    tasks = ["--include_path", folder, "--tasks", "says,chooses", "--batch_size", "4", "--limit", "6"]
    where = ["--device", "cpu", "--output_path", folder / "out", "--log_samples"]
    environment = os.environ | offline
    done = subprocess.run([*command, *model, *tasks, *where], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "log-likelihoods are lower bounds, each from 3 orders" in done.stderr
    assert "|says " in done.stdout
    assert "|chooses" in done.stdout
    (results,) = (folder / "out").rglob("results_*.json")
    config = json.loads(results.read_text(encoding="utf-8"))["config"]
    assert (config["max_steps"], config["loglikelihood"]) == (3, "lower bounds, each from 3 orders")
    samples = {}
    for path in (folder / "out").rglob("samples_*.jsonl"):
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        samples[path.name.split("_")[1]] = [row["resps"] for row in sorted(rows, key=lambda row: row["doc_id"])]
    run = TextRun(folder / "pairs", "learned", 3, samples=3, device="cpu")
    written = run.write([(pair["q"], {"until": ["!"], "max_gen_toks": 6}) for pair in PAIRS[:6]])
    assert [text for ((text,),) in samples["says"]] == written
    choices = [(pair["q"], text) for pair in PAIRS[:6] for text in (pair["a"], "no")]
    bounds = run.log_likelihoods(choices, [place // 2 for place in range(12)])
    told = [float(bound) for row in samples["chooses"] for ((bound, _),) in row]
    assert told == pytest.approx([bound for bound, _ in bounds], rel=1e-4)


@needs_harness
def test_the_entry_point_is_the_model_type(folder, monkeypatch):
    from lm_eval.api.instance import Instance
    from lm_eval.api.registry import model_registry

    from unmask.lm_eval import UnmaskLM

    value = PYPROJECT["project"]["entry-points"]["lm_eval.models"]["unmask"]
    model_registry.register("as-installed", target=EntryPoint("unmask", value, "lm_eval.models"))
    assert model_registry.get("as-installed") is UnmaskLM
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    defaults = {"batch_size": "2", "device": "cuda:0", "max_batch_size": None}
    model = UnmaskLM.create_from_arg_string(f"pretrained={folder}/texts,policy=iid,max_steps=2", defaults)
    text, other = (Instance("loglikelihood_rolling", {}, (text,), 0, ("task", 3, 1)) for text in ("say", "what"))
    assert model.loglikelihood_rolling([text, other]) == model.run.text_log_likelihoods(["say", "what"])


@needs_harness
def test_a_mistake_is_one_line(folder, monkeypatch, capsys):
    from unmask import lm_eval

    for arguments, more, message in (
        ("policy=margni", {}, "unmask: unknown policy 'margni'; did you mean 'margin'?"),
        ("polcy=iid", {}, "unmask: no model argument 'polcy'; did you mean 'policy'?"),
        ("policy=iid", {"batch_size": "auto"}, "unmask: batch_size must be a whole number from 1 on, got 'auto'"),
    ):
        made = partial(lm_eval.UnmaskLM.create_from_arg_string, f"pretrained={folder}/pairs,{arguments}", more)
        monkeypatch.setattr("lm_eval.__main__.cli_evaluate", made)
        with pytest.raises(SystemExit, match="2"):
            lm_eval.main()
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(message)
