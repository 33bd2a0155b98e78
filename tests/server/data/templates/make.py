#!/usr/bin/env python3
"""Writes expected.json: what jinja2, set up as transformers sets it up, makes of the templates of cases.py and *.jinja.

    python3 tests/server/data/templates/make.py      needs python3-jinja2; the tests only need what it wrote
"""
import datetime
import json
import os
import sys
import traceback

import jinja2
from jinja2 import nodes
from jinja2.exceptions import TemplateError, TemplateSyntaxError, UndefinedError
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

import cases as corpus

HERE = os.path.dirname(os.path.abspath(__file__))
NOW = 1700000000
wrong = []  # cases that do not do what cases.py says of them


class Generation(Extension):
    """As transformers' AssistantTracker: the block's contents, in a scope of its own."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return nodes.CallBlock(self.call_method("_render"), [], [], body).set_lineno(line)

    def _render(self, caller):
        return caller()


def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def raise_exception(message):
    raise TemplateError(message)


def strftime_now(text):
    return datetime.datetime.fromtimestamp(NOW, datetime.timezone.utc).strftime(text)


def environment():
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = strftime_now
    return env


def error_line(error):
    if isinstance(error, TemplateSyntaxError):
        return error.lineno
    return [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == "<template>"][-1]


def run(case):
    values = {"documents": None, "tools": case.get("tools"),
              "add_generation_prompt": case.get("add_generation_prompt", False),
              "bos_token": "<s>", "eos_token": "</s>"}
    values.update(case.get("kwargs") or {})
    values["messages"] = case.setdefault("messages", [])
    try:
        case["text"] = environment().from_string(case["template"]).render(**values)
    except Exception as error:
        case["error"] = type(error).__name__ + ": " + str(error)
        case["line"] = error_line(error)
        if type(error) in (TemplateError, UndefinedError):
            case["words"] = str(error)
    if "expect_error" in case and "error" not in case:
        wrong.append(f"{case['name']}: expected an error, got {case['text']!r}")
    if "expect_error" not in case and "error" in case:
        wrong.append(f"{case['name']}: {case['error']}")
    case.pop("expect_error", None)
    return case


def main():
    cases = []
    for name, template, kwargs in corpus.SMALL:
        cases.append(run({"name": name, "template": template, "kwargs": kwargs}))
    for name, template, kwargs in corpus.ERRORS:
        cases.append(run({"name": name, "template": template, "kwargs": kwargs, "expect_error": True}))
    for family, names in corpus.FAMILIES.items():
        with open(os.path.join(HERE, family + ".jinja"), encoding="utf-8") as f:
            template = f.read()
        for name in names:
            talk = dict(corpus.TALKS[name.rstrip("!")])
            if name.endswith("!"):
                talk["expect_error"] = True
            case = run({"name": f"{family}: {name}", "template": template, **talk})
            case["template"] = family + ".jinja"
            cases.append(case)
    if wrong:
        sys.exit("\n".join(wrong))
    with open(os.path.join(HERE, "expected.json"), "w", encoding="utf-8") as f:
        json.dump(cases, f, ensure_ascii=False, indent=1)
        f.write("\n")
    print(len(cases), "cases")


main()
