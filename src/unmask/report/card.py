"""A run's recipe and records -> what its model card says, and the run on the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

from unmask.display import visible
from unmask.evaluation.curve import read_curve
from unmask.evaluation.records import read_run
from unmask.models.order_model import OrderModel
from unmask.report.tables import caption, learned_on, markdown_table, result_tables, without_sweep
from unmask.training.run_folder import read_recipe


def about_run(run: Path) -> str:
    """The results of a run and how it was made, in Markdown.  Code of the user's own is not imported."""
    recipe, command = read_recipe(run), f"unmask train recipe.toml --out {run.resolve().name}"
    parts = [f"## Results on `{recipe.task['name']}`"]
    if (run / "results.jsonl").exists():
        records = without_sweep(read_run(run), read_curve(run / "curve.json"), recipe)
        parts.append(f"Held-out examples: {' and '.join(sorted({f'{r.spec.num_examples:,}' for r in records}))}.")
        for table in result_tables(records, caption=caption(recipe, records, learned_on(run, recipe))):
            shown = [f"**{table.title}**"] if table.title else []
            parts += [*shown, markdown_table(table.headings, table.rows), table.legend(table.headings)]
    else:
        parts.append("It has not been evaluated.")
    folded = f"<details><summary>recipe.toml</summary>\n\n```toml\n{recipe.to_toml()}```\n\n</details>"
    parts += ["## How it was made", f"```\n{command}\n```", folded]
    return visible("\n\n".join(filter(None, parts))) + "\n"


def push_run(run: Path, repo_id: str, private: bool | None = None) -> str:
    """Upload the model of a finished run with its recipe, its records and a card made of them; its address."""
    model, beside = OrderModel.from_pretrained(run), [run / "recipe.json", run / "results.jsonl"]
    return model.push_to_hub(
        repo_id, about=about_run(run), beside=[path for path in beside if path.exists()], private=private
    )
