"""What chat templates may do to values: filters, tests, operators and methods, each with its cost.

Every operation counts its cost before it runs. Operations whose cost is hard to predict are left out:
templates for chats do not use them.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any

import jinja2
from jinja2.filters import FILTERS as JINJA_FILTERS
from jinja2.runtime import Context, LoopContext
from jinja2.tests import TESTS as JINJA_TESTS
from jinja2.utils import Namespace

from soothsay.files import levels_of
from soothsay.template_meter import MAX_BITS, PER_VALUE, TemplateLimit, meter

Function = Callable[..., Any]

FREE_FILTERS = ("attr", "count", "d", "default", "first", "last", "length")
"""Filters that take the same time for any value."""

SHALLOW_FILTERS = ("items", "list", "map", "reject", "rejectattr", "reverse", "select", "selectattr")
"""Filters that look at the values in a list, but not at what is inside of these."""

DEEP_FILTERS = """
    abs capitalize dictsort e escape float forceescape groupby int lower max min safe sort string title
    truncate unique upper urlencode wordcount
"""
"""Filters that look at everything inside of their arguments, and make little more than they look at."""

DEEP_TESTS = """
    != < <= == > >= divisibleby eq equalto even ge greaterthan gt in le lessthan lower lt ne odd upper
"""
"""Tests that look at everything inside of their arguments. Other tests look at a value's type."""

TEXT_METHODS = """
    capitalize casefold center count endswith find format format_map index isalnum isalpha isascii isdecimal
    isdigit isidentifier islower isnumeric isprintable isspace istitle isupper join ljust lower lstrip
    partition removeprefix removesuffix replace rfind rindex rjust rpartition rsplit rstrip split splitlines
    startswith strip swapcase title upper zfill
"""

METHODS: tuple[tuple[type | tuple[type, ...], frozenset[str]], ...] = (
    (str, frozenset(TEXT_METHODS.split())),
    ((list, tuple), frozenset({"copy", "count", "index"})),
    (dict, frozenset({"copy", "get", "items", "keys", "values"})),
    ((int, float, complex, range, bytes), frozenset({"bit_length", "is_integer"})),
    (LoopContext, frozenset(dir(LoopContext))),
    (Iterator, frozenset()),
)
"""Attributes of values that templates may use, by type. Attributes of other types are as Jinja has them."""

_AT_ENDS = {"startswith", "endswith", "removeprefix", "removesuffix", "join"}
_PADDING = {"center", "ljust", "rjust", "zfill"}
_LARGE = 2**20  # characters of a text that may be split without counting first


def allows(value: Any, attribute: str) -> bool:
    """Whether templates may use this attribute of a value."""
    for kind, names in METHODS:
        if isinstance(value, kind):
            return attribute in names
    return True


