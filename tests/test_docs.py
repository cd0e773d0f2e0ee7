"""What the documentation tells people to run, runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = [
    pytest.param(code, id=f"{page.name}-{number}")
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    for number, code in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
]


@pytest.mark.parametrize("code", EXAMPLES)
def test_python_examples_run(code: str) -> None:
    exec(compile(code, "<example>", "exec"), {"__name__": "example"})


def test_readme_names_every_source_file_or_its_folder() -> None:
    readme = (ROOT / "README.md").read_text()
    for file in (ROOT / "src" / "soothsay").glob("*.py"):
        assert file.name.startswith("__") or file.name in readme, f"{file.name} is not in the README's tree"
    for folder in ("model", "engine"):
        for file in (ROOT / "src" / "soothsay" / folder).glob("*.py"):
            assert file.name.startswith("__") or file.name in readme, (
                f"{folder}/{file.name} is not in the README"
            )
