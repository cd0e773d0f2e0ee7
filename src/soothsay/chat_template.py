"""Renders chat templates, which come from strangers, within bounds on time and memory.

A template is a program, and its variables come from clients. Jinja's sandbox keeps it from the machine, but
lets it run and allocate for ever. So the syntax tree is changed before it is compiled: each body of a loop, a
macro or a block first counts the work of its own nodes, and each operation that may cost more than a moment,
or make a large value, goes through `soothsay.template_operations`, which counts its cost before it runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

import soothsay.template_operations as operations
from soothsay.errors import ModelError, RequestError
from soothsay.template_meter import PER_NODE, PER_VALUE, TemplateLimit, meter, metering

MAX_TEMPLATE = 2**18
"""Limit of a template's length in characters. Published ones have up to 30,000."""

Operation = Callable[..., Any]

OPERATIONS = (operations.concat, operations.text_of, operations.compared, operations.cut, operations.step)
"""Operations that `_Counting` puts into a template, as filters."""

_LOCALS = frozenset({"_loop_vars", "_block_vars"})
"""What Jinja's compiler adds to the keywords of a call."""


class ChatTemplate:
    """A compiled chat template.

    Raises `ModelError` if it is not valid Jinja, or too long or nested too deep.
    """

    def __init__(self, source: str):
        if len(source) > MAX_TEMPLATE:
            problem = f"the chat template has {len(source):,} characters, and {MAX_TEMPLATE:,} is the limit"
            raise ModelError(f"{problem}; check the model's origin")
        try:
            self._template = _Environment().from_string(source)
        except jinja2.TemplateError as error:
            raise ModelError(f"the chat template is not valid Jinja: {error}") from error
        except RecursionError:
            raise ModelError("the chat template is nested too deep; check the model's origin") from None
        except Exception as error:  # of Python's compiler: too many nested loops, too large numbers
            raise ModelError(f"the chat template cannot be compiled: {error}") from error

    def render(self, **variables: object) -> str:
        """The text that the template makes of `variables`.

        Raises `RequestError` if the template refuses them, fails, or exceeds its limits.
        """
        try:
            with metering():
                return "".join(self._template.generate(**variables))
        except TemplateLimit as error:
            problem = f"the chat template exceeds its limits with these messages ({error})"
            raise RequestError(f"{problem}: send less, or check the model's template") from error
        except RecursionError:
            raise RequestError("the chat template or the messages are nested too deep") from None
        except Exception as error:  # a template can raise nearly anything
            raise RequestError(f"the chat template refused the messages: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    return str(error)[:1000] or type(error).__name__


class _Generation(Extension):
    """The block `{% generation %}`, which marks the assistant's text for training. It changes no text."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        """The body of the block, with variables of its own."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with counted operations, and with the functions that chat templates expect."""

    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    def __init__(self) -> None:
        # the optimizer would run operations at compile time
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation], optimized=False
        )
        del self.globals["lipsum"]
        self.globals["dict"] = operations.make_dict
        self.globals["namespace"] = operations.TemplateNamespace
        self.globals["raise_exception"] = operations.raise_exception
        self.globals["strftime_now"] = operations.strftime_now
        self.filters = {**operations.FILTERS}
        self.tests = {**operations.TESTS}
        self.filters |= {_filter_name(operation): _at_run_time(operation) for operation in OPERATIONS}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Counting().visit(super()._parse(source, name, filename))
        return tree

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Whether a template may use an attribute."""
        return super().is_safe_attribute(obj, attr, value) and operations.allows(obj, attr)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """The method `format` of a text, counted."""
        function = super().wrap_str_format(value)
        if function is None:
            return None
        return lambda *args, **kwargs: operations.format_text(value.__self__, function, args, kwargs)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """An item. A key that is a tuple is hashed with all that is inside."""
        if isinstance(argument, tuple):
            meter().look(argument)
        return super().getitem(obj, argument)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """An operator."""
        return operations.operate(operator, self.binop_table[operator], left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """A call. Jinja names the first parameters like this so that keywords may have any name."""
        given = {name: value for name, value in kwargs.items() if name not in _LOCALS}
        if isinstance(__obj, Macro | LoopContext) or __obj is operations.TemplateNamespace:
            meter().step(PER_NODE + PER_VALUE * (len(args) + len(given)))
            return super().call(__context, __obj, *args, **kwargs)
        if isinstance(getattr(__obj, "__self__", None), str | list | tuple | dict | int | float):
            return operations.call_method(__obj, args, given)
        meter().look([*args, *given.values()])
        return meter().result(super().call(__context, __obj, *args, **kwargs))


def _at_run_time(operation: Operation) -> Operation:
    """A filter that Jinja never runs at compile time."""

    @jinja2.pass_context
    def filtered(context: Context, *args: Any) -> Any:
        return operation(*args)

    return filtered


def _filter_name(operation: Operation) -> str:
    """The name of an operation among the filters. A template cannot spell a name with a space."""
    return f"soothsay {operation.__name__}"


def _filter(operation: Operation, value: nodes.Expr, *args: nodes.Expr) -> nodes.Filter:
    made = nodes.Filter(value, _filter_name(operation), list(args), [], None, None)
    made.set_lineno(value.lineno)
    return made


def _const(value: Any, line: int) -> nodes.Const:
    return nodes.Const(value, lineno=line)


def _step(node: nodes.Node, line: int) -> nodes.Filter:
    """An expression that counts one run of `node`, and is true."""
    work = PER_NODE * (1 + sum(1 for _ in node.find_all(nodes.Node)))
    return _filter(operations.step, _const(None, line), _const(work, line))


def _counted(node: Any) -> Any:
    """Make a node that has a body count each run of the body."""
    node.body = [nodes.ExprStmt(_step(node, node.lineno), lineno=node.lineno), *node.body]
    return node


def _compared(node: nodes.Expr) -> nodes.Expr:
    return node if isinstance(node, nodes.Const) else _filter(operations.compared, node)


class _Counting(NodeTransformer):
    """Changes a syntax tree so that it counts what it costs. Jinja names the methods after its nodes."""

    def visit_Output(self, node: Any) -> Any:  # noqa: N802
        """Count the text that is written."""
        node = self.generic_visit(node)
        for i, part in enumerate(node.nodes):
            is_data = isinstance(part, nodes.TemplateData)
            node.nodes[i] = _filter(operations.text_of, _const(part.data, node.lineno) if is_data else part)
        return node

    def visit_Concat(self, node: Any) -> Any:  # noqa: N802
        """Count the text that the operator `~` makes."""
        return _filter(operations.concat, *self.generic_visit(node).nodes)  # type: ignore[attr-defined]

    def visit_Compare(self, node: Any) -> Any:  # noqa: N802
        """Count what a comparison looks at."""
        node = self.generic_visit(node)
        node.expr = _compared(node.expr)
        for operand in node.ops:
            operand.expr = _compared(operand.expr)
        return node

    def visit_Pair(self, node: Any) -> Any:  # noqa: N802
        """Count what is hashed in a key."""
        node = self.generic_visit(node)
        node.key = _compared(node.key)
        return node

    def visit_Getitem(self, node: Any) -> Any:  # noqa: N802
        """Count what a slice copies."""
        node = self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            return node
        ends = (node.arg.start, node.arg.stop, node.arg.step)
        return _filter(operations.cut, node.node, *(end or _const(None, node.lineno) for end in ends))

    def visit_For(self, node: Any) -> Any:  # noqa: N802
        """Count each turn, and each run of the condition after `if`."""
        node = self.generic_visit(node)
        if node.test is not None:
            node.test = nodes.And(_step(node.test, node.lineno), node.test, lineno=node.lineno)
        return _counted(node)

    def visit_body(self, node: Any) -> Any:
        """Count each run."""
        return _counted(self.generic_visit(node))

    visit_Template = visit_Macro = visit_CallBlock = visit_Block = visit_body  # noqa: N815
