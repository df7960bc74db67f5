"""A tool: the model asks for a call, the program makes it, the model answers from the result.

python examples/tools.py [MODEL]
"""

from __future__ import annotations

import json
import sys
from typing import Any

import lily


def get_weather(city: str) -> dict[str, Any]:
    return {"degrees": 4 + len(city), "sky": "cloudy"}


FUNCTIONS = {"get_weather": get_weather}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Get the weather.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
]

messages: list[dict[str, Any]] = [{"role": "user", "content": "How is the weather in Oslo?"}]

with lily.Engine.load(sys.argv[1] if len(sys.argv) > 1 else "demo") as engine:
    result = engine.chat(messages, tools=TOOLS, temperature=0)
    while result.finish_reason == "tool_calls":
        messages.append(result.message)
        for call in result.tool_calls:
            value = FUNCTIONS[call.name](**call.arguments)
            print(f"called {call.name}({call.arguments}) -> {value}")
            messages.append({"role": "tool", "content": json.dumps(value)})
        result = engine.chat(messages, tools=TOOLS, temperature=0)
    print("answer:", result.text)
