"""Chat templates: rendered as transformers renders them, and ended whatever they do."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from chat_styles import CONVERSATIONS, SNIPPETS, STYLES, SYSTEM, TOOLS
from transformers.utils.chat_template_utils import render_jinja_template

from soothsay.chat_template import MAX_TEMPLATE, ChatTemplate
from soothsay.errors import ModelError, RequestError
from soothsay.model.weights.checkpoint import open_checkpoint
from soothsay.template_meter import MAX_MADE, MAX_WORK, metering

MESSAGES = [{"role": "user", "content": "hello " * 10}]
BUNDLED = (open_checkpoint("sibyl").path / "chat_template.jinja").read_text()


def ours(source: str, messages: Any = MESSAGES, **variables: Any) -> str:
    return ChatTemplate(source).render(messages=messages, **variables)


def theirs(source: str, messages: list[dict[str, Any]], tools: Any, **variables: Any) -> str:
    rendered, _ = render_jinja_template([messages], tools=tools, chat_template=source, **variables)
    return str(rendered[0])


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("style", [*STYLES, "bundled"])
def test_templates_render_as_in_transformers(style: str, conversation: str) -> None:
    source, messages = STYLES.get(style, BUNDLED), CONVERSATIONS[conversation]
    for tools in (None, TOOLS):
        for thinking in (True, False):
            variables: dict[str, Any] = {
                "bos_token": "<s>",
                "eos_token": "</s>",
                "add_generation_prompt": thinking,
                "enable_thinking": thinking,
            }
            try:
                expected = theirs(source, messages, tools, **variables)
            except Exception as error:
                expected = f"the chat template refused the messages: {error}"
            try:
                rendered = ours(source, messages, tools=tools, documents=None, **variables)
            except RequestError as error:
                rendered = str(error)
            assert rendered == expected


def test_most_conversations_render() -> None:
    """So that the test above does not only compare errors."""
    for style in STYLES.values():
        rendered = 0
        for messages in CONVERSATIONS.values():
            try:
                rendered += len(theirs(style, messages, TOOLS, bos_token="<s>", eos_token="</s>")) > 10
            except Exception:
                continue
        assert rendered >= 3


@pytest.mark.parametrize("source", SNIPPETS)
def test_pieces_of_jinja_render_as_in_transformers(source: str) -> None:
    assert ours(source, tools=None, documents=None) == theirs(source, MESSAGES, None)


@pytest.mark.parametrize("form", ["%d %b %Y", "%Y-%m-%d", "%A, %B", ""])
def test_the_date(form: str) -> None:
    before = theirs("{{ strftime_now(form) }}", [], None, form=form)
    now = ours("{{ strftime_now(form) }}", form=form)
    assert now in (before, theirs("{{ strftime_now(form) }}", [], None, form=form))


LOOP = "{% for i in range(99999) %}"
END = "{% endfor %}"


def grown(start: str, larger: str) -> str:
    """A template that sets a variable to something larger, again and again."""
    return f"{{% set ns = namespace(x={start}) %}}{LOOP}{{% set ns.x = {larger} %}}{END}"


def nested(start: str, larger: str, use: str) -> str:
    """The same 200 times, and a use of the variable."""
    return grown(start, larger).replace("99999", "200") + use


def filled(block: str) -> str:
    """The same with a block that fills a variable."""
    return (
        f"{{% set ns = namespace(x='ab') %}}{LOOP}{{% set y %}}{block}{{% endset %}}{{% set ns.x = y %}}{END}"
    )


ENDLESS: dict[str, str] = {
    "nested loops": LOOP * 3 + END * 3,
    "nested loops with text": LOOP * 3 + "x" + END * 3,
    "a long body": LOOP + "{{ messages }}" * 5000 + END,
    "long text in a loop": LOOP + "x" * 100_000 + END,
    "a long condition in a loop": LOOP * 2 + "{% if " + "1 == 1 and " * 40 + "false %}{% endif %}" + END * 2,
    "a costly filter of a loop": "{% for i in range(99999) if range(99999) | list | length < 0 %}" + END,
    "a repeated text": "{{ 'a' * 10 ** 10 }}",
    "a repeated list": "{{ [1] * 10 ** 10 }}",
    "a repeated tuple, from the right": "{{ 10 ** 10 * (1, 2) }}",
    "powers": "{{ 10 ** (10 ** 10) }}",
    "powers of variables": "{% set x = 10 ** 100 %}{{ x ** x }}",
    "squares": grown("3", "ns.x * ns.x") + "{{ ns.x }}",
    "doubling by ~": grown("'ab'", "ns.x ~ ns.x"),
    "doubling by +": grown("'ab'", "ns.x + ns.x"),
    "doubling by + of lists": grown("[1]", "ns.x + ns.x"),
    "doubling by join": grown("'ab'", "[ns.x, ns.x] | join"),
    "doubling by join of a text": grown("'ab'", "'-'.join([ns.x, ns.x])"),
    "doubling by format": grown("'ab'", "'%s%s' | format(ns.x, ns.x)"),
    "doubling by %": grown("'ab'", "'%s%s' % (ns.x, ns.x)"),
    "doubling by the method format": grown("'ab'", "'{0}{0}'.format(ns.x)"),
    "doubling by format_map": grown("'ab'", "'{a}{a}'.format_map({'a': ns.x})"),
    "doubling by replace": grown("'ab'", "ns.x | replace('a', 'aa')"),
    "doubling by a block": filled("{{ ns.x }}{{ ns.x }}"),
    "doubling by a filter block": filled("{% filter upper %}{{ ns.x }}{{ ns.x }}{% endfilter %}"),
    "doubling by a macro": "{% macro f(x) %}{{ x }}{{ x }}{% endmacro %}" + grown("'ab'", "f(ns.x)"),
    "lists in lists, written": nested("[1]", "[ns.x, ns.x]", "{{ ns.x }}"),
    "lists in lists, as JSON": nested("[1]", "[ns.x, ns.x]", "{{ ns.x | tojson }}"),
    "lists in lists, compared": nested("[1]", "[ns.x, ns.x]", "{{ ns.x == ns.x[:] }}"),
    "objects in objects": nested("{}", "{1: ns.x, 2: ns.x}", "{{ ns.x | string }}"),
    "tuples as keys": nested("(1,)", "(ns.x, ns.x)", "{{ {ns.x: 1} }}"),
    "tuples as indices": nested("(1,)", "(ns.x, ns.x)", "{{ {}[ns.x] }}"),
    "tuples in a test": nested("(1,)", "(ns.x, ns.x)", "{{ [[ns.x]] | select('in', [1, [ns.x]]) | list }}"),
    "macros that call themselves twice": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}"
    + "{% endmacro %}{{ f(90) }}",
    "padding": "{{ 'x'.center(10 ** 10) }}",
    "padding to the left": "{{ 'x'.rjust(10 ** 10) }}",
    "zeros": "{{ 'x'.zfill(10 ** 10) }}",
    "the filter center": "{{ 'x' | center(10 ** 10) }}",
    "the filter indent": "{{ 'x' | indent(10 ** 10, true) }}",
    "indent with a text": "{{ ('x\\n' * 10000) | indent('y' * 10000) }}",
    "a width in format": "{{ '%10000000000d' | format(1) }}",
    "a precision in format": "{{ '%.10000000000f' | format(1.5) }}",
    "a width as an argument": "{{ '%*d' | format(10 ** 10, 1) }}",
    "a width after a name": "{{ '%(a(b)c)99999999999d' % {'a(b)c': 1} }}",
    "a width in the method format": "{{ '{:>10000000000}'.format(1) }}",
    "a computed width": "{{ '{:>{w}}'.format(1, w=10 ** 10) }}",
    "a long separator": "{{ range(99999) | join('a' * 9999) }}",
    "replacing nothing": "{{ ('a' * 100000).replace('', 'b' * 100000) }}",
    "the filter replace": "{{ ('a' * 100000) | replace('a', 'b' * 100000) }}",
    "rounding down": "{{ 5 | round(-10 ** 10) }}",
    "rounding up": "{{ 5 | round(10 ** 10, 'ceil') }}",
    "a search from the right": "{{ ('a' * 1000000).rfind('b' + 'a' * 500000) }}",
    "stripping": "{{ ('a' * 1000000).strip('b' * 1000000 + 'a') }}",
    "the filter trim": "{{ ('a' * 1000000) | trim('b' * 1000000 + 'a') }}",
    "indented JSON": "{{ messages | tojson(indent=10 ** 9) }}",
    "JSON with long separators": "{{ range(99999) | list | tojson(separators=('a' * 99999, ':')) }}",
    "deep JSON, indented": "{% set ns = namespace(x=range(30000) | list) %}{% for i in range(900) %}"
    + "{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x | tojson(indent=8) }}",
    "a number in a range": LOOP + "{% if 'x' in range(99999) %}{% endif %}" + END,
    "selecting": LOOP + "{{ range(99999) | select('equalto', 'x') | list }}" + END,
    "mapping": LOOP + "{{ range(99999) | map('string') | list | length }}" + END,
    "mapping lazily": LOOP + "{{ range(99999) | map('string') | reject('string') | first }}" + END,
    "sorting": "{% set x = ('a ' * 50000).split() %}" + LOOP + "{{ x | sort | first }}" + END,
    "upper case": LOOP + "{% if ('a' * 1000000) | upper %}{% endif %}" + END,
    "slices": "{% set x = 'a' * 1000000 %}" + LOOP + "{% if x[::-1] %}{% endif %}" + END,
    "comparing": "{% set x = 'a' * 1000000 %}" + LOOP + "{% if x ~ 'b' == x ~ 'c' %}{% endif %}" + END,
    "many arguments": LOOP + "{{ cycler(*range(99999)).next() }}" + END,
    "many arguments of a macro": "{% macro f() %}{{ varargs | length }}{% endmacro %}"
    + LOOP
    + "{{ f(*range(99999)) }}"
    + END,
    "a long date": "{{ strftime_now('%c' * 1000000) }}",
    "splitting": "{{ ('ab' * 5000000).split('b') | length }}",
    "a message of the template": "{{ raise_exception('x' * 10 ** 9) }}",
}
OTHERWISE: dict[str, str] = {
    "sums of lists": "{{ [[1] * 1000] * 1000 | sum(start=[]) }}",
    "blocks that call themselves": "{% block b %}{{ self.b() }}{{ self.b() }}{% endblock %}",
    "a loop that calls itself": "{% for i in range(9999) recursive %}{{ loop(range(9999)) }}{% endfor %}",
    "macros that call themselves": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "text by bytes": "{{ 'x'.encode().center(10 ** 10) }}",
    "tabs": "{{ '\\t'.expandtabs(10 ** 10) }}",
    "translating": "{{ 'a'.translate({97: 'b' * 1000}) }}",
    "words": "{{ messages | map('wordwrap') | list }}",
    "lipsum": "{{ lipsum(10 ** 9) }}",
    "a large range": "{{ range(10 ** 12) }}",
    "the base of a number": "{{ ('f' * 1000000) | int(base=16) }}",
    "including": "{% include 'x' %}",
    "importing": "{% import 'x' as y %}",
    "inheriting": "{% extends 'x' %}",
    "division": "{{ 1 / 0 }}",
    "unpacking": "{% for a, b in [1] %}{% endfor %}",
    "a key": "{{ {[]: 1} }}",
    "an attribute of nothing": "{{ nothing.at.all }}",
    "an assertion": "{{ raise_exception('no') }}",
    "calling a number": "{{ 5() }}",
    "JSON of a function": "{{ range | tojson }}",
    "our own operations": "{{ 5 | map('soothsay step', 'x') | list }}",
}


RUN = """
    import json, resource, sys
    sys.path[:0] = sys.argv[1:]
    import test_chat_template as tests
    from soothsay import template_meter
    template_meter.MAX_WORK //= 5  # for fast tests
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 400 * 2**20,) * 2)
    resource.setrlimit(resource.RLIMIT_CPU, (300, 300))
    told = {}
    for name, source in {**tests.ENDLESS, **tests.OTHERWISE}.items():
        before = resource.getrusage(resource.RUSAGE_SELF).ru_utime
        try:
            error = "none: " + tests.ours(source)[:100]
        except tests.RequestError as refused:
            error = str(refused)
        told[name] = error, resource.getrusage(resource.RUSAGE_SELF).ru_utime - before
    print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def told() -> dict[str, tuple[str, float]]:
    """For each hostile template, the error and the seconds, in a process that has little memory."""
    if not Path("/proc/self/statm").exists():
        pytest.skip("needs /proc/self/statm")
    here = Path(__file__).parent
    command = [sys.executable, "-c", textwrap.dedent(RUN), str(here), str(here / "helpers")]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    result: dict[str, tuple[str, float]] = json.loads(run.stdout)
    return result


