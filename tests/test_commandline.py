"""Words before Hydra reads them: flags, dashes, quotes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvexp import commandline
from kvexp.errors import UserError

_ALPHABET = st.characters(codec="utf-8", exclude_categories=["Cc", "Cs", "Zl", "Zp"], exclude_characters="$,")


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("--budget=4096", ["budget=4096"]),
        ("--method.layout=shared", ["method.layout=shared"]),
        ("--config-dir=x", ["--config-dir=x"]),
        ("--cfg=job", ["--cfg=job"]),
        ("--info", ["--info=all"]),
        ("-m", ["-m"]),
        ("_wandb={'a': 1}", []),
        ("--_wandb=1", []),
        ("seed=0,1", ["seed=0,1"]),
        ("data_dir=/a=b", ["data_dir='/a=b'"]),
        ("model.id='a b'", ["model.id='a b'"]),
        ("x='unbalanced", ["x='unbalanced"]),
        ("~debug", ["~debug"]),
    ],
)
def test_clean(word: str, expected: list[str]) -> None:
    assert commandline.clean([word]) == expected


@pytest.mark.parametrize("flag", ["--info", "-i"])
def test_info_alone_stands_anywhere(flag: str) -> None:
    for words in (["a=1", flag], [flag, "a=1"]):
        args = commandline.read(commandline.clean(words))
        assert (args.info, args.overrides) == ("all", ["a=1"]) and args.argv[0] == "--info=all"
    args = commandline.read(commandline.clean(["a=1", flag, "defaults"]))
    assert (args.info, args.argv) == ("defaults", [flag, "defaults", "a=1"])


@given(st.text(_ALPHABET, min_size=1).filter(lambda text: not text.startswith(("'", '"', "[", "{"))))
def test_any_path_arrives_as_it_was_written(text: str) -> None:
    path = f"/a/{text}/b"
    (parsed,) = commandline.parse(commandline.clean([f"data_dir={path}"]))
    assert parsed.value() == path


def test_flags_may_stand_anywhere_and_come_first_for_hydra() -> None:
    args = commandline.read(["a=1", "-m", "b=2", "--config-dir", "/", "c=3"])
    assert args.multirun and args.config_dir == "/" and args.overrides == ["a=1", "b=2", "c=3"]
    assert args.argv == ["-m", "--config-dir", "/", "a=1", "b=2", "c=3"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--mutlirun"], "did you mean '--multirun'?"),
        (["-m", "--info", "defaults"], "only one of"),
        (["--resolve"], "--cfg job"),
        (["--cfg"], "expected one argument"),
        (["--config-path", "conf"], "absolute"),
    ],
)
def test_wrong_flags(words: list[str], told: str) -> None:
    with pytest.raises(UserError, match=told):
        commandline.read(words)


def test_knobs_of_a_group_that_varies_are_swept_over_their_one_value() -> None:
    words = [
        "method=a,b",
        "method.x=1",
        "method.y='a, b'",
        "task.n=3",
        "method.z=1,2",
        "+method.w=[1,2]",
        "seed=1",
    ]
    assert commandline.spread(words) == [
        "method=a,b",
        "method.x=choice(1)",
        "method.y=choice('a, b')",
        "task.n=3",
        "method.z=1,2",
        "+method.w=choice([1,2])",
        "seed=1",
    ]
    assert commandline.read(["-m", *words[:2]]).argv == ["-m", "method=a,b", "method.x=choice(1)"]
    assert commandline.read(words[:2]).overrides == words[:2]
    assert commandline.spread(words[3:4], {"task"}) == ["task.n=choice(3)"]


def test_a_grid_may_be_looked_at_and_hydra_is_asked_for_the_look_alone() -> None:
    args = commandline.read(["-m", "method=a,b", "--cfg", "job", "method.x=1"])
    assert args.multirun and args.overrides == ["method=a,b", "method.x=choice(1)"]
    assert args.argv == ["--cfg", "job", *args.overrides]
    assert commandline.put(args, ["method=a"]).argv == ["--cfg", "job", "method=a"]
