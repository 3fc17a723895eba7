"""The program refuses a sample of the bad inputs of ``bad_cases`` as ``bad_inputs`` expects; python -m
tests.integration.bad_inputs tries all of them."""

import pytest

from tests.integration.bad_cases import Bases
from tests.integration.bad_inputs import try_cases
from tests.integration.conftest import ROOT


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, *(pytest.param(first, marks=pytest.mark.long) for first in (9, 18))])
def test_bad_input_is_refused_in_a_few_lines(bases, tmp_path, monkeypatch, first):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("sys.argv", ["train.py"])
    (tmp_path / "bases").mkdir()
    records = try_cases(range(first, first + 9), Bases(tmp_path / "bases", bases["dense"]), tmp_path)
    assert [record for record in records if record["outcome"] != "refused"] == []
