"""What the documentation shows is what the code does."""

import doctest
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.name)
def test_every_example_gives_the_output_it_shows(page):
    failed, attempted = doctest.testfile(str(page), module_relative=False)
    assert failed == 0
    assert attempted > 0
