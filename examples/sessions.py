"""A conversation that goes back and branches; only what is new is computed.

python examples/sessions.py [MODEL]
"""

from __future__ import annotations

import sys

import lily

with (
    lily.Engine.load(sys.argv[1] if len(sys.argv) > 1 else "demo") as engine,
    engine.new_session(thinking=False, template_variables={"preserve_thinking": True}) as session,
):
    # Templates of the family drop the thoughts of earlier turns, which changes the text that was computed;
    # `preserve_thinking` keeps them, so that each turn only adds to it.
    print(session.generate("My name is Ada.", temperature=0).text)

    # A branch shares the past of its origin; what is said in one isn't known in the other.
    branch = session.fork()
    print("branch:", branch.generate("I have a blue owl.", temperature=0).text)
    print("branch:", branch.generate("What pet do I have?", temperature=0).text)

    answer = session.generate("What is my name?", temperature=0)
    print("origin:", answer.text)
    print(f"{answer.usage.cached_tokens} of {answer.usage.prompt_tokens} prompt tokens were already computed")

    # Back to the state before the last question, to ask another one.
    session.rewind(messages=2)
    print("rewound to:", [message["content"] for message in session.messages])
    print("origin:", session.generate("What is 3 + 4?", temperature=0).text)
