"""A problem is one line of bounded length, whatever the names and values in files are."""

import json

import pytest
from conftest import assert_refused, launch

from common.errors import LONGEST, MOST_PROBLEMS, UserError, raise_errors


@pytest.mark.parametrize("name", ["two\nlines", "a\rb", "a\x0bb\x0cc", "a\u2028b\x85c", "\x1b[2Jx", "x" * 1_000_000])
def test_a_name_in_a_file_does_not_end_the_line(name, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({name: "a text"}) + "\n")
    result = launch("--train_file", rows, "--output_dir", tmp_path / "run", check=False)
    assert_refused(result, "rows.jsonl: no column text")
    assert max(map(len, result.stderr.splitlines())) < 2 * LONGEST and "\x1b" not in result.stderr
    assert not (tmp_path / "run").exists()


def test_each_problem_has_its_line():
    with pytest.raises(UserError) as told:
        raise_errors(f"file {number}\nhere: wrong" for number in range(10 * MOST_PROBLEMS))
    first, *_, last = lines = str(told.value).splitlines()
    assert len(lines) == MOST_PROBLEMS + 1 and first == r"file 0\nhere: wrong"
    assert last == f"and {9 * MOST_PROBLEMS} problems more"
    raise_errors([])  # the control


@pytest.mark.parametrize("before", range(LONGEST - 40, LONGEST + 10, 7))
def test_the_end_of_a_long_line_is_no_part_of_a_secret(before, monkeypatch):
    secret = "wN7qZ2vK9pT4xB6mR1cJ"
    monkeypatch.setenv("HF_TOKEN", secret)
    line = str(UserError("x" * before + " " + secret + "y" * 5 * LONGEST))
    assert secret[:5] not in line and len(line) <= LONGEST + 4
    assert str(UserError("x" * 100)) == "x" * 100
