"""Show examples of classes as YAML and fields of named tuples: an extension of griffe, the reader of mkdocstrings."""

from __future__ import annotations

import re
from textwrap import dedent
from typing import Any

from griffe import Attribute, Class, Extension, Function, Parameter, ParameterKind, Parameters

EXAMPLE = re.compile(r"^Example:\n((?: +.*\n?|\n)+)", re.MULTILINE)


class Classes(Extension):
    """Completes what griffe reads of a class."""

    def on_class_members(self, *, cls: Class, **more: Any) -> None:
        """Put the example of a docstring into a fenced block, and give a named tuple the signature that it has."""
        if cls.docstring:
            cls.docstring.value = EXAMPLE.sub(lambda found: block(found[1]), cls.docstring.value)
        if "NamedTuple" in map(str, cls.bases):
            fields = [field for field in cls.members.values() if isinstance(field, Attribute) and field.annotation]
            kind = ParameterKind.positional_or_keyword
            given = [Parameter(one.name, annotation=one.annotation, default=one.value, kind=kind) for one in fields]
            signature = Parameters(Parameter("self", kind=kind), *given)
            cls.set_member("__init__", Function("__init__", parameters=signature))


def block(example: str) -> str:
    """Return Markdown of an example."""
    return f"For example:\n\n```yaml\n{dedent(example).strip()}\n```\n"
