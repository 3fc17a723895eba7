"""Tests of the term of the loss that draws the policy to a teacher: how its coefficient changes over the course of a
run, and which settings are refused."""

import re

import pytest

from qerl_pl.objective.teacher import TeacherTerm


def test_the_coefficient_falls_linearly_and_then_the_term_is_gone():
    term = TeacherTerm(coefficient=2.0, divergence="reverse", rollouts=4)
    terms = [term.at(index) for index in range(6)]
    assert [each and each.coefficient for each in terms] == [2.0, 1.5, 1.0, 0.5, None, None]
    assert all(each.divergence == "reverse" for each in terms if each)
    assert TeacherTerm().at(1000) == TeacherTerm()


def test_each_divergence_has_its_share_of_the_teacher():
    shares = {"sampled": None, "forward": 0.0, "reverse": 1.0, "jensen_shannon": 0.5}
    assert {kind: TeacherTerm(divergence=kind).mixture for kind in shares} == shares  # pyright: ignore[reportArgumentType]
    assert TeacherTerm(divergence="jensen_shannon", beta=0.1).mixture == 0.1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"coefficient": 0.0}, "teacher.coefficient is 0.0; expected more than 0"),
        ({"coefficient": float("nan")}, "teacher.coefficient is nan; expected a finite number"),
        ({"beta": 0.5}, "teacher.beta is 0.5 and divergence is 'sampled', with which it has no effect"),
        ({"divergence": "jensen_shannon", "beta": 1.0}, "teacher.beta is 1.0; expected a number between 0 and 1"),
        ({"rollouts": 0}, "teacher.rollouts is 0; expected at least 1, or null"),
    ],
    ids=str,
)
def test_settings_without_sense_are_refused(settings, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        TeacherTerm(**settings)
