"""Tools for models whose chat template does not know them: what a template of the Hermes family would render.

The text is Qwen's. Calls and their results become words of the assistant and the user.
"""

import json
from collections.abc import Mapping, Sequence

from twostroke.frontend.tools.hermes import CLOSING, OPENING

Message = Mapping[str, object]

_BEFORE = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
_AFTER = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    f"{OPENING}{CLOSING} XML tags:\n{OPENING}\n"
    f'{{"name": <function-name>, "arguments": <args-json-object>}}\n{CLOSING}'
)


def with_instructions(messages: Sequence[Message], tools: Sequence[Mapping[str, object]]) -> list[Message]:
    """`messages` with the tools told in the system message, and calls and results as text."""
    told = [_as_text(message) for message in messages]
    if not tools:
        return told
    text = _BEFORE + "".join(f"\n{json.dumps(tool, ensure_ascii=False)}" for tool in tools) + _AFTER
    if told and told[0]["role"] == "system":
        return [{**told[0], "content": f"{told[0]['content']}\n\n{text}"}, *told[1:]]
    return [{"role": "system", "content": text}, *told]


def _as_text(message: Message) -> Message:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    texts = [str(message["content"])] if message["content"] else []
    for call in calls:
        said = {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}
        texts.append(f"{OPENING}\n{json.dumps(said, ensure_ascii=False)}\n{CLOSING}")
    return {"role": message["role"], "content": "\n".join(texts)}
