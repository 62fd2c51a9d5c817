"""How a command ends: exit codes, one sentence, and a pipe whose reader has gone."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvexp.ended import ended
from kvexp.errors import UserError


def fails(error):
    def command():
        raise error

    return command


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (UserError("no\n such"), 2, "kvexp: no such\n"),
        (OSError(13, "Permission denied", "x/y"), 1, "kvexp: x/y cannot be used (Permission denied): ask\n"),
        (OSError(28, "No space left"), 1, "kvexp: the output cannot be used (No space left): ask\n"),
        (BrokenPipeError(), 0, ""),
    ],
)
def test_a_mistake_is_one_sentence(error, code, said, capsys):
    assert ended(fails(error), "ask") == code
    assert capsys.readouterr().err == said


def test_ctrl_c_is_a_sentence(capsys):
    assert ended(fails(KeyboardInterrupt()), "ask", "kvexp.bench") == 130
    assert ended(fails(KeyboardInterrupt()), "ask", interrupted="it goes on") == 130
    assert capsys.readouterr().err == "kvexp.bench: interrupted\nkvexp: it goes on\n"


def test_a_command_may_have_a_name_of_its_own(capsys):
    ended(fails(UserError("no")), "ask", "kvexp.bench")
    ended(fails(OSError(28, "No space left", "x")), "ask", "kvexp.bench")
    said = capsys.readouterr().err
    assert said == "kvexp.bench: no\nkvexp.bench: x cannot be used (No space left): ask\n"


def test_the_code_of_the_command_is_kept():
    assert ended(lambda: 3, "ask") == 3


@pytest.mark.parametrize(("where", "code", "said"), [("pipe", 0, ""), ("/dev/full", 1, "No space left")])
def test_output_that_nobody_takes(where, code, said):
    text = "from kvexp.ended import ended\nraise SystemExit(ended(lambda: print('x' * LENGTH) or 0, 'ask'))"
    for length in ("9", "10**6"):  # met when it is printed, and when it is flushed
        command = [sys.executable, "-c", text.replace("LENGTH", length)]
        if where == "pipe":
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            process.stdout.close()
            told = process.stderr.read()
            process.stderr.close()
            assert process.wait() == code
        else:
            with open(where, "w") as full:
                done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
            told = done.stderr
            assert done.returncode == code
        assert said in told and told.count("\n") == bool(said)
