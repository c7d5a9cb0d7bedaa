"""Rendering: a stream's blocks -> request bodies, byte for byte the same in every process.

A prompt is kept as *pieces*, one for each stretch of tokens that a turn added. A piece's bytes are made once, from
pre-encoded tokens; a later turn adds pieces, and cuts them back where the recording rewound. A body is then a list of
ready bytes, whatever its length, which the wire sends without joining them.

Two renderings share this: token ids (``completions``: exact) and messages (``chat``, ``anthropic``), where each
message's region of the recorded prompt gives up as many tokens as the server's chat template adds for it, so that the
whole prompt still has the recorded length.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from workloads.content import CONTENT_VERSION, Vocabulary, block_tokens, salt_tokens

Api = Literal["completions", "chat", "anthropic"]
Role = Literal["system", "user", "assistant"]
LengthControl = Literal["ignore_eos", "min_tokens", "none"]

PATHS: dict[Api, str] = {
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
    "anthropic": "/v1/messages",
}

SALT_TOKENS = 8
"""Length of the salt; it takes the place of the first content tokens of each stream, so lengths stay as recorded."""

_TOKENS_PER_SLICE = 8_192
"""Tokens rendered between two chances for the event loop: about half a millisecond of work."""

Table = npt.NDArray[np.bytes_]
"""The vocabulary's tokens as they stand in a body, padded with zero bytes to one width; shape (tokens,)."""


class Template(msgspec.Struct, frozen=True):
    """Tokens that a server's chat template adds, measured with probes (replay/probes/template.py).

    ``first``: to a prompt of one user message, generation prompt included. ``with_system``: to one of a system and a
    user message (it may be less: some templates put in a system message of their own where there is none).
    ``pair``: to each assistant and user message more.
    """

    first: int = 0
    with_system: int = 0
    pair: int = 0


