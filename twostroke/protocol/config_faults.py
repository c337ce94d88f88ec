"""Says what is wrong in a configuration so that it can be mended: the setting's path, what was found, what would do.

msgspec says `Invalid enum value 'fast' - at `$.router.policy.context``; users read
`router.policy.context: 'fast' is none of round_robin, least_loaded`.
"""

import enum
import re
import reprlib
import typing

import msgspec

_PLACE = re.compile(r" - at `(?P<key>key` in `)?\$(?P<path>[^`]*)`$")
_UNKNOWN = re.compile(r"^Object contains unknown field `(?P<name>.*)`$")
_ENUM = "Invalid enum value"
_PLAIN_WORDS = {
    "`": "",
    "object": "a section of settings",
    "array": "a list",
    "str": "a text",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "null": "nothing",
    " | ": " or ",
    "Expected ": "expected ",
}


def explain(fault: str, document: object, root: type[msgspec.Struct]) -> str:
    """A person's words for what msgspec said.

    Args:
        fault: Message of its `ValidationError`.
        document: What was checked.
        root: The struct that it was checked against.
    """
    place = _PLACE.search(fault)
    problem = fault[: place.start()] if place else fault
    path = place["path"].lstrip(".") if place else ""
    if place and place["key"]:
        return _at(path, "every name of a setting must be a text")
    kind = _type_at(root, path)
    unknown = _UNKNOWN.match(problem)
    if unknown and isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        known = ", ".join(kind.__struct_fields__)
        return _at(f"{path}.{unknown['name']}".lstrip("."), f"there is no such setting; there are {known}")
    value = _value_at(document, path)
    if problem.startswith(_ENUM) and isinstance(kind, type) and issubclass(kind, enum.Enum):
        return _at(path, f"{value!r} is none of {', '.join(str(member.value) for member in kind)}")
    problem = problem.partition(", got ")[0]
    for word, plain in _PLAIN_WORDS.items():
        problem = problem.replace(word, plain)
    found = "nothing; leave it out to take the defaults" if value is None else reprlib.repr(value)
    return _at(path, f"{problem}, got {found}")


def _at(path: str, words: str) -> str:
    return f"{path}: {words}" if path else words


def _type_at(root: type[msgspec.Struct], path: str) -> object:
    """The declared type of the setting at `path`; None where it is an element of a list."""
    kind: object = root
    for name in filter(None, path.split(".")):
        if not (isinstance(kind, type) and issubclass(kind, msgspec.Struct)):
            return None
        kind = typing.get_type_hints(kind).get(name)
    return kind


def _value_at(document: object, path: str) -> object:
    """What the document holds at `path`, as far as that goes."""
    here = document
    for name in re.findall(r"[^.\[\]]+", path):
        if isinstance(here, dict):
            here = here.get(name)
        elif isinstance(here, list | tuple) and name.isdecimal():
            here = here[int(name)]
    return here
