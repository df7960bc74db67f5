"""The checkpoint's own chat template, rendered in a sandbox with what templates of the field rely on."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import jinja2
import jinja2.exceptions
import jinja2.sandbox

from lily_py.checkpoint.chat_template import read_chat_template
from lily_py.checkpoint.special_tokens import read_special_tokens
from lily_py.errors import TemplateError
from lily_py.text.messages import normalise_messages, normalise_tools

if TYPE_CHECKING:
    from lily_py.checkpoint import Checkpoint


class ChatTemplate:
    """Renders conversations to prompts.

    The environment is that of `transformers.apply_chat_template`: immutable sandbox, ``trim_blocks``,
    ``lstrip_blocks``, ``break`` and ``continue``, ``raise_exception``, ``strftime_now``, and a ``tojson``
    that keeps the order of keys and escapes neither for HTML nor to ASCII.

    Args:
        source: Jinja source.
        variables: values that every rendering sees, such as ``eos_token``.

    Raises:
        TemplateError: a syntax error.
    """

    def __init__(self, source: str, variables: Mapping[str, Any] | None = None) -> None:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self.source = source
        self._variables = dict(variables or {})
        try:
            self._template = environment.from_string(source)
        except jinja2.exceptions.TemplateSyntaxError as error:
            raise TemplateError(f"chat template, line {error.lineno}: {error.message}") from error
        except (RecursionError, ValueError) as error:
            raise TemplateError(f"chat template can't be compiled: {error}") from error

    @classmethod
    def from_folder(cls, folder: Path) -> ChatTemplate:
        """Load a folder's template.

        Raises:
            TemplateError: there is none; a base model, perhaps.
        """
        return cls._from_source(read_chat_template(folder), folder)

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> ChatTemplate:
        """Take a checkpoint's template; errors as in `from_folder`."""
        return cls._from_source(checkpoint.chat_template, checkpoint.folder)

    @classmethod
    def _from_source(cls, source: str | None, folder: Path) -> ChatTemplate:
        if source is None:
            raise TemplateError(
                f"{folder}: no chat template (is it a base model?); give a plain prompt instead"
            )
        return cls(source, read_special_tokens(folder))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        thinking: bool | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """Return the prompt of a conversation; encode it with ``special_tokens=True``.

        Args:
            messages: as in OpenAI's API; see `normalise_messages` for what is accepted.
            tools: function descriptions.
            thinking: ask for a thought or for none (``enable_thinking``); None leaves it to the template.
            add_generation_prompt: end with the opening of the assistant's turn.
            variables: anything else that the template knows, such as ``preserve_thinking``.

        Raises:
            TemplateError: a message that can't be used, or what the template itself objects to.
        """
        if thinking is not None:
            variables["enable_thinking"] = thinking
        context = {
            **self._variables,
            **variables,
            "messages": normalise_messages(messages),
            "tools": normalise_tools(tools),
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._template.render(context)
        except jinja2.exceptions.TemplateError as error:
            raise TemplateError(error.message or str(error)) from error
        except Exception as error:  # a template can fail in as many ways as a program
            raise TemplateError(f"chat template failed: {type(error).__name__}: {error}") from error


def ends_in_thinking(prompt: str) -> bool:
    """Tell whether a prompt leaves the model inside ``<think>``, so that its answer begins with a thought."""
    turn = prompt.rpartition("<|im_start|>")[2]
    return turn.rfind("<think>") > turn.rfind("</think>")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.exceptions.TemplateError(str(message))


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)
