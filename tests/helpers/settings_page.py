"""Writes docs/settings.md, the page of all commands and options, from the commands themselves.

python tests/helpers/settings_page.py > docs/settings.md
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from typer import Context
from typer.core import TyperGroup
from typer.main import get_command

from soothsay.cli.app import app

HEAD = """# All commands and options

This page is written by `tests/helpers/settings_page.py` from the commands themselves. An option that is not
given on the command line is taken from an environment variable, then from the file of `--config`, then it has
its default. The variable of `--max-tokens` of `soothsay generate` is `SOOTHSAY_GENERATE_MAX_TOKENS`, and that
of `--rounds` of `soothsay bench spec` is `SOOTHSAY_BENCH_SPEC_ROUNDS`. Values of an option that can be
repeated are separated by spaces in a variable, and are a list in a file, if there is more than one.

A file has a table for each command:

```text
[serve]
model = "smollm2"
port = 8080
allow-drafter = ["suffix", "auto"]

[bench.spec]
rounds = 3
```

`soothsay --config soothsay.toml serve` reads it. A command or an option that does not exist is an error;
a variable that is nearly an option's gets a warning.
`soothsay --install-completion` lets bash, zsh or fish complete commands, options, models and drafters.
More variables:

| variable | meaning |
| --- | --- |
| `SOOTHSAY_DEVICE` | where models run if `--device` is `auto`: `cpu`, `cuda` or `cuda:1` |
| `SOOTHSAY_KERNELS` | `all`, while installing: compile the kernels of every instruction set |
"""


def page() -> str:
    """The whole page."""
    return HEAD + "".join(_sections("soothsay", get_command(app)))


def _sections(name: str, command: Any) -> Iterator[str]:
    if isinstance(command, TyperGroup):
        for own, inner in command.commands.items():
            yield from _sections(f"{name} {own}", inner)
        return
    shown = command.get_params(Context(command))
    arguments = [one for one in shown if one.param_type_name == "argument"]
    options = [one for one in shown if one not in arguments and one.name != "help"]
    asked = (one.metavar if one.required else f"[{one.metavar}]" for one in arguments)
    usage = " ".join((name, *asked))
    yield f"\n## {name}\n\n{_sentence(command.help)}\n\n```text\n{usage}\n```\n\n"
    yield "| option | default | meaning |\n| --- | --- | --- |\n"
    for one in (*arguments, *options):
        names = (
            ", ".join(f"`{part}`" for part in (*one.opts, *one.secondary_opts))
            if one in options
            else f"`{one.metavar}`"
        )
        yield f"| {names} | {_default(one)} | {_sentence(one.help)} |\n"


def _sentence(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _default(option: Any) -> str:
    """The default as the help shows it."""
    if option.required:
        return "must be given"
    if isinstance(option.show_default, str):
        return option.show_default
    if option.default in (None, False, "", ()):
        return ""
    return f"`{option.default}`".replace("|", "\\|")


if __name__ == "__main__":
    print(page(), end="")
