"""A stream, read in one thread and stopped from another, as a program with a stop button does.

python examples/stream_cancel.py [MODEL]
"""

from __future__ import annotations

import sys
import threading

import lily

with lily.Engine.load(sys.argv[1] if len(sys.argv) > 1 else "demo") as engine:
    enough = threading.Event()

    with engine.stream("Count from 1 to 13.", temperature=0, thinking=False) as stream:

        def stop_button() -> None:
            enough.wait()
            stream.cancel()

        button = threading.Thread(target=stop_button)
        button.start()
        for count, chunk in enumerate(stream):
            print(chunk, end="", flush=True)
            if count == 8:
                enough.set()
                button.join()

    print()
    print("ended:", stream.result.finish_reason)

    # The engine goes on as if nothing had happened, and doesn't compute the prompt again.
    again = engine.generate("Count from 1 to 13.", temperature=0, thinking=False)
    print("whole:", again.text)
    print("prompt tokens from the cache:", again.usage.cached_tokens)
