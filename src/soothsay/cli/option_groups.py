"""Groups of options: dataclasses whose fields are options of the commands that take them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import is_dataclass
from inspect import Parameter, Signature
from typing import Any, get_type_hints


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose parameters that are dataclasses are replaced by their fields, each an option.

    Options stand in the order in which parameters and fields are declared. The command gets the dataclasses.
    """
    shown: list[Parameter] = []
    groups: dict[str, tuple[type[Any], list[str]]] = {}
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        own = [parameter]
        group = parameter.annotation
        if isinstance(group, type) and is_dataclass(group):
            types = get_type_hints(group, include_extras=True)
            fields = inspect.signature(group).parameters.values()
            own = [field.replace(annotation=types[field.name]) for field in fields]
            groups[parameter.name] = group, [field.name for field in own]
        shown += (one.replace(kind=Parameter.KEYWORD_ONLY) for one in own)

    @functools.wraps(command)
    def run(**options: Any) -> None:
        for name, (group, names) in groups.items():
            options[name] = group(**{own: options.pop(own) for own in names})
        command(**options)

    run.__signature__ = Signature(shown)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in shown}
    return run
