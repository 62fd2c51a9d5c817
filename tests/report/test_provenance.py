"""Where a result comes from."""

from __future__ import annotations

import platform
import re
import shlex
import subprocess
import sys
from importlib.metadata import version

import pytest

from kvexp.report import provenance


@pytest.fixture
def checkout(tmp_path):
    """A git checkout with one tracked file."""
    file = tmp_path / "repo" / "src" / "module.py"
    file.parent.mkdir(parents=True)
    file.write_text("x = 1\n")
    git(file.parent, "init", "--quiet")
    git(file.parent, "add", ".")
    git(file.parent, "-c", "user.name=n", "-c", "user.email=e@x", "commit", "--quiet", "-m", "first")
    return file


def git(folder, *arguments):
    done = subprocess.run(["git", "-C", folder, *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_a_clean_and_a_changed_checkout(checkout):
    commit = git(checkout.parent, "rev-parse", "HEAD")
    assert provenance.git_state(checkout) == {"commit": commit, "dirty": False}
    checkout.with_name("new.py").touch()
    assert provenance.git_state(checkout) == {"commit": commit, "dirty": True}
    checkout.with_name("new.py").unlink()
    checkout.write_text("x = 2\n")
    assert provenance.git_state(checkout) == {"commit": commit, "dirty": True}


def test_a_copy_inside_the_checkout_of_another_project_has_no_commit(checkout):
    copy = checkout.parent / "site-packages" / "kvexp" / "module.py"
    copy.parent.mkdir(parents=True)
    copy.touch()
    assert provenance.git_state(copy) is None


def test_no_checkout_and_no_git_give_none(tmp_path, checkout, monkeypatch):
    (tmp_path / "plain.py").touch()
    assert provenance.git_state(tmp_path / "plain.py") is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert provenance.git_state(checkout) is None


def test_a_hook_of_another_repository_does_not_mislead(checkout, tmp_path, monkeypatch):
    git(tmp_path, "init", "--quiet", "other")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "other" / ".git"))
    assert provenance.git_state(checkout)["dirty"] is False


def test_versions_come_from_metadata_without_imports():
    found = provenance.versions()
    assert found["python"] == platform.python_version()
    assert found["torch"] == version("torch") and found["hydra-core"] == version("hydra-core")
    assert all(isinstance(value, str) for value in found.values())
    code = (
        "import sys; from kvexp.report.provenance import versions; versions(); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_a_command_reads_back_as_it_was():
    words = ["/usr/bin/python3", "-m", "kvexp", "model.id=/a b/it's", 'task.note="x=1"', "budget=20%"]
    line = provenance.command_line(words)
    assert shlex.split(line) == ["python3", *words[1:]]
    assert provenance.command_line().split()[0] == sys.orig_argv[0].rpartition("/")[2]


def test_a_whole_provenance():
    started = provenance.start_provenance("python -m kvexp method=asm")
    assert started["command"] == "python -m kvexp method=asm"
    whole = provenance.finish_provenance(started, device="cpu", threads=2, model_sha256="m", data_sha256="d")
    for key in ("git", "versions", "device", "model_sha256", "data_sha256", "command", "host"):
        assert key in whole
    assert (whole["threads"], whole["model_sha256"], whole["data_sha256"]) == (2, "m", "d")
    assert re.fullmatch(r"cpu \(.+\)", whole["device"])
    for moment in (whole["started"], whole["finished"]):
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", moment)
    assert whole["started"] <= whole["finished"]
    assert provenance.start_provenance()["command"] == provenance.command_line()
