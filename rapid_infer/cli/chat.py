"""`rapid-infer chat`: a conversation in the terminal, or one line after the other in a pipe."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rapid_infer.cli import options
from rapid_infer.cli.chat_session import Answer, ChatSession
from rapid_infer.errors import RequestError
from rapid_infer.outputs import FinishReason

if TYPE_CHECKING:
    from rapid_infer.llm import LLM

MAX_TOKENS = 1024
SAMPLING = ("greedy", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")

COMMANDS = {
    "/help": ("", "this list"),
    "/system": ("[TEXT]", 'set the system message, or show it; "" removes it'),
    "/reset": ("", "forget the conversation, keep the system message"),
    "/params": ("[NAME=VALUE ...]", "change sampling parameters, or show them"),
    "/exit": ("", "leave; so does Ctrl-D"),
}
HINT = """Ctrl-C stops an answer or clears the line. A message that begins with / needs a space before it."""


@options.expand(engine_args=options.RUN, sampling=SAMPLING)
def chat(
    *,
    model: options.Model = "demo",
    system: options.System = None,
    no_thinking: options.NoThinking = False,
    max_tokens: Annotated[
        int | None, typer.Option(help="Tokens of an answer at most. Default: 1024, or the model's own.")
    ] = None,
    sampling: dict[str, Any],
    engine_args: dict[str, Any],
    offline: options.Offline = False,
) -> None:
    """Talk with a model. Example: rapid-infer chat --temperature 0.3

    Sampling options that are not given come from the model's generation_config.json. In a pipe every line is one
    message, answers go to standard output, and everything else to standard error.
    """
    options.go_offline(offline)
    given = options.sampling_options({"max_tokens": max_tokens, **sampling})
    from rapid_infer.llm import LLM

    with LLM(model, **engine_args) as llm:
        options.show_memory(llm.engine)
        if llm.engine.tokenizer is None or not llm.engine.tokenizer.has_chat_template:
            raise RequestError(
                f"{model} has no chat template, so it cannot chat; use `rapid-infer generate` with a plain prompt, or "
                "an instruction-tuned version of the model"
            )
        session = ChatSession(
            llm,
            options.sampling_params(llm.engine, given, MAX_TOKENS),
            system=system,
            template=options.template_options(no_thinking),
            note=_note,
        )
        if sys.stdin.isatty():
            _note(_banner(llm, model))
            TerminalChat(session).run()
        elif code := answer_lines(session):
            raise typer.Exit(code)


def answer_lines(session: ChatSession) -> int:
    """Answer each line of standard input; returns the exit code: 0, or that of the first line that failed."""
    code = 0
    for line in sys.stdin:
        if not line.strip():
            continue
        try:
            answer = session.ask(line.rstrip("\r\n"), _show)
        except RequestError as error:
            print(f"error: {error}", file=sys.stderr)
            code = code or 2
            continue
        _end_line(answer)
        if answer.error is not None:
            print(f"error: {answer.error}", file=sys.stderr)
            code = code or 1
    return code


class TerminalChat:
    """The conversation with a person: reads lines until Ctrl-D or /exit."""

    def __init__(self, session: ChatSession) -> None:
        self._session = session
        self._keys = Keyboard()
        self._commands: dict[str, Callable[[str], None]] = {
            "/help": self._help,
            "/system": self._system,
            "/reset": self._reset,
            "/params": self._params,
        }

    def run(self) -> None:
        with self._keys:
            while (line := self._read()) is not None:
                name, _, rest = line.strip().partition(" ")
                if not line.startswith("/"):
                    if name:
                        self._ask(line.strip())
                elif name == "/exit":
                    return
                elif name in self._commands:
                    self._commands[name](rest.strip())
                else:
                    _note(f"unknown command {name}; there are {', '.join(COMMANDS)}")

    def _read(self) -> str | None:
        """The next line; None to leave."""
        pressed = False
        while True:
            try:
                return self._keys.read("> ")
            except EOFError:
                _note("")
                return None
            except KeyboardInterrupt:
                _note("")
                if self._keys.typed:
                    pressed = True
                    continue
                if pressed:
                    return None
                pressed = True
                _note("(Ctrl-C again, or Ctrl-D, leaves)")

    def _ask(self, question: str) -> None:
        self._keys.interrupted = False
        try:
            answer = self._session.ask(question, _show, lambda: self._keys.interrupted)
        except RequestError as error:
            _note(f"error: {error}", style="red")
            return
        _end_line(answer)
        if answer.error is not None:
            _note(f"error: {answer.error}; the question is forgotten", style="red")
            return
        if answer.finish_reason is None:
            what = "what there is stays in the conversation" if answer.text else "the question is forgotten"
            _note(f"(stopped; {what})")
        elif answer.finish_reason == FinishReason.LENGTH:
            _note(f"(cut off: {self._limit(answer)})")
        _note(answer.line(), style="dim")

    def _limit(self, answer: Answer) -> str:
        if answer.tokens == self._session.params.max_tokens:
            return f"max_tokens={answer.tokens}; change it with /params max_tokens=N"
        return f"the conversation has reached the {self._session.limit} tokens that fit"

    def _help(self, rest: str) -> None:
        for name, (arguments, meaning) in COMMANDS.items():
            _note(f"  {f'{name} {arguments}':26}{meaning}")
        _note(HINT)

    def _system(self, rest: str) -> None:
        if rest:
            self._session.system = None if rest in ('""', "''") else rest
        if self._session.system is None:
            _note("no system message is set; the model's template may bring its own")
        else:
            _note(f"system message: {self._session.system}")

    def _reset(self, rest: str) -> None:
        count = self._session.reset()
        _note(f"forgot {count} exchange{'' if count == 1 else 's'}")

    def _params(self, rest: str) -> None:
        try:
            if rest:
                self._session.change(rest)
            _note(self._session.describe())
        except RequestError as error:
            _note(f"error: {error}", style="red")


class Keyboard:
    """Lines, and what Ctrl-C means while this context lasts: KeyboardInterrupt in `read`, elsewhere only a mark.

    `typed` is the unfinished line at the last interrupt of `read`, as far as that can be known.
    """

    def __init__(self) -> None:
        self.interrupted = False
        self.typed = ""
        self._reading = False
        self._readline: ModuleType | None = None
        self._before: Any = None

    def __enter__(self) -> Keyboard:
        with contextlib.suppress(ImportError):
            import readline

            self._readline = readline
        self._before = signal.signal(signal.SIGINT, self._press)
        return self

    def __exit__(self, *error: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def read(self, prompt: str) -> str:
        if not sys.stdout.isatty():  # answers go into a file; the prompt is for the person
            print(prompt, end="", file=sys.stderr, flush=True)
            prompt = ""
        self._reading = True
        try:
            return input(prompt)
        finally:
            self._reading = False

    def _press(self, number: int, frame: FrameType | None) -> None:
        # An exception here could end an engine step half way, so an answer looks at the mark between its steps.
        self.interrupted = True
        if self._reading:
            self._reading = False
            self.typed = self._readline.get_line_buffer() if self._readline is not None else ""
            raise KeyboardInterrupt


def _banner(llm: LLM, model: str) -> str:
    info = llm.engine.inputs.info
    return (
        f"{model}: {info.architecture} in {info.dtype} on {info.device}, up to {info.max_model_len} tokens. "
        "/help lists the commands, Ctrl-D leaves."
    )


def _show(text: str) -> None:
    print(text, end="", flush=True)


def _end_line(answer: Answer) -> None:
    if not answer.text.endswith("\n"):
        _show("\n")


def _note(text: str, style: str | None = None) -> None:
    from rich.console import Console

    Console(stderr=True).print(text, style=style, markup=False, highlight=False, soft_wrap=True)