@pytest.mark.parametrize("name", ENDLESS)
def test_templates_that_would_not_end_are_stopped(name: str, told: dict[str, tuple[str, float]]) -> None:
    error, seconds = told[name]
    assert "exceeds its limits with these messages" in error
    assert seconds < 10  # of the processor; about 0.3 on a free machine


@pytest.mark.parametrize("name", OTHERWISE)
def test_what_templates_cannot_do_is_an_error_of_the_request(
    name: str, told: dict[str, tuple[str, float]]
) -> None:
    assert "refused the messages" in told[name][0] or "nested too deep" in told[name][0]
    assert told[name][1] < 10


def test_clients_values_cannot_exceed_the_limits_either() -> None:
    source = "{{ messages | tojson(indent=4) }}{{ kwarg.center(width) }}"
    deep: Any = [1]
    for _ in range(900):
        deep = [deep, 1]
    with pytest.raises(RequestError, match=r"exceeds its limits|nested too deep"):
        ours(source, [{"role": "user", "content": [deep] * 100}], kwarg="x", width=1)
    with pytest.raises(RequestError, match="exceeds its limits"):
        ours(source, kwarg="x", width=10**12)
    for value in (10**400, float("nan"), "\ud800", None, [], {"a": {}}):
        try:
            ours(source, [{"role": value, "content": value}], kwarg=value, width=1)
        except RequestError:
            continue


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{% for %}", "not valid Jinja"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "nested too deep|not valid|cannot be compiled"),
        ("{% if 1 %}" * 3000 + "{% endif %}" * 3000, "nested too deep|cannot be compiled"),
        ("{% for i in [1] %}" * 30 + "{% endfor %}" * 30, "cannot be compiled"),
        ("{{ " + "9" * 5000 + " }}", "cannot be compiled"),
        ("{{ " + "1 + " * 3000 + "1 }}", "nested too deep"),
        ("x" * (MAX_TEMPLATE + 1), "characters, and"),
        ("{{ 'x' | wordwrap(1) }}", "No filter named 'wordwrap'"),
    ],
)
def test_templates_that_are_no_programs(source: str, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        ChatTemplate(source)


def test_nothing_runs_when_a_template_is_compiled() -> None:
    for source in (
        "{{ 'x' | center(10 ** 10) }}",
        "{% autoescape 'x' | center(9999999999) %}{% endautoescape %}",
        "{% set x = 'x' | indent(9999999999, true) %}",
        "{% if 'x'.center(9999999999) %}{% endif %}",
        "{{ 'x' | upper | center(9999999999) }}",
    ):
        template = ChatTemplate(source)
        with pytest.raises(RequestError, match="exceeds its limits"):
            template.render(messages=[])


def test_a_long_conversation_is_far_from_the_limits() -> None:
    """2,000 messages with 1 MB of text take less than a fifth of what is allowed."""
    rng = random.Random(0)
    text = "".join(rng.choices("abc defg \n", k=500))
    turns = [{"role": "user" if i % 2 == 0 else "assistant", "content": f"{i} {text}"} for i in range(2000)]
    for style in STYLES.values():
        template = ChatTemplate(style)
        with metering() as outer:
            made = "".join(
                template._template.generate(
                    messages=[SYSTEM, *turns],
                    tools=TOOLS,
                    add_generation_prompt=True,
                    bos_token="",
                    eos_token="",
                )
            )
        assert outer.work < MAX_WORK / 5
        assert outer.made < MAX_MADE / 3
        assert len(made) > 1_000_000 or style == STYLES["macros"]


def test_namespaces_can_hold_each_other() -> None:
    assert ours("{% set a = namespace(b=1) %}{% set a.b = a %}{{ a }}{{ [a] }}") == "<Namespace>[<Namespace>]"


def test_limits_are_those_of_one_rendering() -> None:
    template = ChatTemplate("{{ 'x' * 1000000 }}")
    for _ in range(100):
        assert len(template.render(messages=[])) == 1_000_000