class Rendering(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that turns blocks into bytes."""

    api: Api
    model: str
    vocabulary: Vocabulary
    template: Template = Template()
    length_control: LengthControl = "ignore_eos"
    sampling: dict[str, Any] = {}
    """Request fields sent with every turn as they are, beside those that the rendering itself decides."""
    server_usage: bool = True
    """Ask for token counts on every chunk (stream_options.continuous_usage_stats)."""

    def digest(self) -> str:
        """SHA-256, hex. The model's name is left out: two servers may call one model by different names."""
        facts = [CONTENT_VERSION, SALT_TOKENS, self.api, self.vocabulary.digest(), self.template, self.length_control]
        return hashlib.sha256(msgspec.json.encode([*facts, self.sampling, self.server_usage])).hexdigest()


def token_table(rendering: Rendering) -> Table:
    """Each vocabulary token as it stands in a body: ``,123`` or `` word`` (or ``x``, of a vocabulary of letters)."""
    vocabulary = rendering.vocabulary
    if rendering.api == "completions":
        return np.array([b",%d" % token for token in vocabulary.ids])
    return np.array([word.encode() for word in vocabulary.words])


def _encoded(table: Table, indices: npt.NDArray[np.uint32] | list[int]) -> bytes:
    """Tokens one after another, the padding taken out."""
    return table[indices].tobytes().translate(None, b"\0")


class Piece(msgspec.Struct):
    """Tokens [start, end) of the prompt, rendered. ``content_start`` leaves room for the template's tokens."""

    role: Role
    start: int
    content_start: int
    end: int
    content: bytes = b""
    digest: bytes = b""
    """SHA-256 of role and content without the salt."""


class Prompt:
    """The prompt of one stream as it grows and rewinds, turn by turn.

    Call :meth:`advance` for every turn of the stream in order, also for those that will not be sent; then, for a turn
    that will be sent, exhaust :meth:`render` (it yields so that a caller on an event loop can let others run) and
    take :meth:`body`.
    """

    def __init__(
        self,
        rendering: Rendering,
        table: Table,
        content_key: str,
        block_size: int,
        salt: list[int],
        system_tokens: int = 0,
    ) -> None:
        self._rendering = rendering
        self._table = table
        self._content_key = content_key
        self._block_size = block_size
        self._salt = salt
        self._system_tokens = system_tokens if rendering.api != "completions" else 0
        self._separator = 0 if rendering.api != "completions" and rendering.vocabulary.characters else 1
        self._blocks: list[int] = []
        self._input = 0
        self._output = 0
        self._pieces: list[Piece] = []
        self._valid = 0
        """Tokens at the front of the pieces that still belong to the current prompt."""
        self._rewound = True

    def advance(self, keep: int, new_blocks: list[int], input_tokens: int, output_tokens: int) -> None:
        """Take the next turn of the stream: its blocks as a difference, its length, the length of its reply."""
        shared = min(keep * self._block_size, self._input, input_tokens)
        self._rewound = self._rewound or shared < self._input
        self._valid = min(self._valid, shared)
        self._reply = self._output
        self._blocks = self._blocks[:keep] + new_blocks
        self._input = input_tokens
        self._output = output_tokens

    def render(self) -> Iterator[None]:
        """Make the bytes that are missing; yields about every half millisecond of work."""
        self._lay_out()
        for piece in self._pieces:
            if not piece.digest:
                yield from self._fill(piece)
        self._valid = self._input
        self._rewound = False

    def body(self, output_tokens: int) -> tuple[list[bytes], str]:
        """The request body for the rendered turn, in parts, and its prompt digest (16 hex digits, salt left out)."""
        head = msgspec.json.encode(_fields(self._rendering, output_tokens))[:-1]
        digest = hashlib.sha256(b"".join(piece.digest for piece in self._pieces)).hexdigest()[:16]
        if self._rendering.api == "completions":
            return [head, b',"prompt":[', *[piece.content for piece in self._pieces], b"]}"], digest
        messages = self._pieces
        parts = [head]
        if self._rendering.api == "anthropic" and messages and messages[0].role == "system":
            parts += [b',"system":"', messages[0].content, b'"']
            messages = messages[1:]
        parts.append(b',"messages":[')
        for number, piece in enumerate(messages):
            parts += [b'{"role":"' if number == 0 else b',{"role":"', piece.role.encode(), b'","content":"']
            parts += [piece.content, b'"}']
        parts.append(b"]}")
        return parts, digest

    # -- which stretch of tokens is whose

    def _lay_out(self) -> None:
        """Cut the pieces back to what is still valid and add the turn's new stretch."""
        self._cut(self._valid)
        if self._rendering.api == "completions":
            self._add("user", 0, self._end(), self._input)
            return
        template = self._rendering.template
        half, system = template.pair // 2, template.with_system // 2
        if not self._pieces and self._system_tokens:
            # leave room for at least one token of a user message after it
            end = min(self._system_tokens, self._input - (template.with_system - system) - 1)
            if end > system:
                self._add("system", system, 0, end)
        has_user = any(piece.role == "user" for piece in self._pieces)
        if has_user:
            user_room = template.pair - half + 1
        else:
            user_room = (template.with_system - system if self._pieces else template.first) + 1
        if not self._rewound and has_user and self._pieces[-1].role == "user":
            # the reply to the previous turn stands between it and what is new
            end = min(self._end() + self._reply, self._input - user_room)
            if end - self._end() > half:
                self._add("assistant", half, self._end(), end)
        if self._pieces and self._pieces[-1].role == "user":
            self._extend_last()
            return
        while self._pieces and self._input - self._end() < user_room and self._pieces[-1].role != "user":
            # a prompt must end with the user: take the room from the message before
            self._cut(max(self._pieces[-1].start, self._input - user_room))
        if self._pieces and self._pieces[-1].role == "user":
            self._extend_last()
        else:
            self._add("user", user_room - 1, self._end(), self._input)

    def _end(self) -> int:
        return self._pieces[-1].end if self._pieces else 0

    def _add(self, role: Role, room: int, start: int, end: int) -> None:
        if self._rendering.api != "completions" and role == "user":
            end = max(end, start + room + 1)  # a message is never empty, however short the recording
        if end > start:
            self._pieces.append(Piece(role, start, start + room, end))

    def _extend_last(self) -> None:
        last = self._pieces[-1]
        if last.end < self._input:
            last.end = self._input
            last.digest = b""

    def _cut(self, end: int) -> None:
        """Keep tokens before ``end`` only; a message that would be left without content goes as a whole."""
        while self._pieces and self._pieces[-1].end > end:
            last = self._pieces[-1]
            if last.content_start >= end:
                self._pieces.pop()
                continue
            last.end = end
            last.digest = b""

    # -- bytes

    def _fill(self, piece: Piece) -> Iterator[None]:
        """Make the piece's bytes and digest."""
        # the salt takes the place of the first tokens that are ours to choose, before any block can be shared
        salt = self._salt[: piece.end - piece.content_start] if piece.start == 0 else []
        parts = [_encoded(self._table, salt)] if salt else []
        digest = hashlib.sha256(piece.role.encode() + b":")
        start = piece.content_start + len(salt)
        size = self._block_size
        step = max(1, _TOKENS_PER_SLICE // size)
        for low in range(start // size, -(-piece.end // size), step):
            blocks = self._blocks[low : min(low + step, -(-piece.end // size))]
            tokens = block_tokens(self._content_key, blocks, size, len(self._table)).ravel()
            parts.append(_encoded(self._table, tokens[max(start - low * size, 0) : piece.end - low * size]))
            digest.update(parts[-1])
            yield
        content = b"".join(parts)
        # a message, and a list of token ids as a whole, begins without a separator
        bare = piece.start == 0 or self._rendering.api != "completions"
        piece.content = content[self._separator :] if bare else content
        piece.digest = digest.digest()


def _fields(rendering: Rendering, output_tokens: int) -> dict[str, Any]:
    """The request's fields without its prompt."""
    fields: dict[str, Any] = {"model": rendering.model, "stream": True, "max_tokens": output_tokens}
    if rendering.api == "chat":
        fields["max_completion_tokens"] = fields.pop("max_tokens")
    if rendering.api != "anthropic":
        fields["stream_options"] = {"include_usage": True}
        if rendering.server_usage:
            fields["stream_options"]["continuous_usage_stats"] = True
    if rendering.length_control == "ignore_eos":
        fields["ignore_eos"] = True
    elif rendering.length_control == "min_tokens":
        fields["min_tokens"] = output_tokens
    fields.update(rendering.sampling)
    return fields


def prompt_for(
    rendering: Rendering,
    table: Table,
    *,
    content_key: str,
    block_size: int,
    seed: int,
    block_salt: str,
    session: str,
    play: int,
    system_tokens: int = 0,
) -> Prompt:
    """A fresh prompt for one stream of one play of a session, salted for (seed, block, session, play)."""
    salt = salt_tokens(seed, block_salt, session, play, SALT_TOKENS, len(table))
    return Prompt(rendering, table, content_key, block_size, salt, system_tokens)
