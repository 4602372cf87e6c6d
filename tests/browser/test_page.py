"""What a person does on the page, done by a browser."""

import json
import re

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from tests.cluster import Cluster
from tests.waiting import wait_until

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]

ANSWER = "#messages li.assistant"


def say(page: Page, text: str) -> None:
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


def test_a_conversation_streams_and_says_what_it_took(page: Page, cluster: Cluster) -> None:
    page.click("#sampling summary")
    page.fill("#max_tokens", "12")
    page.fill("#temperature", "0")
    say(page, "What is the capital of France?")
    answer = page.locator(ANSWER)
    expect(answer.locator(".text")).to_contain_text("Paris")
    facts = answer.locator(".facts")
    expect(facts).to_contain_text(re.compile(r"TTFT \d+ ms · ITL [\d.]+ ms · [\d.]+ tokens/s · \d+ tokens"))
    expect(facts).to_contain_text(re.compile(r"by 127\.0\.0\.1:\d+ → 127\.0\.0\.1:\d+"))
    expect(page.locator("#send")).to_be_enabled()

    with page.expect_request("**/v1/chat/completions") as asked:
        say(page, "And of Italy?")
    body = asked.value.post_data_json
    assert [message["role"] for message in body["messages"]] == ["user", "assistant", "user"]
    assert (body["max_tokens"], body["temperature"]) == (12, 0)
    expect(page.locator(ANSWER)).to_have_count(2)
    expect(facts.last).to_contain_text("tokens")


@pytest.mark.parametrize("how", ["button", "Escape"])
def test_stop_ends_the_generation_in_the_cluster_too(page: Page, cluster: Cluster, how: str) -> None:
    page.route("**/v1/chat/completions", ask_for_no_end)
    page.click("#sampling summary")
    page.fill("#max_tokens", "2000")
    say(page, "Count from one to one thousand in words.")
    expect(page.locator(f"{ANSWER} .facts")).to_contain_text("tokens")
    if how == "button":
        page.click("#stop")
    else:
        page.keyboard.press("Escape")
    expect(page.locator(f"{ANSWER} .facts")).to_contain_text("stopped")
    expect(page.locator("#stop")).to_be_disabled()
    with_key = {"Authorization": "Bearer the-key"}
    wait_until(lambda: in_flight(page, with_key) == 0, 10, "the request has ended")


def ask_for_no_end(route: Route) -> None:
    """Else the model may have come to its own before anybody can stop it."""
    route.continue_(post_data=json.dumps({**route.request.post_data_json, "ignore_eos": True}))


def in_flight(page: Page, headers: dict[str, str]) -> float:
    text = page.request.get("/metrics" if page.url == "" else page.url.rstrip("/") + "/metrics", headers=headers).text()
    match = re.search(r"^kvasir:router_requests_in_flight\{.*\} (\S+)$", text, re.MULTILINE)
    assert match
    return float(match.group(1))


def test_an_error_is_shown_and_the_chat_goes_on(page: Page) -> None:
    page.click("#sampling summary")
    page.fill("#max_tokens", "100000000")
    say(page, "hello")
    expect(page.locator("#error")).to_contain_text("max_tokens")
    expect(page.locator(ANSWER)).to_have_count(0)
    page.fill("#max_tokens", "3")
    say(page, "hello again")
    expect(page.locator("#error")).to_be_hidden()
    expect(page.locator(f"{ANSWER} .facts")).to_contain_text("cut at max_tokens")