def call_method(function: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call a method of a text, a list or an object."""
    text, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
    meter().look([*args, *kwargs.values()])
    if not isinstance(text, str):
        if isinstance(text, list | tuple | dict):
            meter().look(text) if name in ("count", "index") else meter().step(PER_VALUE * len(text))
        return meter().result(function(*args, **kwargs))
    if name not in _AT_ENDS:
        sought = sum(len(argument) for argument in args if isinstance(argument, str))
        meter().step(len(text) * (sought + 1))  # the worst case of a search from the right
    if name == "join" and args:
        return join(args[0], text)
    if name == "replace":
        _prepare_replace(text, *args[:2])
    elif name in _PADDING and args and isinstance(args[0], int):
        meter().make(args[0])
    elif name in ("split", "rsplit") and args and isinstance(args[0], str) and args[0]:
        meter().make(PER_VALUE * text.count(args[0]))
    elif len(text) > _LARGE:
        meter().make(8 * len(text))
    return meter().result(function(*args, **kwargs))


def format_text(text: str, function: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call `text.format` or `text.format_map`, which is `function`."""
    plain = text.replace("{{", "").replace("}}", "")
    if re.search(r"\d{5}", plain) or re.search(r"\{[^{}]*\{", plain):
        raise TemplateLimit("it formats with a width that is too large or computed")
    _prepare_format(text, plain.count("{"), [*args, *kwargs.values()])
    return meter().result(function(*args, **kwargs))


def percent(text: str, values: Any) -> Any:
    """`text % values`."""
    if re.search(r"%[^%]*\d{5}", text) or re.search(r"%[#0\- +\d.]*\*", text):
        raise TemplateLimit("it formats with a width that is too large or computed")
    _prepare_format(text, text.count("%"), [values])
    return meter().result(text % values)


def _prepare_format(text: str, fields: int, values: list[Any]) -> None:
    inside = meter().look(values)
    meter().make(len(text) + fields * (4 * inside + 10_000))  # a width has up to four digits


def _prepare_replace(text: str, old: Any = "", new: Any = "") -> None:
    if isinstance(old, str) and isinstance(new, str):
        meter().make(len(text) + text.count(old) * len(new))


def operate(operator: str, function: Function, left: Any, right: Any) -> Any:
    """A binary operator."""
    if operator == "%" and isinstance(left, str):
        return percent(left, right)
    if operator == "*":
        for value, times in ((left, right), (right, left)):
            if isinstance(value, str | list | tuple) and isinstance(times, int):
                meter().make(len(value) * max(times, 0) * (1 if isinstance(value, str) else PER_VALUE))
    if isinstance(left, int) and isinstance(right, int):
        bits = max(left.bit_length(), right.bit_length())
        if operator == "**":
            bits = left.bit_length() * max(right, 1)
        if bits > MAX_BITS:
            raise TemplateLimit("it computes with integers that are too large")
    if operator == "+" and isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
        meter().make((len(left) + len(right)) * (1 if isinstance(left, str) else PER_VALUE))
        return function(left, right)
    return meter().result(function(left, right))


def text_of(value: Any) -> str:
    """A value as it is written into the prompt."""
    if type(value) is not str:
        meter().make(4 * meter().look(value))
        return str(value)
    meter().make(len(value))
    return value


def concat(*values: Any) -> str:
    """The operator `~`."""
    return "".join([text_of(value) for value in values])


def compared(value: Any) -> Any:
    """A side of a comparison, or a key of an object."""
    meter().look(value)
    return value


def cut(value: Any, start: Any, stop: Any, step: Any) -> Any:
    """A part of a text or a list."""
    if hasattr(value, "__len__"):
        meter().step(len(value))
    return meter().result(value[start:stop:step])


def step(_: Any, work: int) -> bool:
    """Count the work of a part of the template that is about to run. It is true, to stand in conditions."""
    meter().step(work)
    return True


def join(values: Iterable[Any], separator: Any = "") -> str:
    """Texts of values, with a separator between them."""
    listed = values if isinstance(values, list | tuple | str) else list(values)
    meter().make(4 * meter().look(listed) + meter().look(separator) * len(listed))
    return str(separator).join(map(str, listed))


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """JSON for a prompt, which is not HTML: no character is escaped for HTML, as Jinja's own filter does."""
    size, per_value = meter().look(value), meter().look(separators) if separators else 4
    if indent is not None:
        per_value += levels_of(value) * (indent if isinstance(indent, int) else meter().look(indent))
    meter().make(2 * size + size // PER_VALUE * max(per_value, 0))
    spacing = {"indent": indent, "separators": separators}
    return json.dumps(value, ensure_ascii=ensure_ascii, sort_keys=sort_keys, **spacing)


@jinja2.pass_context
def _join_filter(context: Context, value: Any, d: Any = "", attribute: Any = None) -> str:
    if attribute is not None:
        own = {"attribute": attribute}
        value = context.environment.call_filter("map", value, kwargs=own, context=context)
    return join(value, d)


def _replace_filter(value: Any, old: Any, new: Any, count: int | None = None) -> Any:
    text = _as_text(value)
    old, new = _as_text(old), _as_text(new)
    return call_method(text.replace, (old, new, -1 if count is None else count), {})


def _trim_filter(value: Any, chars: str | None = None) -> Any:
    return call_method(_as_text(value).strip, (chars,), {})


def _center_filter(value: Any, width: int = 80) -> Any:
    return call_method(_as_text(value).center, (width,), {})


def _indent_filter(value: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> Any:
    text = _as_text(value)
    size = width if isinstance(width, int) else len(width)
    meter().make(len(text) + (len(text.splitlines()) + 1) * max(size, 0))
    return JINJA_FILTERS["indent"](text, width, first, blank)


def _format_filter(value: Any, *args: Any, **kwargs: Any) -> Any:
    if args and kwargs:
        raise jinja2.TemplateRuntimeError("format takes values by place or by name, not both")
    return percent(_as_text(value), kwargs or args)


def _round_filter(value: Any, precision: int = 0, method: Any = "common") -> Any:
    if not isinstance(precision, int) or abs(precision) > 100:
        raise TemplateLimit("it rounds with a precision above 100")
    return JINJA_FILTERS["round"](value, precision, method)


@jinja2.pass_environment
def _sum_filter(environment: jinja2.Environment, values: Any, attribute: Any = None, start: Any = 0) -> Any:
    if not isinstance(start, int | float):
        raise jinja2.TemplateRuntimeError("sum adds numbers only")
    meter().look(values)
    return JINJA_FILTERS["sum"](environment, values, attribute, start)


def _as_text(value: Any) -> str:
    return str(value) if isinstance(value, str) else text_of(value)


def raise_exception(message: Any) -> None:
    """How a template refuses messages."""
    raise jinja2.TemplateError(text_of(message))


def strftime_now(form: str) -> str:
    """The time of this machine in a format of `strftime`."""
    meter().make(256 * len(form))  # the most that Python lets it become
    return datetime.now().strftime(form)


def make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    """The function `dict`."""
    return dict(*args, **kwargs)


class TemplateNamespace(Namespace):
    """The function `namespace`: an object with attributes that a template can set."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace cannot have an attribute {name!r}")
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        """Namespaces can contain each other, so what is inside is not written."""
        return "<Namespace>"


def _counting(function: Function, deep: bool) -> Function:
    """A filter or a test that counts its cost."""
    skipped = 1 if hasattr(function, "jinja_pass_arg") else 0  # Jinja's own object, before the value

    @functools.wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        for value in (*args[skipped:], *kwargs.values()):
            if deep:
                meter().step(20 * meter().look(value))  # sorting looks at values that often
            elif hasattr(type(value), "__len__"):
                meter().step(4 * PER_VALUE * len(value))
        return meter().result(function(*args, **kwargs))

    return counted


FILTERS: Mapping[str, Function] = {
    **{name: JINJA_FILTERS[name] for name in FREE_FILTERS},
    **{name: _counting(JINJA_FILTERS[name], deep=False) for name in SHALLOW_FILTERS},
    **{name: _counting(JINJA_FILTERS[name], deep=True) for name in DEEP_FILTERS.split()},
    "center": _center_filter,
    "format": _format_filter,
    "indent": _indent_filter,
    "join": _join_filter,
    "replace": _replace_filter,
    "round": _round_filter,
    "sum": _sum_filter,
    "tojson": to_json,
    "trim": _trim_filter,
}

TESTS: Mapping[str, Function] = {
    **dict[str, Any](JINJA_TESTS),
    **{name: _counting(dict[str, Any](JINJA_TESTS)[name], deep=True) for name in DEEP_TESTS.split()},
}
