"""What a parser of tool calls writes into: content and pieces of calls, in the order of the text.

A parser (`server/tools/reader.py`) reads character by character. What it has read and not yet used is *raw*: it is
content as soon as it proves to be no call. API process. Pure, but for the random ids of calls.
"""

import json
import secrets
from collections.abc import Mapping
from dataclasses import replace

from server.tools.calls import AnswerPart, CallPart

Tools = Mapping[str, Mapping[str, object]]
"""Name of each function -> JSON schema of its parameters."""


class Malformed(Exception):
    """The text is no call, or stops being one."""


class CallWriter:
    """The calls and the content of one output."""

    def __init__(self, tools: Tools) -> None:
        self.tools = tools
        self.calls = 0
        """Begun so far."""
        self.is_open = False
        """A call has begun and not ended."""
        self.is_broken = False
        """A call that had begun went on as no call can: it stays incomplete."""
        self.is_blank = True
        """Neither a call nor any text that is none has come."""
        self.is_markup = False
        """What is raw belongs to a call that has ended: at the end of the output it is nothing."""
        self._raw = ""
        self._parts: list[AnswerPart] = []
        self._arguments = ""
        self._any_content = False

    def read(self, char: str) -> None:
        """The next character of the output."""
        self._raw += char

    def release(self, keep: int = 0) -> None:
        """What is raw is content, but for the last `keep` characters. White space after a call is none where nothing
        else precedes it."""
        end = len(self._raw) - keep
        text, self._raw = self._raw[:end], self._raw[end:]
        if self.calls and not self._any_content:
            text = text.lstrip()
        if text:
            self._flush()
            begun = self._parts.pop() if self._parts and isinstance(self._parts[-1], str) else ""
            self._parts.append(f"{begun}{text}")
            self._any_content = True
        self.is_blank = False

    def clear(self) -> None:
        """What is raw is markup."""
        self._raw, self.is_markup = "", False

    def reject(self) -> None:
        """What is raw is content, but for the last character, which is read again. A call that is open is broken."""
        last = self._raw[-1:]
        self.is_broken, self.is_open, self.is_markup = self.is_broken or self.is_open, False, False
        self.release(keep=len(last))
        self._raw = ""

    def begin(self, name: str) -> None:
        """A call begins; what is raw is markup. Raises Malformed for a function that the request does not have."""
        if name not in self.tools:
            raise Malformed
        self.clear()
        self._flush()
        self._parts.append(CallPart(index=self.calls, id=f"call_{secrets.token_hex(12)}", name=name))
        self.calls += 1
        self.is_open, self.is_blank = True, False

    def arguments(self, text: str) -> None:
        """More of the open call's arguments, which are made of what is raw."""
        self._raw = ""
        self._arguments += text

    def end(self) -> None:
        """The open call is complete."""
        self.clear()
        self._flush(is_complete=True)
        self.is_open = False

    def finish(self) -> None:
        """The output has ended: what is raw is content, unless it belongs to a call."""
        if not (self.is_open or self.is_markup):
            text = self._raw.rstrip() if self.calls else self._raw
            self._raw = text
            self.release()
        self._raw = ""

    def take(self) -> list[AnswerPart]:
        """The content and the pieces of calls since the last time."""
        self._flush()
        taken, self._parts = self._parts, []
        return taken

    def _flush(self, *, is_complete: bool = False) -> None:
        """Make parts of the arguments so far, and of the end of the call."""
        if not (self._arguments or is_complete):
            return
        part = CallPart(index=self.calls - 1, arguments=self._arguments, is_complete=is_complete)
        self._arguments = ""
        if self._parts and isinstance(begun := self._parts[-1], CallPart) and begun.index == part.index:
            self._parts.pop()
            part = replace(part, id=begun.id, name=begun.name, arguments=begun.arguments + part.arguments)
        self._parts.append(part)


class CallDraft:
    """One call as its parts come: it begins with the first piece of its arguments, once the name is known."""

    def __init__(self, writer: CallWriter) -> None:
        self._writer = writer
        self._name: str | None = None
        self._held = ""
        self._has_begun = False

    def named(self, name: str) -> None:
        """The name of the function. Raises Malformed where it has one already, or no function is called so."""
        if self._name is not None or name not in self._writer.tools:
            raise Malformed
        self._name = name
        if self._held:
            self.put(self._held)

    def put(self, text: str) -> None:
        """A piece of the arguments, JSON."""
        if self._name is None:
            self._held += text
            return
        if not self._has_begun:
            self._has_begun = True
            self._writer.begin(self._name)
        self._writer.arguments(text)

    def put_string(self, text: str) -> None:
        """A piece of the inside of a JSON string."""
        self.put(json.dumps(text, ensure_ascii=False)[1:-1])

    def close(self) -> None:
        """The call is complete, without arguments if none came. Raises Malformed for one without a name."""
        if self._name is None:
            raise Malformed
        if not self._has_begun:
            self.put("{}")
        self._writer.end()
