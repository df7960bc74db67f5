"""What a caller gives to generate from: text, messages or tokens, made into one kind of prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy

from lily_py.errors import InvalidArgumentError, TemplateError
from lily_py.sampling import boolean, integer
from lily_py.text import ChatTemplate, Tokenizer, ends_in_thinking

PromptLike = str | Sequence[Any]
TURN_START = "<|im_start|>"


@dataclass(frozen=True)
class Prompt:
    """Tokens to continue.

    Attributes:
        tokens: at least one.
        marks: lengths where a snapshot will be worth having: after the system turn, before the answer's turn.
        chat: rendered by the template, so that thought and calls are to be told from text.
        thinking: the answer begins inside a thought.
        tools: given to the template, in which calls are typed.
    """

    tokens: list[int]
    marks: tuple[int, ...] = ()
    chat: bool = False
    thinking: bool = False
    tools: Sequence[Mapping[str, Any]] | None = None


class PromptReader:
    """Makes prompts, with a checkpoint's tokenizer and template.

    Args:
        tokenizer: of the checkpoint.
        template: None if the checkpoint has none; then text is continued as it is.
        vocabulary: rows of the embedding; ids must be below.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None, vocabulary: int) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self.vocabulary = vocabulary
        self._turn_start = tokenizer.token_id(TURN_START)

    def read(
        self,
        prompt: PromptLike,
        *,
        raw: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        thinking: bool | None = None,
        template_variables: Mapping[str, Any] | None = None,
    ) -> Prompt:
        """Return the prompt of a text, a list of messages or a list of tokens.

        A text is one user message if the checkpoint has a template, unless `raw`; raw text is continued as
        it is, control tokens in it recognised.

        Raises:
            InvalidArgumentError: an empty prompt, something else than these, an id out of range, or `tools`,
                `thinking` or `template_variables` where no template is used.
            TemplateError: messages that can't be rendered.
        """
        raw = boolean("raw", raw)
        messages = self._messages(prompt, raw)
        if messages is not None:
            return self.render(
                messages, tools=tools, thinking=thinking, template_variables=template_variables
            )
        unused = {"tools": tools, "thinking": thinking, "template_variables": template_variables}
        for name, value in unused.items():
            if value is not None:
                raise InvalidArgumentError(
                    f"{name} needs the chat template, but the prompt is raw text or tokens, or the "
                    "checkpoint has no template"
                )
        if isinstance(prompt, str):
            tokens = self.tokenizer.encode(prompt, special_tokens=True)
            if not tokens:
                raise InvalidArgumentError("the prompt is empty; give at least one token to continue")
        else:
            tokens = self.tokens(prompt)
        return Prompt(tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        thinking: bool | None = None,
        template_variables: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> Prompt:
        """Return the prompt of a conversation, the answer's turn opened."""
        text = self.render_text(
            messages,
            tools=tools,
            thinking=thinking,
            template_variables=template_variables,
            add_generation_prompt=add_generation_prompt,
        )
        tokens = self.tokenizer.encode(text, special_tokens=True)
        if not tokens:
            raise InvalidArgumentError("the conversation renders to an empty prompt")
        return Prompt(tokens, self.marks(tokens), True, ends_in_thinking(text), tools)

    def render_begun(self, messages: Sequence[Mapping[str, Any]], **template: Any) -> list[int]:
        """Return the tokens of a conversation that isn't to be answered yet.

        Templates refuse one without a question. It is then rendered with one, and cut off before it.

        Args:
            messages: the conversation.
            **template: `tools`, `thinking`, `template_variables`, as for `render`.
        """
        try:
            return self.render(messages, add_generation_prompt=False, **template).tokens
        except TemplateError:
            question = {"role": "user", "content": "?"}
            tokens = self.render([*messages, question], add_generation_prompt=False, **template).tokens
            turns = [i for i, token in enumerate(tokens) if token == self._turn_start]
            if not turns or turns[-1] == 0:
                raise
            return tokens[: turns[-1]]

    def render_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        thinking: bool | None = None,
        template_variables: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """Return a conversation as the template writes it."""
        if self.template is None:
            raise TemplateError("the checkpoint has no chat template; give raw text or tokens instead")
        if thinking is not None:
            thinking = boolean("thinking", thinking)
        if template_variables is not None:
            _check_variables(template_variables)
        return self.template.render(
            messages,
            tools=tools,
            thinking=thinking,
            add_generation_prompt=add_generation_prompt,
            **(template_variables or {}),
        )

    def tokens(self, ids: Any) -> list[int]:
        """Return checked token ids as a list; at least one.

        Raises:
            InvalidArgumentError: names the position and the value that isn't a token id.
        """
        if isinstance(ids, numpy.ndarray):
            if ids.ndim != 1 or not numpy.issubdtype(ids.dtype, numpy.integer):
                raise InvalidArgumentError(
                    f"token ids must be a one-dimensional array of integers, got {ids.dtype} {ids.shape}"
                )
            ids = ids.tolist()
        if isinstance(ids, str | bytes | Mapping) or not isinstance(ids, Sequence):
            raise InvalidArgumentError(
                f"a prompt must be text, a list of messages or a list of token ids, got {type(ids).__name__}"
            )
        if not ids:
            raise InvalidArgumentError("the prompt is empty; give at least one token to continue")
        # Told apart at once: a long prompt's reuse takes less time than a look at each of its tokens.
        if set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < self.vocabulary:
            return list(ids)
        return [integer(f"prompt[{i}]", token, 0, self.vocabulary - 1) for i, token in enumerate(ids)]

    def marks(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Return the lengths worth a snapshot: before the first user turn and before the last turn."""
        if self._turn_start is None:
            return ()
        turns = [i for i, token in enumerate(tokens) if token == self._turn_start]
        return tuple(sorted({turns[1], turns[-1]})) if len(turns) > 1 else ()

    def _messages(self, prompt: Any, raw: bool) -> Sequence[Mapping[str, Any]] | None:
        """Return the conversation that a prompt means, or None if it is continued as it is."""
        if isinstance(prompt, str):
            if raw or self.template is None:
                return None
            if not prompt:
                raise InvalidArgumentError("the prompt is empty")
            return [{"role": "user", "content": prompt}]
        if isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping):
            if raw:
                raise InvalidArgumentError("raw=True is for text and tokens; messages need the chat template")
            return prompt
        return None


def _check_variables(variables: Any) -> None:
    if not isinstance(variables, Mapping) or not all(isinstance(name, str) for name in variables):
        raise InvalidArgumentError(
            f"template_variables must be a mapping of names to values, got {variables!r}"
        )
    for name in ("messages", "tools", "thinking", "add_generation_prompt"):
        if name in variables:
            raise InvalidArgumentError(
                f"template_variables can't hold {name!r}, which has a place of its own"
            )
