"""The lane of deliberate bugs fails when one lives, when its text has moved on, and when its tests are not there."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


def load_lane() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mutants_lane", ROOT / "scripts/mutants.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


lane = load_lane()


@pytest.fixture
def copies(tmp_path: Path) -> list[Path]:
    lane.make_copy(tmp_path / "0")
    return [tmp_path / "0"]


def harmless(**changed: object) -> object:
    """A change that breaks nothing, before tests that pass."""
    made = lane.Mutant("harmless", "nothing", "counters.py", "Plain integers in one place;", "Integers;", (lane.case("4.001"),))
    return made._replace(**changed)


def test_every_mutant_still_has_its_text_and_a_name_of_its_own() -> None:
    assert len({mutant.name for mutant in lane.MUTANTS}) == len(lane.MUTANTS) >= 15
    for mutant in lane.MUTANTS:
        text = (ROOT / lane.PACKAGE / mutant.file).read_text(encoding="utf-8")
        assert text.count(mutant.before) == 1, mutant.name
        assert mutant.after != mutant.before
        assert mutant.tests
        assert all("::" in words for words in mutant.tests), mutant.name


def test_a_text_that_is_not_there_any_more_fails_the_lane(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"harmless: its text stands 0 times in counters\.py"):
        lane.try_all([harmless(before="no such text")], [tmp_path])


@pytest.mark.slow
def test_a_mutant_that_nobody_notices_fails_the_lane(copies: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert lane.try_all([harmless()], copies) == 1
    said = capsys.readouterr().out
    assert "LIVES  harmless" in said
    assert said.endswith("0 of 1 mutants killed; alive: harmless\n")


@pytest.mark.slow
def test_a_mutant_whose_tests_are_gone_fails_the_lane(copies: list[Path]) -> None:
    with pytest.raises(SystemExit, match=r"harmless: no test is 'tests/test_rng\.py::no_such_test'"):
        lane.try_all([harmless(tests=("tests/test_rng.py::no_such_test",))], copies)
