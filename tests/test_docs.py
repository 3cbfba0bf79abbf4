"""What the documentation shows is what the code does."""

import doctest
import re
import shlex
from pathlib import Path

import pytest

from hf_dspark.cli import command_parser

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").glob("*.md"))
COMMAND = re.compile(r"^\s*(?:[\w./-]*python -m hf_dspark|hf-dspark) (.+)$", re.MULTILINE)


@pytest.mark.parametrize("page", [p for p in PAGES if ">>>" in p.read_text()], ids=lambda page: page.name)
def test_every_example_gives_the_output_it_shows(page):
    failed, attempted = doctest.testfile(str(page), module_relative=False)
    assert failed == 0
    assert attempted > 0


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: page.name)
def test_every_command_shown_is_one_that_there_is(page):
    for line in COMMAND.findall(page.read_text()):
        arguments = shlex.split(line, comments=True)
        command_parser().parse_args(arguments)  # exits on an unknown option


def test_commands_are_found():
    assert len(COMMAND.findall((ROOT / "docs" / "training.md").read_text())) >= 4
