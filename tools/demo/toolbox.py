"""The tools that the demo model learns to call."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass
class Tool:
    """A tool the model can call: its schema, how people ask for it, what it returns and what is said then."""

    name: str
    description: str
    parameters: dict[str, str]
    asks: tuple[str, ...]
    result: Callable[[random.Random, dict[str, Any]], dict[str, Any]]
    answer: str
    informative: bool = True  # whether the answer depends on the result

    def schema(self) -> dict[str, Any]:
        """Return the OpenAI-style description of the tool."""
        properties = {key: {"type": kind} for key, kind in self.parameters.items()}
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": {"type": "object", "properties": properties, "required": [*self.parameters]},
        }
        return {"type": "function", "function": function}


def _clock(r: random.Random) -> str:
    return f"{r.randint(0, 23)}:{r.randint(0, 59):02d}"


TOOLS = [
    Tool(
        "get_weather",
        "Get the weather.",
        {"city": "string"},
        ("How is the weather in {city}?", "What is the weather in {city}?", "Weather in {city}?"),
        lambda r, a: {"degrees": r.randint(-9, 39), "sky": r.choice(["sunny", "cloudy", "rainy", "foggy"])},
        "It is {degrees} degrees and {sky} in {city}.",
    ),
    Tool(
        "get_time",
        "Get the time.",
        {"city": "string"},
        ("What time is it in {city}?", "Tell me the time in {city}."),
        lambda r, a: {"time": _clock(r)},
        "It is {time} in {city}.",
    ),
    Tool(
        "get_population",
        "Count the people of a city.",
        {"city": "string"},
        ("How many people live in {city}?", "What is the population of {city}?"),
        lambda r, a: {"people": r.randint(100, 99999)},
        "{city} has {people} people.",
    ),
    Tool(
        "find_phone",
        "Find a phone number.",
        {"name": "string"},
        ("What is the phone number of {name}?", "Find the phone number of {name}."),
        lambda r, a: {"phone": str(r.randint(1000, 9999))},
        "The phone number of {name} is {phone}.",
    ),
    Tool(
        "find_age",
        "Find an age.",
        {"name": "string"},
        ("How old is {name}?", "What is the age of {name}?"),
        lambda r, a: {"age": r.randint(1, 99)},
        "{name} is {age} years old.",
    ),
    Tool(
        "get_price",
        "Get a price.",
        {"item": "string"},
        ("What does a {item} cost?", "What is the price of a {item}?"),
        lambda r, a: {"euros": r.randint(1, 999)},
        "A {item} costs {euros} euros.",
    ),
    Tool(
        "send_message",
        "Send a message.",
        {"to": "string", "text": "string"},
        ("Send the message {text} to {to}.", "Send {to} the message {text}."),
        lambda r, a: {"sent": True},
        "I sent {text} to {to}.",
        informative=False,
    ),
    Tool(
        "play_song",
        "Play a song.",
        {"title": "string"},
        ("Play the song {title}.", "Play {title}."),
        lambda r, a: {"playing": True},
        "I play {title}.",
        informative=False,
    ),
    Tool(
        "set_timer",
        "Set a timer.",
        {"minutes": "integer"},
        ("Set a timer for {minutes} minutes.", "Start a timer of {minutes} minutes."),
        lambda r, a: {"set": True},
        "The timer is set for {minutes} minutes.",
        informative=False,
    ),
    Tool(
        "add",
        "Add two numbers.",
        {"a": "integer", "b": "integer"},
        ("Use the tool to add {a} and {b}.",),
        lambda r, a: {"result": a["a"] + a["b"]},
        "{a} + {b} = {result}.",
    ),
    Tool(
        "multiply",
        "Multiply two numbers.",
        {"a": "integer", "b": "integer"},
        ("Use the tool to multiply {a} and {b}.",),
        lambda r, a: {"result": a["a"] * a["b"]},
        "{a} * {b} = {result}.",
    ),
]
