"""The documentation as a site, and the notebook."""

import ast
import json
import re
import time
from pathlib import Path

import pytest

import unmask

ROOT = Path(__file__).parents[1]


def test_the_notebook(capsys):
    """Its cells run one after the other, as in Jupyter, in less than two minutes; no output is committed."""
    notebook = json.loads((ROOT / "examples" / "first-order.ipynb").read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["metadata"]["language_info"]["name"]) == (4, "python")
    started, shared, shown = time.process_time(), {}, None
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert (cell["outputs"], cell["execution_count"]) == ([], None)
            parsed = ast.parse("".join(cell["source"]))
            last = parsed.body.pop() if isinstance(parsed.body[-1], ast.Expr) else None
            exec(compile(parsed, "cell", "exec"), shared)
            shown = eval(compile(ast.Expression(last.value), "cell", "eval"), shared) if last else None
    assert time.process_time() - started < 120
    scores = {record.spec.policy: record.outcome.score for record in shared["records"]}
    assert scores.pop("learned") > 0.5 > max(scores.values())
    orders, layout = shared["out"].reveal_step.tolist(), shared["task"].layout
    alone = [sum(row[position] == 0 for position in group) == 1 for row in orders for group in layout]
    assert sum(alone) >= 8, "in nearly all of ten groups one token is written first"
    assert "learned    " in capsys.readouterr().out
    assert shown._repr_svg_().startswith("<svg")
    assert "learned: " in shown


def test_the_site(tmp_path):
    """It builds without a warning; every public name, page and picture of an order is on it, and nothing is fetched."""
    pytest.importorskip("mkdocstrings", reason="pip install 'unmask[docs]'")
    commands = pytest.importorskip("mkdocs.commands.build", reason="pip install 'unmask[docs]'")
    from mkdocs.config import load_config
    from mkdocs.exceptions import Abort

    config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path), strict=True)
    try:
        commands.build(config)
    except Abort as error:
        pytest.fail(f"mkdocs build --strict: {error}; the warnings are above")
    pages = {
        path.relative_to(tmp_path).as_posix(): path.read_text(encoding="utf-8") for path in tmp_path.rglob("*.html")
    }
    for page in (ROOT / "docs").glob("*.md"):
        assert f"{page.stem}.html" in pages
        assert f'href="{page.stem}.html"' in pages["index.html"], f"{page.name} is not in the nav of mkdocs.yml"
    reference = "".join(text for name, text in pages.items() if name.startswith("api/"))
    for name, home in unmask._HOMES.items():
        assert f'id="{home}.{name}"' in reference, f"unmask.{name} is not in the reference: add {home} to docs/site.py"
    assert re.search(r"<li>\s*(<p>)?<code>on_step</code>: ", reference), "parameters are lists"
    for picture in (ROOT / "docs" / "results").glob("*.svg"):
        assert f'src="results/{picture.name}"' in pages["gallery.html"], f"no page shows {picture.name}"
    fetched = re.findall(r'<(?:script|img|link)[^>]*(?:src|href)="((?:https?:)?//[^"]*)', "".join(pages.values()))
    assert fetched == []
