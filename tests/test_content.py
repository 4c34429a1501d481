"""What a user reads when a TOML file of theirs is wrong."""

from pathlib import Path

import pytest

from bitwright.corpora.recipe import parse_recipe
from bitwright.errors import ConfigError
from bitwright.workflows.spec import load_workflow
from tests.workflows.support import write_workflow


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("imatrix_shares = [0.5, 1.5]", r"study\.imatrix_shares\.1: .* equal to 1, not 1\.5$"),
        ('imatrix_shares = "half"', r"study\.imatrix_shares: .* should be a list, not 'half'$"),
        ("trials = -3", r"study\.trials: .*greater than or equal to 0, not -3$"),
        ('pareto = "perhaps"', r"study\.pareto: .*boolean.*, not 'perhaps'$"),
        ("trials = [1]", r"study\.trials: Input should be a valid integer$"),
        (f'pareto = "{"x" * 99}"', r"study\.pareto: .*interpret input$"),  # too long to show
        ("trails = 3", r"unknown key 'study\.trails'"),
    ],
)
def test_a_wrong_value_is_shown_with_its_rule(tmp_path: Path, line: str, said: str) -> None:
    path = write_workflow(tmp_path)
    path.write_text(f"{path.read_text()}\n[study]\n{line}\n")
    with pytest.raises(ConfigError, match=said):
        load_workflow(path)


def test_a_recipe_speaks_the_same_way(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"sources: .* should be a list, not 'mine\.txt'"):
        parse_recipe('category = "code"\nsources = "mine.txt"', name="mine", folder=tmp_path)
