"""Models of other people are data: code that comes with one is not run."""

import json

import pytest

pytest.importorskip("transformers")

from unmask.models.importers.pretrained import load_causal


def test_code_that_comes_with_a_model_is_not_run(tmp_path, monkeypatch):
    """Nor is anybody asked at the terminal whether it may be."""
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass C: pass\n")
    classes = {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.C"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": classes}))
    monkeypatch.setattr("builtins.input", lambda *words: "y")
    with pytest.raises(ValueError, match="transformers cannot read"):
        load_causal(tmp_path)
    assert not (tmp_path / "ran").exists()