def streamed(*deltas: dict[str, str], end: str = "data: [DONE]\n\n") -> str:
    chunks = ({"id": "x", "choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas)
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + end


def answering(page: Page, body: str) -> None:
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(status=200, content_type="text/event-stream", body=body),
    )


def test_a_new_chat_knows_nothing_of_the_answer_that_it_broke_off(page: Page) -> None:
    page.route("**/v1/chat/completions", ask_for_no_end)
    page.click("#sampling summary")
    page.fill("#max_tokens", "2000")
    say(page, "Count from one to one thousand in words.")
    expect(page.locator(f"{ANSWER} .facts")).to_contain_text("tokens")
    page.click("#clear")
    expect(page.locator("#send")).to_be_enabled()
    with page.expect_request("**/v1/chat/completions") as asked:
        say(page, "hello")
    assert asked.value.post_data_json["messages"] == [{"role": "user", "content": "hello"}]
    page.keyboard.press("Escape")
    expect(page.locator("#send")).to_be_enabled()


def test_thoughts_are_shown_and_are_no_part_of_the_conversation(page: Page) -> None:
    answering(page, streamed({"reasoning_content": "Hm,"}, {"reasoning_content": " so"}, {"content": "Yes."}))
    say(page, "Is it?")
    expect(page.locator(f"{ANSWER} .thoughts div")).to_have_text("Hm, so")
    expect(page.locator(f"{ANSWER} .text")).to_have_text("Yes.")
    with page.expect_request("**/v1/chat/completions") as asked:
        say(page, "Really?")
    assert asked.value.post_data_json["messages"][1] == {"role": "assistant", "content": "Yes."}
    assert page.locator("#messages li.user .thoughts").first.is_hidden()


def test_an_answer_that_does_not_come_to_its_end_says_so(page: Page) -> None:
    answering(page, streamed({"content": "Half of"}, end=""))
    say(page, "Go on.")
    expect(page.locator(f"{ANSWER} .facts")).to_contain_text("the connection was lost")
    expect(page.locator("#send")).to_be_enabled()


@pytest.mark.parametrize("size", [(390, 600), (800, 400)])
def test_all_fields_can_be_reached_on_a_small_screen(page: Page, size: tuple[int, int]) -> None:
    page.set_viewport_size({"width": size[0], "height": size[1]})
    page.click("#sampling summary")
    page.hover("#sampling summary")

    def is_in_sight() -> bool:
        page.mouse.wheel(0, 30)
        box = page.locator("#seed").bounding_box()
        assert box
        middle = [box["x"] + box["width"] / 2, box["y"] + box["height"] / 2]
        return bool(page.evaluate("([x, y]) => document.elementFromPoint(x, y)?.id", middle) == "seed")

    wait_until(is_in_sight, 20, "the last field has been scrolled to")


def test_what_the_model_writes_cannot_run_or_call_anywhere(page: Page) -> None:
    evil = '**bold** <img src="https://elsewhere.example/x.png" onerror="window.hurt=1"><script>window.hurt=1</script>'
    evil += "[link](javascript:window.hurt=1) <style>*{display:none}</style><iframe src='/'></iframe>"

    answering(page, streamed({"content": evil}))
    say(page, "hurt me")
    text = page.locator(f"{ANSWER} .text")
    expect(text.locator("strong")).to_have_text("bold")
    assert text.locator("img, script, style, iframe, [onerror], a[href^=javascript]").count() == 0
    assert page.evaluate("window.hurt") is None


def test_the_cluster_is_drawn_alive(page: Page) -> None:
    expect(page.locator("#nodes article")).to_have_count(2)
    expect(page.locator("#nodes article.prefill .address")).to_contain_text("127.0.0.1:")
    expect(page.locator("#nodes article.decode .kv-text")).to_contain_text("/")
    page.click("#sampling summary")
    page.fill("#max_tokens", "5")
    say(page, "Say something.")
    expect(page.locator(f"{ANSWER} .facts")).to_contain_text("by 127")
    for name in ("#ttft", "#itl"):
        expect(page.locator(f"{name} canvas")).to_be_visible()
    drawn = "document.querySelector('#itl canvas').getContext('2d').getImageData(0,0,300,200).data.some(v => v > 0)"
    assert page.evaluate(drawn)


def test_all_of_it_can_be_done_with_the_keyboard(page: Page) -> None:
    expect(page.locator("#prompt")).to_be_focused()
    reached = set()
    for _ in range(12):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id || document.activeElement.tagName"))
    assert {"send", "clear", "SUMMARY", "model", "theme"} <= reached
    page.focus("#sampling summary")
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    expect(page.locator("#system")).to_be_focused()


@pytest.mark.parametrize(("scheme", "is_dark"), [("dark", True), ("light", False)])
def test_dark_and_light_follow_the_system_and_the_button(page: Page, scheme: str, is_dark: bool) -> None:
    page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]

    def background_is_dark() -> bool:
        colour = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
        return sum(map(int, re.findall(r"\d+", colour)[:3])) < 3 * 128

    assert background_is_dark() == is_dark
    page.click("#theme")
    assert background_is_dark() != is_dark
    page.reload()
    assert background_is_dark() != is_dark


def test_without_the_key_there_is_no_page(browser: Browser, cluster: Cluster) -> None:
    with browser.new_context(http_credentials={"username": "x", "password": "wrong"}) as context:
        response = context.new_page().goto(cluster.url)
        assert response is not None
        assert response.status == 401
