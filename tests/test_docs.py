"""What README and docs name exists: pages, headings, files, flags, recipes."""

import re
import shlex
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from support.launching import ROOT

from ds_trainer.cli.main import module_of
from ds_trainer.recipe.exit_specs import ExitsSpec
from ds_trainer.recipe.recipe import Phase, Recipe
from ds_trainer.recipe.technique_specs import DistillSpec, PruneSpec, StudentSpec

README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
COMMANDS = "|".join(sorted(path.stem for path in (ROOT / "launch").glob("*.py")))
RECIPES = {path.stem for path in (ROOT / "ds_configs/recipes").glob("*.json")}
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


@cache
def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"(?ms)^```.*?^```", "", read(page)), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def commands(page: Path) -> Iterator[tuple[str, list[str]]]:
    """Each command of ours that a page has, as a line of its own or between backticks, with the words after it."""
    text = re.sub(r"\\\n\s*", " ", read(page))
    for line in re.findall(r"^ {4,}.+$|`[^`\n]+", text, re.MULTILINE):
        if found := re.search(rf"(?:launch/({COMMANDS})\.py|\bds-({COMMANDS}))\b(.*)", line):
            whole = found[3].count("'") % 2 == 0  # a line of a script may end within quotes
            yield found[1] or found[2], shlex.split(found[3], comments=True) if whole else []


@cache
def flags_of(command: str) -> set[str]:
    """The flags that the parser of a command knows; tune hands those of train on."""
    parser = getattr(module_of(command), f"{command}_parser", None)
    return {*(parser()._option_string_actions if parser else ()), *(flags_of("train") if command == "tune" else ())}


def test_commands_are_found() -> None:
    """Else those that look for mistakes in them find none."""
    assert sum(len([*commands(page)]) for page in PAGES) > 60


def test_the_readme_is_short_and_leads_to_every_page() -> None:
    """It has at most 250 lines: what is longer has a page of its own, which it links to."""
    assert len(read(README).splitlines()) <= 250
    assert [page.name for page in PAGES[1:] if f"(docs/{page.name})" not in read(README)] == []


@every_page
def test_every_link_leads_somewhere(page: Path) -> None:
    """A relative link names a file that exists and, after #, one of its headings."""
    for link in re.findall(r"\]\((?!https://)([^)\s]+)\)", read(page)):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@every_page
def test_every_path_exists(page: Path) -> None:
    """Every file of the repository that a page names is there."""
    text = re.sub(r"<!--.*?-->", "", read(page))
    paths = re.findall(r"(?<![\w/@-])(?:launch|tests|ds_configs|ds_trainer|examples)/[\w/.-]+\.\w+", text)
    assert [path for path in paths if not (ROOT / path).exists()] == []


@every_page
def test_every_flag_is_one_of_its_command(page: Path) -> None:
    """And every recipe that a command is given by its name is shipped."""
    for command, words in commands(page):
        flags = {word.partition("=")[0].rstrip(",") for word in words if word.startswith("--")}
        assert flags <= flags_of(command), (command, words)
        named = {after for flag, after in pairwise(words) if flag == "--recipe"}
        assert {name for name in named if re.fullmatch(r"[a-z]\w+", name)} <= RECIPES, words


def test_the_new_names_of_old_flags_are_fields() -> None:
    """What docs/coming_from.md gives in place of a flag is a field of that technique, or of a phase."""
    page = read(ROOT / "docs/coming_from.md")
    specs = {"prune": PruneSpec, "distill": DistillSpec, "exits": ExitsSpec, "student": StudentSpec}
    named = re.findall(r"`(prune|distill|exits|student)\.(\w+)`", page)
    assert len(named) > 20
    assert [pair for pair in named if pair[1] not in specs[pair[0]].model_fields] == []
    same = re.findall(
        r"`(\w+)`", page.split("The names are the same where the meaning is:")[1].split("Those that differ")[0]
    )
    assert [name for name in same if name not in {*Phase.model_fields, *Recipe.model_fields}] == []
