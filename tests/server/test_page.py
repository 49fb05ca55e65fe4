"""The chat page in a real browser: `make test-page`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import Server, stub_server

pytestmark = pytest.mark.browser
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = "--no-sandbox --disable-gpu --disable-background-networking --disable-component-update --disable-sync"


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Says what the last user message says, 20 words a second at most."""
    options = ("--reasoning-parser", "think")
    with stub_server(tmp_path_factory.mktemp("stub"), *options, env={"STUB_STEP": "0.02"}) as server:
        yield server


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    if CHROMIUM is None:
        pytest.fail("the page is tested in Chromium: install the package chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS.split())
        yield browser
        browser.close()


class Chat:
    """The page, what it asked of the server, and what went wrong in it."""

    def __init__(self, browser: Any, server: Server) -> None:
        self.page = browser.new_context(locale="en-US").new_page()
        self.page.set_default_timeout(10_000)
        self.addresses: list[str] = []
        self.bodies: list[Any] = []
        self.errors: list[str] = []
        self.page.on("request", self._note)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("dialog", lambda dialog: self.errors.append(dialog.message))
        self.page.goto(f"http://127.0.0.1:{server.port}/")

    def _note(self, request: Any) -> None:
        self.addresses.append(request.url)
        if request.post_data:
            self.bodies.append(json.loads(request.post_data))

    def say(self, text: str) -> None:
        self.page.fill("#text", text)
        self.page.press("#text", "Enter")

    def ended(self) -> Chat:
        self.page.wait_for_function("document.getElementById('send').textContent === 'Send'")
        return self

    def texts(self, selector: str) -> list[str]:
        return list(self.page.locator(selector).all_inner_texts())


@pytest.fixture
def chat(browser: Any, slow: Server) -> Iterator[Chat]:
    chat = Chat(browser, slow)
    yield chat
    chat.page.context.close()
    assert not chat.errors
    assert all(address.startswith(f"http://127.0.0.1:{slow.port}/") for address in chat.addresses)


def test_it_names_the_model_and_streams_an_answer_with_its_rate(chat: Chat) -> None:
    chat.page.wait_for_function("document.title === 'stub'")
    chat.say("one two three four five six seven eight nine ten")
    chat.page.wait_for_function("document.querySelector('article.assistant span')?.textContent.length > 5")
    assert chat.texts("#send") == ["Stop"]
    assert len(chat.texts("article.assistant span")[0]) < 40
    chat.ended()
    assert chat.texts("article.user") == ["one two three four five six seven eight nine ten"]
    assert chat.texts("article.assistant span") == chat.texts("article.user")
    assert "tok/s" in chat.texts("article.assistant small")[0]


def test_a_second_turn_sends_the_first_and_a_new_chat_forgets_it(chat: Chat) -> None:
    chat.say("first")
    chat.ended().say("second")
    chat.ended()
    said = [(message["role"], message["content"]) for message in chat.bodies[1]["messages"]]
    assert said == [("user", "first"), ("assistant", "first"), ("user", "second")]
    chat.page.click("#clear")
    assert chat.texts("article") == []
    chat.say("third")
    chat.ended()
    assert [message["content"] for message in chat.bodies[2]["messages"]] == ["third"]


def test_switches_reach_the_request(chat: Chat) -> None:
    chat.say("plain")
    chat.ended()
    assert "temperature" not in chat.bodies[0]
    assert "enable_thinking" not in chat.bodies[0]
    chat.page.fill("#temperature", "0.5")
    chat.page.uncheck("#thinking")
    chat.say("set")
    chat.ended()
    assert chat.bodies[1]["temperature"] == 0.5
    assert chat.bodies[1]["enable_thinking"] is False


def test_thinking_is_shown_apart_and_folded_when_the_answer_begins(chat: Chat) -> None:
    chat.say("<think>because</think>yes")
    chat.ended()
    assert chat.texts("article.assistant > span") == ["yes"]
    assert chat.page.locator("article.assistant details span").text_content() == "because"
    assert not chat.page.locator("article.assistant details").evaluate("element => element.open")


def test_stop_ends_an_answer_and_frees_the_engine(chat: Chat, slow: Server) -> None:
    chat.say("word " * 400)
    chat.page.wait_for_function("document.querySelector('article.assistant span')?.textContent.length > 20")
    chat.page.click("#send")
    chat.ended()
    assert 20 < len(chat.texts("article.assistant span")[0]) < 1500
    slow.until_idle()
    chat.say("still there")
    chat.ended()
    assert chat.texts("article.assistant span")[1] == "still there"


def test_markup_stays_text_and_a_refusal_is_shown(chat: Chat) -> None:
    markup = '<img src=x onerror="alert(1)"><b>bold</b>'
    chat.say(markup)
    chat.ended()
    assert chat.texts("article.assistant span") == [markup]
    assert chat.page.locator("article img").count() == 0
    chat.page.evaluate("document.getElementById('form').noValidate = true")
    chat.page.fill("#temperature", "-1")
    chat.say("too cold")
    chat.ended()
    assert "temperature" in chat.texts(".error")[0]
    chat.page.fill("#temperature", "")
    chat.say("better")
    chat.ended()
    assert [message["content"] for message in chat.bodies[-1]["messages"]] == [markup, markup, "better"]


def test_a_new_chat_begun_within_an_answer_does_not_get_it(chat: Chat) -> None:
    chat.say("word " * 400)
    chat.page.wait_for_function("document.querySelector('article.assistant span')?.textContent.length > 20")
    chat.page.click("#clear")
    chat.ended().say("new")
    chat.ended()
    assert [message["content"] for message in chat.bodies[-1]["messages"]] == ["new"]
    assert chat.texts("article.assistant span") == ["new"]


def test_it_works_on_a_narrow_screen(browser: Any, slow: Server, tmp_path: Path) -> None:
    chat = Chat(browser, slow)
    chat.page.set_viewport_size({"width": 360, "height": 640})
    chat.say("narrow " * 30)
    chat.ended()
    assert chat.page.evaluate("document.documentElement.scrollWidth") <= 360
    assert chat.page.locator("#send").bounding_box()["y"] < 640
    chat.page.context.close()
