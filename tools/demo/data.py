"""Generated conversations for the demo model, and the question suite that stays out of them.

Everything is made by this file: no text comes from elsewhere. A `Sampler` draws conversations of the kinds in
`MIX`; whatever identifies a question (an invented word, a pair of summands, a range) is drawn through
`Sampler.draw`, which never returns a value the question suite holds out.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from .lexicon import (
    ANIMALS,
    BEYOND,
    CAPITALS,
    CITIES,
    COLOURS,
    NAMES,
    REFUSAL,
    SMALL_TALK,
    SYSTEM,
    WORDS,
)
from .toolbox import TOOLS, Tool

Message = dict[str, Any]


@dataclass
class Conversation:
    """One conversation with the kind of its last question and what identifies its questions."""

    kind: str
    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    thinking: bool = False
    keys: set[str] = field(default_factory=set)
    expect: dict[str, Any] = field(default_factory=dict)


def user(text: str) -> Message:
    """Return a user turn."""
    return {"role": "user", "content": text}


def assistant(text: str, thought: str, **more: Any) -> Message:
    """Return an assistant turn with its reasoning."""
    return {"role": "assistant", "content": text, "reasoning_content": thought, **more}


class Sampler:
    """Draws conversations from a seed, never one that contains a held-out key.

    `unseen_only` makes every argument an invented one, as the question suite needs.
    """

    def __init__(self, seed: int, held_out: Iterable[str] = (), *, unseen_only: bool = False) -> None:
        self.random = random.Random(seed)
        self.held_out = frozenset(held_out)
        self.unseen_only = unseen_only
        self.keys: set[str] = set()

    def draw(self, kind: str, make: Callable[[], Any]) -> Any:
        """Return a value of `make` that is not held out, and note its key."""
        while f"{kind}:{str(value := make()).lower()}" in self.held_out:
            pass
        self.keys.add(f"{kind}:{str(value).lower()}")
        return value

    def word(self, capital: bool = False) -> str:
        """Return an invented word: the model has to copy it, it cannot know it."""
        r = self.random

        def make() -> str:
            syllables = r.randint(2, 3) if self.unseen_only else r.choice((1, 2, 2, 3, 3))
            return "".join(
                r.choice("bdfgklmnprstvz") + r.choice("aeiou") for _ in range(syllables)
            ) + r.choice(["", "n", "r", "x", "s"])

        word: str = self.draw("word", make)
        return word.capitalize() if capital else word

    def pick(self, known: list[str], capital: bool = False, share: float = 0.25) -> str:
        """Return a known word, or mostly an invented one."""
        if not self.unseen_only and self.random.random() < share:
            return self.random.choice(known)
        return self.word(capital)

    def number_pair(self, kind: str, low: int, high: int) -> tuple[int, int]:
        """Return two numbers whose unordered pair is not held out."""
        while True:
            x, y = self.random.randint(low, high), self.random.randint(low, high)
            key = f"{kind}:{min(x, y)},{max(x, y)}"
            if key not in self.held_out:
                self.keys.add(key)
                return x, y

    # Questions of one turn, each with what must be in the answer.

    def echo(self) -> tuple[list[Message], str]:
        """Repeat one to seven words."""
        r = self.random
        words = r.randint(1, 4) if self.unseen_only else r.choice((1, 2, 3, 4, 5, 7))
        text = " ".join(self.pick(WORDS) for _ in range(words))
        ask = r.choice(["Say {}.", "Repeat: {}.", "Echo {}.", "Repeat after me: {}.", "Repeat {}."]).format(
            text
        )
        return [user(ask), assistant(text + ".", "I repeat it.")], text + "."

    def add(self) -> tuple[list[Message], str]:
        """Add two numbers below 100."""
        r = self.random
        x, y = self.number_pair("sum", 0, 99 if self.unseen_only else r.choice([9, 30, 99, 99, 99]))
        ask = r.choice(["What is {} + {}?", "{} + {} =", "Add {} and {}.", "{} + {}", "What is {} plus {}?"])
        return [
            user(ask.format(x, y)),
            assistant(f"{x} + {y} = {x + y}.", f"I add {x} and {y}."),
        ], f"= {x + y}."

    def spell(self) -> tuple[list[Message], str]:
        """Spell a word letter by letter."""
        r = self.random
        letters = lambda: "".join(r.choices("abcdefghijklmnopqrstuvwxyz", k=r.randint(3, 7)))  # noqa: E731
        word = self.pick(WORDS) if self.unseen_only or r.random() < 0.75 else self.draw("word", letters)
        ask = r.choice(["Spell {}.", "Spell the word {}.", "How do you spell {}?"]).format(word)
        return [user(ask), assistant("-".join(word) + ".", f"The word is {word}.")], "-".join(word) + "."

    def count(self) -> tuple[list[Message], str]:
        """Count up over 3 to 13 numbers."""
        r = self.random

        def make() -> tuple[int, int]:
            start = r.choice([1, 1, r.randint(0, 85)]) if not self.unseen_only else r.randint(2, 80)
            return start, start + r.randint(2, 12)

        start, end = self.draw("count", make)
        text = ", ".join(map(str, range(start, end + 1))) + "."
        ask = r.choice(["Count from {} to {}.", "Count from {} up to {}."]).format(start, end)
        return [user(ask), assistant(text, "One by one.")], text

    def capital(self) -> tuple[list[Message], str]:
        """Name the capital of a country: twenty-two memorised facts."""
        land = self.random.choice([*CAPITALS])
        answer = f"The capital of {land} is {CAPITALS[land]}."
        return [user(f"What is the capital of {land}?"), assistant(answer, "A fact.")], CAPITALS[land]

    def chat(self) -> tuple[list[Message], str]:
        """Small talk, or a question that is beyond the model."""
        r = self.random
        if r.random() < 0.6:
            asks, answer, thought = r.choice(SMALL_TALK)
            return [user(r.choice(asks)), assistant(answer, thought)], answer
        ask = r.choice(BEYOND).format(self.pick(WORDS + [n.capitalize() for n in NAMES], share=0.7))
        return [user(ask), assistant(REFUSAL, "I cannot do that.")], REFUSAL

    def one_turn(self) -> list[Message]:
        """Return a question of any single-turn kind with its answer."""
        task = self.random.choice(
            [self.echo, self.add, self.spell, self.count, self.capital, self.capital, self.chat]
        )
        return task()[0]

    def memory(self) -> tuple[list[Message], str]:
        """Tell facts, talk of other things, then ask for one of the facts."""
        r = self.random
        name = self.pick(NAMES, True)
        town = self.pick(CITIES, True)
        pet = self.draw("pet", lambda: f"{r.choice(COLOURS)} {r.choice(ANIMALS)}")
        code = self.draw("code", lambda: r.randint(100, 9999))
        colour, animal = pet.split()
        facts = {
            "name": (
                f"My name is {name}",
                f"Hello {name}!",
                ["What is my name?", "Who am I?"],
                f"Your name is {name}.",
            ),
            "pet": (
                f"I have a {pet}",
                f"A {pet}, how nice!",
                ["Which animal do I have?", "What pet do I have?"],
                f"You have a {pet}.",
            ),
            "colour": (
                f"I have a {pet}",
                f"A {pet}, how nice!",
                [f"Which colour is my {animal}?"],
                f"Your {animal} is {colour}.",
            ),
            "town": (
                f"I live in {town}",
                f"{town} is a fine place.",
                ["Where do I live?"],
                f"You live in {town}.",
            ),
            "code": (
                f"My code is {code}",
                "I will remember it.",
                ["What is my code?"],
                f"Your code is {code}.",
            ),
        }
        told = r.sample([*facts], r.randint(1, 3))
        if "pet" in told and "colour" in told:
            told.remove("pet")
        turns: list[Message] = []
        if len(told) == 2 and r.random() < 0.5:
            first, second = (facts[key] for key in told)
            clause = second[0] if second[0].startswith("I ") else second[0][0].lower() + second[0][1:]
            turns += [user(f"{first[0]} and {clause}."), assistant(first[1], "They tell me facts.")]
        else:
            for key in told:
                turns += [user(facts[key][0] + "."), assistant(facts[key][1], "They tell me a fact.")]
        for _ in range(r.choice([0, 0, 1, 1, 2, 3])):
            turns += self.one_turn()
        if not self.unseen_only and r.random() < 0.08:
            key = r.choice([k for k in ("name", "town", "code") if k not in told] or ["name"])
            if key not in told:
                what = {"name": "your name", "town": "where you live", "code": "your code"}[key]
                answer = f"You have not told me {what}."
                return [
                    *turns,
                    user(r.choice(facts[key][2])),
                    assistant(answer, "They did not tell me."),
                ], answer
        for key in r.sample(told, 1 if self.unseen_only else r.randint(1, len(told))):
            answer = facts[key][3]
            turns += [user(r.choice(facts[key][2])), assistant(answer, "They told me before.")]
        return turns, answer

    def arguments(self, tool: Tool) -> dict[str, Any]:
        """Draw arguments for a tool."""
        r = self.random
        if tool.name in ("add", "multiply"):
            return dict(zip("ab", self.number_pair(tool.name, 10, 999), strict=True))
        drawn: dict[str, Any] = {}
        for key in tool.parameters:
            if key == "minutes":
                drawn[key] = self.draw("minutes", lambda: r.randint(2, 120))
            elif key == "city":
                drawn[key] = self.pick(CITIES, True)
            elif key in ("name", "to"):
                drawn[key] = self.pick(NAMES, True)
            else:
                drawn[key] = " ".join(
                    self.pick(WORDS) for _ in range(r.randint(1, 2 if key != "item" else 1))
                )
        return drawn

    def tool_turns(self, tool: Tool) -> tuple[list[Message], dict[str, Any], dict[str, Any], str]:
        """Return question, call, result and answer, with the arguments, the result and the answer's text."""
        r = self.random
        arguments = self.arguments(tool)
        result = tool.result(r, arguments)
        answer = tool.answer.format(**arguments, **result)
        call = {"type": "function", "function": {"name": tool.name, "arguments": arguments}}
        turns = [
            user(r.choice(tool.asks).format(**arguments)),
            assistant("", f"I call {tool.name}.", tool_calls=[call]),
            {"role": "tool", "content": json.dumps(result)},
            assistant(answer, "I have the result."),
        ]
        return turns, arguments, result, answer

    def offered(self, tool: Tool) -> list[dict[str, Any]]:
        """Return the schemas of one to three tools, `tool` among them, in random order."""
        others = self.random.sample([t for t in TOOLS if t is not tool], self.random.choice([0, 1, 1, 2]))
        chosen = [tool, *others]
        self.random.shuffle(chosen)
        return [t.schema() for t in chosen]

    def conversation(self, mix: dict[str, float]) -> Conversation:
        """Return one training conversation of a kind drawn from `mix` (kind to weight)."""
        r = self.random
        self.keys = set()
        kind = r.choices([*mix], [*mix.values()])[0]
        tools = None
        if kind == "tools":
            tool = r.choice(TOOLS)
            tools = self.offered(tool)
            turns = self.tool_turns(tool)[0]
            listed = [t for t in TOOLS if t.name in [s["function"]["name"] for s in tools]]
            for _ in range(r.choice([0, 0, 1, 1, 2])):
                turns = [*self.tool_turns(r.choice(listed))[0], *turns]
            dice = r.random()
            if dice < 0.1:
                turns = [*self.one_turn(), *turns]
            elif dice < 0.25:
                turns = [*turns, *self.one_turn()]
            elif dice < 0.4:
                turns = turns[:-2]
        elif kind == "memory":
            turns = self.memory()[0]
        else:
            turns = getattr(self, kind)()[0]
            while len(turns) < 14 and r.random() < (0.8 if kind == "add" else 0.35):
                turns = [*(self.add()[0] if kind == "add" else self.one_turn()), *turns]
        if r.random() < 0.1:
            turns = [{"role": "system", "content": r.choice(SYSTEM)}, *turns]
        return Conversation(kind, turns, tools, r.random() < 0.5, set(self.keys))

    def question(self, kind: str, number: int) -> Conversation:
        """Return question `number` of the suite: the messages up to it, and what the answer must hold."""
        self.keys = set()
        thinking = number % 2 == 1
        if kind in ("tool_call", "tool_result"):
            pool = [t for t in TOOLS if t.informative or kind == "tool_call"]
            tool = pool[number % len(pool)]
            tools = self.offered(tool)
            turns, arguments, _, answer = self.tool_turns(tool)
            if kind == "tool_call":
                expect: dict[str, Any] = {"tool_calls": [{"name": tool.name, "arguments": arguments}]}
                return Conversation(kind, turns[:1], tools, thinking, set(self.keys), expect)
            return Conversation(kind, turns[:3], tools, thinking, set(self.keys), {"contains": answer})
        turns, needed = getattr(self, kind)()
        return Conversation(kind, turns[:-1], None, thinking, set(self.keys), {"contains": needed})


MIX = {
    "echo": 0.07,
    "add": 0.26,
    "spell": 0.16,
    "count": 0.14,
    "capital": 0.02,
    "chat": 0.05,
    "memory": 0.15,
    "tools": 0.15,
}
WARM_UP = {"echo": 0.45, "add": 0.2, "spell": 0.2, "memory": 0.15}
SUITE_KINDS = ("add", "echo", "spell", "count", "memory", "tool_call", "tool_result")
