"""lily within an asyncio program: the loop stays free while the model computes.

python examples/async_program.py [MODEL]
"""

from __future__ import annotations

import asyncio
import sys

import lily


async def ticker(ticks: list[int]) -> None:
    """Count how often the loop gets a turn meanwhile."""
    while True:
        ticks.append(1)
        await asyncio.sleep(0.001)


async def main() -> None:
    engine = await asyncio.to_thread(lily.Engine.load, sys.argv[1] if len(sys.argv) > 1 else "demo")
    ticks: list[int] = []
    clock = asyncio.create_task(ticker(ticks))

    # Several requests at once take turns, token by token; each result is what it would be alone.
    questions = ["What is 3 + 4?", "Count from 1 to 5.", "Spell lily."]
    results = await asyncio.gather(
        *(engine.agenerate(question, temperature=0, thinking=False) for question in questions)
    )
    for question, result in zip(questions, results, strict=True):
        print(question, "->", result.text)

    async with engine.astream("Count from 2 to 6.", temperature=0, thinking=False) as stream:
        async for chunk in stream:
            print(chunk, end="", flush=True)
    print()

    # Cancelling the task ends the generation.
    task = asyncio.create_task(engine.agenerate("Count from 1 to 13.", min_tokens=4000, max_tokens=4000))
    await asyncio.sleep(0.05)
    task.cancel()
    try:
        await task
    except asyncio.CancelledError:
        print("cancelled")

    clock.cancel()
    print("the loop was free meanwhile:", len(ticks) > 3)
    await asyncio.to_thread(engine.close)


asyncio.run(main())
