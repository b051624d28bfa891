# SPDX-License-Identifier: Apache-2.0
"""The page in headless Chromium, as a person uses it, against real processes with a fake engine.

Needs the `playwright` package (extra `browser`) and a Chromium: the system's, or the one that playwright installs.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.stack import Stack, http

sync_api = pytest.importorskip("playwright.sync_api")
expect = sync_api.expect

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(180),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning"),
]

PATIENCE_MS = 30_000
MARKUP = "<img src=x onerror=\"document.title='owned'\"> & <b>bold</b>"


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    stack = Stack()
    try:
        stack.start_group("g", "fake:step_ms=5")
        stack.start_gateway()
        yield stack
    finally:
        stack.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    found = filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome")))
    with sync_api.sync_playwright() as playwright:
        try:
            # Without its sandbox, which does not work for root; the only page that it sees is ours.
            browser = playwright.chromium.launch(executable_path=next(found, None), args=["--no-sandbox"])
        except sync_api.Error as error:
            pytest.skip(f"needs Chromium: {error.message.splitlines()[0]}")
        yield browser
        browser.close()


@pytest.fixture
def page(stack: Stack, browser: Any) -> Iterator[Any]:
    """A loaded page that has seen a status. Errors of its scripts and violations of its policy fail the test."""
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    page.set_default_timeout(PATIENCE_MS)
    expect.set_options(timeout=PATIENCE_MS)
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text) if "Policy" in message.text else None)
    foreign: list[str] = []
    page.on("request", lambda request: None if request.url.startswith(stack.url) else foreign.append(request.url))
    page.goto(stack.url)
    expect(page.get_by_label("Model")).to_have_value("m")
    yield page
    page.close()
    assert (problems, foreign) == ([], [])


def set_max_tokens(page: Any, value: str) -> None:
    page.get_by_text("Settings").click()
    page.get_by_label("Max tokens").fill(value)


def ask(page: Any, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.get_by_label("Message", exact=True).press("Enter")


def broker_status(stack: Stack) -> dict[str, Any]:
    status: dict[str, Any] = json.loads(http(stack.url + "/status")[1])["broker"]
    return status


def test_an_answer_is_streamed_shown_as_text_and_timed(page: Any, tmp_path: Path) -> None:
    set_max_tokens(page, "40")
    ask(page, MARKUP)
    answer = page.locator(".assistant")
    expect(answer.locator("footer")).to_have_text(re.compile(r"^length · 40 tokens · first after .* tokens/s$"))
    assert len(answer.locator(".text:not(.reasoning)").text_content()) == 40
    expect(page.locator(".user .text:not(.reasoning)")).to_have_text(MARKUP)
    assert page.locator(".log img").count() == 0
    assert page.title() == "mii_zmq"
    row = page.get_by_role("region", name="Requests of this page").get_by_role("listitem")
    expect(row).to_contain_text(re.compile(r"#1 m\s*length.*first token .* · then every .* · 40 tokens"))
    assert float(row.locator("rect.streaming").get_attribute("width")) > 0
    page.screenshot(path=tmp_path / "page.png")

    ask(page, "And then?")
    expect(answer).to_have_count(2)
    expect(answer.last.locator("footer")).to_contain_text("40 tokens")
    page.get_by_role("button", name="New chat").click()
    expect(page.locator(".message")).to_have_count(0)


def test_what_is_asked_is_what_was_set(page: Any) -> None:
    set_max_tokens(page, "7")
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Temperature").fill("0.5")
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "Hi")
    body = sent.value.post_data_json
    assert body["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert (body["model"], body["temperature"], body["max_tokens"], body["stream"]) == ("m", 0.5, 7, True)
    footer = page.locator(".assistant footer")
    expect(footer).to_contain_text("7 tokens")
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "More")
    roles = [message["role"] for message in sent.value.post_data_json["messages"]]
    assert roles == ["system", "user", "assistant", "user"]
    expect(footer).to_have_count(2)
    expect(footer.last).to_contain_text("7 tokens")


@pytest.mark.parametrize("by", ["button", "Escape"])
def test_stopping_cancels_the_request_at_the_engine(by: str, page: Any, stack: Stack) -> None:
    before = broker_status(stack)["counters"]["cancelled"]
    set_max_tokens(page, "8000")
    ask(page, "A long story, please.")
    expect(page.locator(".assistant .text:not(.reasoning)")).to_contain_text(re.compile(r"\S"))
    if by == "button":
        page.get_by_role("button", name="Stop").click()
    else:
        page.keyboard.press("Escape")
    expect(page.locator(".assistant footer")).to_contain_text("stopped · ")
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    expect(page.get_by_label("Message", exact=True)).to_be_focused()
    stack.wait_for(lambda: broker_status(stack)["counters"]["cancelled"] == before + 1)
    stack.wait_for(lambda: stack.groups_status()["g"]["load"]["running"] == 0)


def test_errors_are_shown_and_the_text_is_kept(page: Any) -> None:
    set_max_tokens(page, "0")
    ask(page, "Hi")
    expect(page.locator("#problem")).to_contain_text("Max tokens: ")
    assert page.locator(".message").count() == 0
    page.get_by_label("Max tokens").fill("1000000000")
    ask(page, "Hi")
    expect(page.locator(".message .problem")).to_contain_text(re.compile(r"max_tokens.*\(400\)"))
    expect(page.get_by_label("Message", exact=True)).to_have_value("Hi")
    expect(page.locator("#timeline .pill")).to_have_text("error")
    page.get_by_label("Max tokens").fill("3")
    page.keyboard.press("Tab")
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "Again")
    assert len(sent.value.post_data_json["messages"]) == 1  # what failed is not sent again
    expect(page.locator(".assistant footer").last).to_contain_text("3 tokens")


def test_status_shows_the_group_and_says_when_it_is_old(page: Any, stack: Stack) -> None:
    pid = stack.groups_status()["g"]["info"]["pid"]
    status = page.get_by_role("region", name="Live status")
    expect(status).to_contain_text(f"pid {pid}")
    expect(status.get_by_role("meter", name="KV blocks")).to_have_attribute("aria-valuemax", re.compile(r"^[1-9]\d*$"))
    set_max_tokens(page, "8000")
    ask(page, "Something long.")
    expect(page.locator("#running")).to_have_text("1")
    expect(page.locator("#tokens-per-s")).to_have_text(re.compile(r"^[1-9]"))
    page.keyboard.press("Escape")
    expect(page.locator("#running")).to_have_text("0")
    page.route("**/status", lambda route: route.abort())
    expect(page.locator("#connection")).to_have_text("no status")
    expect(status.get_by_role("alert")).to_contain_text("cannot be reached")
    page.unroute("**/status")
    expect(page.locator("#connection")).to_have_text("live")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [320, 768, 1280, 1920])
def test_every_width_and_scheme_fits(page: Any, width: int, scheme: str) -> None:
    page.set_viewport_size({"width": width, "height": 800})
    page.emulate_media(color_scheme=scheme)
    set_max_tokens(page, "300")
    ask(page, "x" * 300)
    expect(page.locator(".assistant footer")).to_contain_text("300 tokens")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    light = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).every((part) => part > 127)")
    assert light == (scheme == "light")


def test_it_is_usable_by_keyboard_and_by_name(page: Any) -> None:
    names = page.evaluate("""() => [...document.querySelectorAll("input, textarea, select, button")].map((field) =>
        [field.id, field.getAttribute("aria-label") || field.labels?.[0]?.textContent || field.textContent])""")
    assert [field for field, name in names if not name.strip()] == []
    expect(page.get_by_label("Message", exact=True)).to_be_focused()
    reached = set()
    for _ in range(20):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id || document.activeElement.tagName"))
    assert {"model", "new-chat", "log", "message", "send", "SUMMARY"} <= reached
    expect(page.get_by_role("log", name="Conversation")).to_have_attribute("aria-live", "polite")
