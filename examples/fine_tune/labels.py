"""Labels: a row as token ids, and which of them the model learns to write.

    alpaca        instruction, input, output    learnt: the output and the end mark
    completion    text                          learnt: all of it
    chat          messages: role, content       learnt: what the assistant says

A label says what stands at its own position, as Hugging Face models expect it. The first token of a
sample is never a label, because nothing stands before it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from .rows import DataError, Row

IGNORED_LABEL = -100

WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further "
    "context. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)
WITHOUT_INPUT = (
    "Below is an instruction that describes a task. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n"
)

Answers = Literal["all", "last"]
Form = Literal["alpaca", "alpaca_chat", "completion", "chat"]
FORMS: tuple[Form, ...] = get_args(Form)


@dataclass(frozen=True)
class Sample:
    """A row as token ids; the label of a token that is not learnt is `IGNORED_LABEL`."""

    token_ids: list[int]
    labels: list[int]

    @property
    def num_learnt(self) -> int:
        """How many tokens are labels."""
        return sum(label != IGNORED_LABEL for label in self.labels)

    def cut(self, max_tokens: int) -> Sample:
        """The beginning of the sample."""
        return Sample(self.token_ids[:max_tokens], self.labels[:max_tokens])

    @property
    def prompt(self) -> list[int]:
        """The tokens before the first label; of a sample that is all labels, its first quarter."""
        first = next(i for i, label in enumerate(self.labels) if label != IGNORED_LABEL)
        return self.token_ids[: first if first > 1 else max(1, len(self.token_ids) // 4)]


def sample_of(token_ids: Sequence[int], is_learnt: Iterable[bool]) -> Sample:
    """A sample whose first token is no label."""
    pairs = zip(token_ids, is_learnt, strict=True)
    labels = [token if learnt else IGNORED_LABEL for token, learnt in pairs]
    return Sample([*token_ids], [IGNORED_LABEL, *labels[1:]])


class Encoder(Protocol):
    """One form of rows."""

    def encode(self, row: Row, where: str) -> Sample:
        """Return the row as a sample.

        Raises:
            DataError: If the row is not of this form; ``where`` says where the row stands.
        """

    def encode_prompt(self, text: str) -> list[int]:
        """Return the token ids after which the answer to a text is expected."""


class Completion:
    """Text that is learnt as it stands, with the end mark."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, fields: Mapping[str, str]) -> None:
        self._tokenizer = tokenizer
        self._fields = fields
        self._end = end_of(tokenizer)

    def encode(self, row: Row, where: str) -> Sample:
        text = text_field(row, self._fields.get("text", "text"), where)
        token_ids = [*self.encode_prompt(text), self._end]
        return sample_of(token_ids, [True] * len(token_ids))

    def encode_prompt(self, text: str) -> list[int]:
        return without_end(self._tokenizer(text).input_ids, self._end)


