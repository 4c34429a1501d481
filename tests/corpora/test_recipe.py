"""Recipes: what is accepted, and that refusals say which key."""

from pathlib import Path

import pytest

from bitwright.content import content_dir
from bitwright.corpora.recipe import load_recipe, parse_recipe
from bitwright.errors import ConfigError, InputError

MINIMAL = 'category = "code"\n[[sources]]\nkind = "builtin"\nname = "prose"\n'


def recipe(text: str):
    return parse_recipe(text, name="r.toml", folder=Path())


@pytest.mark.parametrize("name", ["code", "chat", "math", "tool_calling", "general"])
def test_built_in_recipes_load(name: str) -> None:
    assert load_recipe(name).category == name


def test_every_shipped_toml_is_a_recipe() -> None:
    for path in content_dir("corpora").glob("*.toml"):
        load_recipe(path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("context = 3\n" + MINIMAL + 'colour = "red"\n', "colour"),
        ("contxt = 3\n" + MINIMAL, "contxt"),
        (MINIMAL.replace("prose", "poems"), "sources.0"),
        ('category = "code"\n', "sources"),
        (MINIMAL + "[splits]\ncalibrate = 0.9\n", "add up to 1.5"),
        (MINIMAL + "[chunks]\nprobe = -1\n", "probe"),
        (MINIMAL.replace('"code"', '"../x"'), "category"),
        ("folder = 'x'\n" + MINIMAL, "folder"),
        ("category = ", "not valid TOML"),
    ],
)
def test_refusals_name_the_key(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=r"r\.toml") as caught:
        recipe(text)
    assert said in str(caught.value)


def test_unknown_recipe_lists_the_built_in_ones() -> None:
    with pytest.raises(ConfigError, match="tool_calling"):
        load_recipe("poetry")


def test_recipe_must_be_utf8(tmp_path: Path) -> None:
    path = tmp_path / "r.toml"
    path.write_bytes(b'title = "\xe9"\n')
    with pytest.raises(InputError, match="byte 9"):
        load_recipe(path)


def test_hash_depends_on_the_content_only(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("# a comment\n" + MINIMAL, encoding="utf-8")
    assert load_recipe(path).sha256() == recipe(MINIMAL).sha256()
    assert load_recipe(path).sha256() != recipe("context = 1\n" + MINIMAL).sha256()
    assert load_recipe(path).folder == tmp_path.resolve()
