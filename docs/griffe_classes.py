"""Extension of mkdocstrings' griffe that shows examples of classes as YAML, and the fields of named tuples."""

from __future__ import annotations

import re
from textwrap import dedent
from typing import Any

from griffe import Attribute, Class, Extension, Function, Parameter, ParameterKind, Parameters

EXAMPLE = re.compile(r"^Example:\n((?: +.*\n?|\n)+)", re.MULTILINE)


class Classes(Extension):
    """The extension."""

    def on_class_members(self, *, cls: Class, **more: Any) -> None:
        """Put the example of a class's docstring into a block of code, and give a named tuple its constructor."""
        if cls.docstring:
            cls.docstring.value = EXAMPLE.sub(lambda match: block(match[1]), cls.docstring.value)
        if "NamedTuple" in map(str, cls.bases):
            fields = [field for field in cls.members.values() if isinstance(field, Attribute) and field.annotation]
            kind = ParameterKind.positional_or_keyword
            parameters = [
                Parameter(one.name, annotation=one.annotation, default=one.value, kind=kind) for one in fields
            ]
            signature = Parameters(Parameter("self", kind=kind), *parameters)
            cls.set_member("__init__", Function("__init__", parameters=signature))


def block(example: str) -> str:
    """Return Markdown of an example."""
    return f"For example:\n\n```yaml\n{dedent(example).strip()}\n```\n"