class Alpaca:
    """An instruction, perhaps with an input, and the output that is learnt.

    Prompt and output are encoded apart, so that no token is half prompt and half output.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, fields: Mapping[str, str]) -> None:
        self._tokenizer = tokenizer
        self._fields = fields
        self._end = end_of(tokenizer)

    def encode(self, row: Row, where: str) -> Sample:
        instruction, about, output = alpaca_fields(row, self._fields, where)
        template = WITH_INPUT if about else WITHOUT_INPUT
        prompt = self._prompt_ids(template.format(instruction=instruction, input=about))
        answer = without_end(self._tokenizer(output, add_special_tokens=False).input_ids, self._end)
        is_learnt = [False] * len(prompt) + [True] * (len(answer) + 1)
        return sample_of([*prompt, *answer, self._end], is_learnt)

    def encode_prompt(self, text: str) -> list[int]:
        return self._prompt_ids(WITHOUT_INPUT.format(instruction=text))

    def _prompt_ids(self, prompt: str) -> list[int]:
        return without_end(self._tokenizer(prompt).input_ids, self._end)


class Chat:
    """Messages written by the tokenizer's chat template; what the assistant says is learnt.

    Where the template has ``{% generation %}`` marks, they say what the assistant's tokens are.
    Otherwise an answer is what the template adds to the messages before it.

    Args:
        tokenizer: With a chat template.
        fields: The names of fields that are called otherwise.
        answers: Which of the assistant's messages are learnt.
        template: A chat template in place of the tokenizer's own.

    Raises:
        DataError: If the tokenizer has no chat template.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        fields: Mapping[str, str],
        answers: Answers = "all",
        template: str | None = None,
    ) -> None:
        name = tokenizer.name_or_path
        if not tokenizer.chat_template and template is None:
            raise DataError(
                f"The tokenizer of {name} has no chat template, so it cannot write messages. Take "
                "the instruct version of the model, or name a Jinja file as `data.chat_template`."
            )
        if not tokenizer.is_fast:
            raise DataError(
                f"The tokenizer of {name} does not tell where in a text its tokens stand, so those "
                "of the assistant cannot be found. Take a model with a fast tokenizer, or data in "
                "Alpaca's form."
            )
        self._tokenizer = tokenizer
        self._fields = fields
        self._answers = answers
        self._template = template
        used = template or tokenizer.get_chat_template()
        self._has_marks = re.search(r"\{%-?\s*generation", used) is not None

    def encode(self, row: Row, where: str) -> Sample:
        messages = messages_of(row, self._fields.get("messages", "messages"), where)
        return self.encode_messages(messages, where, row.get("tools") or None)

    def encode_messages(
        self, messages: list[Row], where: str, tools: list[Any] | None = None
    ) -> Sample:
        """Encode a conversation; raises `DataError` where the answers cannot be told apart."""
        try:
            if self._has_marks:
                return self._by_marks(messages, where, tools)
            return self._by_prefixes(messages, where, tools)
        except TemplateError as error:
            raise DataError(
                f"{where}: the chat template of {self._tokenizer.name_or_path} refuses the "
                f"messages: {error}."
            ) from error

    def encode_prompt(self, text: str) -> list[int]:
        written = self._write([{"role": "user", "content": text}], None, add_generation_prompt=True)
        token_ids: list[int] = self._tokenizer(written, add_special_tokens=False).input_ids
        return token_ids

    def _by_marks(self, messages: list[Row], where: str, tools: list[Any] | None) -> Sample:
        encoded = self._tokenizer.apply_chat_template(
            messages,
            tools=tools,
            chat_template=self._template,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        mask = [bool(mark) for mark in encoded["assistant_masks"]]
        if not any(mask):
            raise DataError(
                f"{where}: the chat template of {self._tokenizer.name_or_path} marks nothing as "
                "the assistant's. Check its {% generation %} marks, or name another Jinja file as "
                "`data.chat_template`."
            )
        if self._answers == "last":
            end = len(mask) - mask[::-1].index(True)
            start = end - (mask[:end][::-1].index(False) if False in mask[:end] else end)
            mask = [start <= position < end for position in range(len(mask))]
        return sample_of(encoded["input_ids"], mask)

    def _by_prefixes(self, messages: list[Row], where: str, tools: list[Any] | None) -> Sample:
        text = self._write(messages, tools)
        indices = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        chosen = indices if self._answers == "all" else indices[-1:]
        spans = [self._span(messages, index, text, where, tools) for index in chosen]
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        # A token that begins before an answer and ends in it is part of the answer, as with marks.
        is_learnt = [
            any(first < end and start < last for start, end in spans)
            for first, last in encoded["offset_mapping"]
        ]
        return sample_of(encoded["input_ids"], is_learnt)

    def _span(
        self, messages: list[Row], index: int, text: str, where: str, tools: list[Any] | None
    ) -> tuple[int, int]:
        """Where in the text an answer begins and ends, its end mark included."""
        before = self._write(messages[:index], tools, add_generation_prompt=True) if index else ""
        through = self._write(messages[: index + 1], tools).rstrip()
        follows = len(before) < len(through) and text.startswith(before)
        if index and follows and text.startswith(through):
            return len(before), len(through)
        raise DataError(
            f"{where}: the chat template of {self._tokenizer.name_or_path} has no "
            "{% generation %} marks, and it writes earlier messages otherwise when later ones "
            "follow, or the conversation begins with the assistant. So the assistant's tokens "
            "cannot be told from the others. Set `data.chat_template` to trl, which has templates "
            "with marks for many models, or to a Jinja file with such marks, or set "
            "`data.answers` to last."
        )

    def _write(self, messages: list[Row], tools: list[Any] | None, **options: bool) -> str:
        text: str = self._tokenizer.apply_chat_template(
            messages, tools=tools, chat_template=self._template, tokenize=False, **options
        )
        return text


class AlpacaChat:
    """Alpaca's fields, written by the chat template: for models that have learnt to chat."""

    def __init__(self, chat: Chat, fields: Mapping[str, str]) -> None:
        self._chat = chat
        self._fields = fields

    def encode(self, row: Row, where: str) -> Sample:
        instruction, about, output = alpaca_fields(row, self._fields, where)
        asked = f"{instruction}\n\n{about}" if about else instruction
        said = [("user", asked), ("assistant", output)]
        messages = [{"role": role, "content": content} for role, content in said]
        return self._chat.encode_messages(messages, where)

    def encode_prompt(self, text: str) -> list[int]:
        return self._chat.encode_prompt(text)


def encoder_of(
    form: Form,
    tokenizer: PreTrainedTokenizerBase,
    fields: Mapping[str, str] | None = None,
    answers: Answers = "all",
    template: str | None = None,
) -> Encoder:
    """What encodes rows of a form.

    Raises:
        DataError: If the tokenizer lacks what the form needs.
    """
    names = fields or {}
    if form == "alpaca":
        return Alpaca(tokenizer, names)
    if form == "completion":
        return Completion(tokenizer, names)
    chat = Chat(tokenizer, names, answers, template)
    return chat if form == "chat" else AlpacaChat(chat, names)


def form_of(row: Row, fields: Mapping[str, str], where: str) -> Form:
    """The form that the fields of a row show.

    Raises:
        DataError: If they show none.
    """
    for form, wanted in (("chat", "messages"), ("alpaca", "instruction"), ("completion", "text")):
        if fields.get(wanted, wanted) in row:
            return form  # type: ignore[return-value]
    raise DataError(
        f"{where} has the fields {', '.join(map(str, row))}, and none of messages (chat), "
        "instruction (Alpaca) or text (completion). If yours have other names, say so under "
        "`data.fields`, such as {instruction: question, output: answer}."
    )


def text_field(row: Row, name: str, where: str) -> str:
    """A field that must be text; raises `DataError` if it is missing or something else."""
    if name not in row:
        raise DataError(
            f"{where} has no field {name}; its fields are {', '.join(map(str, row)) or 'none'}. "
            "Other names stand under `data.fields`."
        )
    value = row[name]
    if not isinstance(value, str):
        raise DataError(f"{where}: the field {name} must be text, not {value!r:.60}.")
    return value


def alpaca_fields(row: Row, fields: Mapping[str, str], where: str) -> tuple[str, str, str]:
    """Instruction, input and output; a missing input, or one that is null, is empty."""
    about = fields.get("input", "input")
    given = {**row, about: row.get(about) or ""}
    instruction, input_, output = (
        text_field(given, fields.get(name, name), where)
        for name in ("instruction", "input", "output")
    )
    return instruction, input_, output


def messages_of(row: Row, name: str, where: str) -> list[Row]:
    """The messages of a conversation that has an answer.

    Raises:
        DataError: If they are no list of objects with role and content, or nobody answers.
    """
    if name not in row:
        text_field(row, name, where)
    messages = row[name]
    if isinstance(messages, str):  # A CSV file has no lists.
        try:
            messages = json.loads(messages)
        except ValueError as error:
            raise DataError(f"{where}: the field {name} is not JSON: {error}.") from error
    if not isinstance(messages, list) or not all(
        isinstance(message, dict) and isinstance(message.get("role"), str) and "content" in message
        for message in messages
    ):
        raise DataError(
            f"{where}: the field {name} must be a list of objects with role and content, not "
            f"{messages!r:.80}."
        )
    if not any(message["role"] == "assistant" for message in messages):
        roles = ", ".join(message["role"] for message in messages) or "nobody"
        raise DataError(f"{where}: the assistant says nothing to learn; those who speak: {roles}.")
    return messages


def end_of(tokenizer: PreTrainedTokenizerBase) -> int:
    """The token that ends a text; raises `DataError` if there is none."""
    if tokenizer.eos_token_id is None:
        raise DataError(
            f"The tokenizer of {tokenizer.name_or_path} has no token that ends a text, so the "
            "model could not learn where to stop. Set its eos_token, or take data in the form "
            "of chat."
        )
    return int(tokenizer.eos_token_id)


def without_end(token_ids: Sequence[int], end: int) -> list[int]:
    """The ids without the end that some tokenizers add by themselves."""
    return [*token_ids[:-1]] if token_ids and token_ids[-1] == end else [*token_ids]
