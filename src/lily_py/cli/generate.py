"""``lily generate``: one prompt, one answer."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from typing import Any

from lily_py.cli.models import load_engine
from lily_py.cli.terminal import AnswerPrinter, Statistics, notice, read_text
from lily_py.cli.usage import UsageError, sampling_keywords
from lily_py.prompts import PromptLike
from lily_py.results import Result
from lily_py.stream import Stream


def run(options: argparse.Namespace) -> int:
    """Answer and return the exit status."""
    if options.raw and options.system is not None:
        raise UsageError("--raw continues the text as it is: --system has no place in it")
    text = read_text(options.text)
    if text is None:
        raise UsageError("no PROMPT: give one in quotes, or pipe it in")
    prompt: PromptLike = text
    if options.system is not None:
        prompt = [{"role": "system", "content": options.system}, {"role": "user", "content": text}]
    with load_engine(options) as engine:
        keywords = sampling_keywords(options)
        if options.raw:
            keywords["raw"] = True
        with engine.stream(prompt, **keywords) as stream:
            if options.json:
                stream.finish()
                print(json.dumps(result_object(options.model, stream.result), ensure_ascii=False))
                return 0
            status = _print(stream, options.show_reasoning)
        if not options.quiet:
            statistics = Statistics()
            statistics.add(stream.result)
            statistics.show()
        return status


def result_object(model: str, result: Result) -> dict[str, Any]:
    """Return a result as the object that ``--json`` prints."""
    return {
        "model": model,
        "text": result.text,
        "reasoning": result.reasoning,
        "tool_calls": [{"name": call.name, "arguments": call.arguments} for call in result.tool_calls],
        "finish_reason": result.finish_reason,
        "stop": result.stop,
        "seed": result.seed,
        "token_ids": list(result.token_ids),
        "usage": dataclasses.asdict(result.usage),
        "timings": dataclasses.asdict(result.timings),
    }


def _print(stream: Stream, reasoning: bool | None) -> int:
    """Write the answer to stdout as it comes; return the exit status."""
    printer = AnswerPrinter(sys.stdout, reasoning)
    status = 0
    try:
        for chunk in stream:
            printer.feed(chunk)
    except KeyboardInterrupt:
        stream.close()
        status = 130
    finally:
        printer.end()
    if stream.result.finish_reason == "length":
        count = stream.result.usage.completion_tokens
        notice(f"cut off after {count} tokens: as many as --max-tokens and the context allow")
    return status
