"""`rapid-infer chat`: the session, a pipe, and a person at a terminal."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from tiny_chat import Run, make_chat_model, make_run

from rapid_infer import LLM, SamplingParams
from rapid_infer.cli.chat_session import ChatSession, parse_pairs
from rapid_infer.errors import RequestError

CPU = ("--device", "cpu", "--dtype", "float32")
COMMAND = (sys.executable, "-m", "rapid_infer.cli", "chat")
LETTERS = SamplingParams(temperature=0, max_tokens=4, allowed_token_ids=tuple(b"abcdefgh"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_chat_model(tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_chat_model(tmp_path_factory.mktemp("plain"), template=None)


@pytest.fixture(scope="module")
def llm(model: str) -> Iterator[LLM]:
    with LLM(model, device="cpu", dtype="float32", max_model_len=160) as llm:
        yield llm


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return make_run(capsys)


def ask(session: ChatSession, question: str) -> str:
    """The answer, which must be what was shown."""
    pieces: list[str] = []
    answer = session.ask(question, pieces.append)
    assert "".join(pieces) == answer.text
    return answer.text


def conversation(llm: LLM, session: ChatSession, question: str) -> list[int]:
    messages = [{"role": "system", "content": session.system}] if session.system is not None else []
    for asked, answered in session.exchanges:
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
    return llm.encode_chat([*messages, {"role": "user", "content": question}])


def test_each_question_is_asked_with_the_history_and_the_system_message(llm: LLM) -> None:
    session = ChatSession(llm, LETTERS, system="Be kind")
    for question in ("one", "two", "three"):
        expected = llm.generate(conversation(llm, session, question), LETTERS)[0].outputs[0].text
        assert ask(session, question) == expected
    assert [asked for asked, _ in session.exchanges] == ["one", "two", "three"]
    assert session.reset() == 3
    assert (session.exchanges, session.system) == ([], "Be kind")


def test_the_template_gets_its_arguments(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    encode = llm.encode_chat

    def spy(messages: list[dict[str, str]], **arguments: bool) -> list[int]:
        ids = encode(messages, **arguments)
        seen.append(bytes(ids).decode())
        return ids

    monkeypatch.setattr(llm, "encode_chat", spy)
    ask(ChatSession(llm, LETTERS, template={"enable_thinking": False}), "Hi")
    ask(ChatSession(llm, LETTERS), "Hi")
    assert seen == ["u:Hi\na:-", "u:Hi\na:"]


def test_a_stopped_answer_stays_as_far_as_it_came(llm: LLM) -> None:
    session = ChatSession(llm, SamplingParams(temperature=0, max_tokens=50, allowed_token_ids=tuple(b"abcdefgh")))
    shown: list[str] = []
    answer = session.ask("Hi", shown.append, lambda: len("".join(shown)) >= 3)
    assert (answer.finish_reason, answer.tokens, answer.text) == (None, 3, "".join(shown))
    assert session.exchanges == [("Hi", answer.text)]
    assert not llm.engine.has_unfinished_requests()
    session.params = LETTERS
    assert ask(session, "And?")

    session = ChatSession(llm, SamplingParams(max_tokens=50, allowed_token_ids=(0xE4,)))
    nothing = session.ask("Hi", shown.append, lambda: True)
    assert (nothing.text, session.exchanges) == ("", [])


def test_a_character_cut_in_half_is_not_shown(llm: LLM) -> None:
    whole, half = SamplingParams(max_tokens=1, allowed_token_ids=(ord("x"),)), (0xE4,)
    assert ask(ChatSession(llm, whole), "Hi") == "x"
    assert ask(ChatSession(llm, SamplingParams(max_tokens=2, allowed_token_ids=half)), "Hi") == ""


def test_what_does_not_fit_is_dropped_oldest_first_and_said(llm: LLM) -> None:
    notes: list[str] = []
    session = ChatSession(llm, LETTERS, system="Be kind", note=notes.append)
    for number in range(4):
        ask(session, f"{number}" * 40)
    assert [asked[0] for asked, _ in session.exchanges] == ["1", "2", "3"][-len(session.exchanges) :]
    assert notes
    assert all(note.startswith("the conversation has outgrown the 160 tokens that fit: ") for note in notes)
    assert "the oldest exchange was dropped" in notes[0]
    assert bytes(conversation(llm, session, "x")).decode().startswith("s:Be kind\nu:")

    before, told = list(session.exchanges), len(notes)
    with pytest.raises(RequestError, match="max_model_len=160"):
        ask(session, "x" * 200)
    assert (session.exchanges, len(notes)) == (before, told)
    assert ask(session, "Still there?")


def test_a_failed_answer_leaves_the_history_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    session = ChatSession(llm, LETTERS)
    ask(session, "Hi")
    before = list(session.exchanges)
    layer = next(iter(llm.engine.executor.runner.model.layers))

    def forward(*args: object) -> None:
        raise RuntimeError("out of luck")

    with monkeypatch.context() as patch:
        patch.setattr(layer, "forward", forward)
        answer = session.ask("And?", lambda text: None)
    assert answer.error is not None
    assert "out of luck" in answer.error
    assert session.exchanges == before
    assert ask(session, "And?")


def test_parameters_are_changed_and_described_in_the_same_form(llm: LLM) -> None:
    session = ChatSession(llm, LETTERS)
    session.change("temperature=0.7 top_p=0.9  stop=a b max_tokens=None")
    assert session.params == SamplingParams(
        temperature=0.7, top_p=0.9, stop="a b", max_tokens=None, allowed_token_ids=LETTERS.allowed_token_ids
    )
    before = session.params
    for wrong, message in {
        "temperature=hot": "temperature must be a number",
        "temprature=1": "did you mean 'temperature'",
        "top_k=3 top_p=7": "top_p must be",
        "temperature": "expected name=value",
        "n=2": "n must stay 1",
    }.items():
        with pytest.raises(RequestError, match=re.escape(message)):
            session.change(wrong)
        assert session.params is before
    assert "temperature=0.7 top_k=0 top_p=0.9 " in session.describe()
    session.change(session.describe())
    assert session.params == before


def test_pairs() -> None:
    assert parse_pairs('a=1 b=[1, 2] c="x y" d=true e=null f=x y g={"1": 2}') == {
        "a": 1,
        "b": [1, 2],
        "c": "x y",
        "d": True,
        "e": None,
        "f": "x y",
        "g": {"1": 2},
    }


def test_a_pipe_is_answered_line_by_line(model: str) -> None:
    given = ("--greedy", "--max-tokens", "5", "--system", "Be kind", *CPU)
    text = "Hello\n\n/help\r\nla\rst\u2028\x0b"
    done = subprocess.run([*COMMAND, model, *given], input=text.encode(), capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")
    with LLM(model, device="cpu", dtype="float32") as llm:
        session = ChatSession(llm, SamplingParams(temperature=0, max_tokens=5), system="Be kind")
        answers = [ask(session, question) for question in ("Hello", "/help", "la\rst\u2028\x0b")]
    assert done.stdout.decode() == "".join(answer if answer.endswith("\n") else f"{answer}\n" for answer in answers)


def test_a_pipe_goes_on_after_what_fails(model: str, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [b"Hello", b"x" * 99, b"\xff\xfe", *[b"y" * 20] * 3]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\n".join(lines)), encoding="utf-8"))
    code, out, err = run("chat", model, "--max-tokens", "3", "--max-model-len", "64", *CPU)
    assert (code, out.endswith("\n")) == (2, True)
    messages = err.splitlines()
    assert messages[0].startswith("error: the prompt has 104 tokens, but max_model_len=64")
    assert len(messages) > 1
    assert all("outgrown the 64 tokens" in message for message in messages[1:])


def test_a_model_without_a_template_is_one_error(plain: str, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\n"))
    code, out, err = run("chat", plain, *CPU)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert "has no chat template" in err


class Person:
    """Types at a real terminal and reads what it shows."""

    def __init__(self, *command: str) -> None:
        pid, self.terminal = pty.fork()
        if pid == 0:
            os.execve(command[0], command, {**os.environ, "TERM": "xterm", "COLUMNS": "200"})
        self.pid = pid
        self.screen = ""

    def wait_for(self, text: str, timeout: float = 30) -> str:
        """What comes up to `text`; it is not looked at again."""
        end = time.monotonic() + timeout
        while text not in self.screen:
            left = end - time.monotonic()
            if left <= 0 or not select.select([self.terminal], [], [], left)[0]:
                raise AssertionError(f"no {text!r} in {self.screen!r}")
            self.screen = re.sub(r"\x1b\[[?0-9;]*[a-zA-Z]", "", self.screen + self._read())
        before, _, self.screen = self.screen.partition(text)
        return before

    def _read(self) -> str:
        try:
            return os.read(self.terminal, 65536).decode(errors="replace")
        except OSError:  # the other side is closed
            raise AssertionError(f"the program ended after {self.screen!r}") from None

    def type(self, text: str) -> None:
        if text < " ":
            time.sleep(0.2)  # a signal between the prompt and the wait for keys is only seen at the next key
        os.write(self.terminal, text.encode())

    def say(self, text: str, until: str) -> str:
        """Enter a line; returns what is shown after it, up to and with `until`, once the next prompt is there."""
        self.type(f"{text}\n")
        self.wait_for(text)
        shown = self.wait_for(until) + until
        self.wait_for("> ")
        return shown

    def exit_code(self) -> int:
        with contextlib.suppress(AssertionError):
            self.wait_for("\0nothing", timeout=20)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def test_a_person_at_a_terminal(model: str) -> None:
    person = Person(*COMMAND, model, "--greedy", "--max-tokens", "6", *CPU)
    assert "Qwen3ForCausalLM in float32 on cpu, up to 8192 tokens" in person.wait_for("Ctrl-D leaves.")
    person.wait_for("> ")
    shown = person.say("/help", "space before it.")
    assert all(name in shown for name in ("/help", "/system", "/reset", "/params", "/exit"))
    assert "there are /help, /system" in person.say("/nosuch", "/exit")
    assert "temperature=0.0 top_k=0" in person.say("/params", "max_tokens=6")
    person.say("/params temperature=hot", "error: temperature must be a number >= 0, got 'hot'")
    person.say("/params allowed_token_ids=[120]", "allowed_token_ids=[120]")
    person.say("/system", "no system message is set")
    person.say("/system Be kind", "system message: Be kind")

    answer = person.say("Hello", "first token after")
    assert re.search(r"^\s*xxxxxx\s+\(cut off: max_tokens=6; .*\)\s+6 tokens in .* tok/s\)", answer), answer

    person.say("/params max_tokens=8000", "max_tokens=8000")
    person.type("A long one\n")
    person.wait_for("A long one")
    person.wait_for("xxxx")
    person.type("\x03")
    person.wait_for("(stopped; what there is stays in the conversation)")
    person.wait_for("tok/s)")
    person.wait_for("> ")
    person.say("/params max_tokens=3", "max_tokens=3")
    assert re.search(r"^\s*xxx\s", person.say("Another", "tok/s)"))
    person.say("/reset", "forgot 3 exchanges")

    person.type("half a line")
    person.wait_for("half a line")
    person.type("\x03")
    person.wait_for("> ")
    assert re.search(r"^\s*xxx\s", person.say("Whole", "tok/s)"))
    person.type("\x03")
    person.wait_for("(Ctrl-C again, or Ctrl-D, leaves)")
    person.wait_for("> ")
    person.say("/reset", "forgot 1 exchange")
    person.type("\x04")
    assert person.exit_code() == 0


def test_two_interrupts_at_an_empty_prompt_leave() -> None:
    program = "from rapid_infer.cli.chat import TerminalChat; TerminalChat(None).run(); print('left')"
    person = Person(sys.executable, "-c", program)
    person.wait_for("> ")
    person.type("\x03")
    person.wait_for("leaves)")
    person.wait_for("> ")
    person.type("x")
    person.wait_for("x")
    person.type("\x03")  # this one only clears the line
    person.wait_for("> ")
    person.type("\x03")
    person.wait_for("left")
    assert person.exit_code() == 0
