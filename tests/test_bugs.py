"""What is whose mistake: a bug of unmask shows its traceback and asks for a report, a user's mistake is one line."""

import sys


def test_a_bug_shows_its_traceback(monkeypatch, call):
    """A ValueError too: only a UserError is the user's."""
    monkeypatch.setattr("unmask.rule_list.listed_rules", lambda: [("too", "few")])
    code, _, err = call("policies")
    assert code == 1
    assert err.startswith("Traceback")
    assert "ValueError: not enough values to unpack" in err
    assert err.splitlines()[-1].startswith("unmask: this is a bug in unmask ")


def test_code_of_the_users_own_is_not_called_a_bug(monkeypatch, tmp_path, call):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "broken_task.py").write_text("x = 1\ny = x / 0\n")
    code, _, err = call("recipe", "show", "groups", "--set", "task.name=broken_task:Any")
    (line,) = err.splitlines()
    assert code == 2
    assert "'broken_task:Any' cannot be imported: ZeroDivisionError: division by zero" in line
    assert line.endswith("broken_task.py, line 2)")

    def fails():
        raise RuntimeError("of my own")

    monkeypatch.setattr("unmask.rule_list.listed_rules", fails)
    code, _, err = call("policies")
    assert code == 1
    assert err.splitlines()[-1].endswith("test_bugs.py, code of your own; the lines above say where")
