"""Responses that are kept: conversations that go on, pages of items, work in the background, ends, owners, limits."""

import asyncio
import json
from typing import Any

from tests.server.exchange import Exchange, call, run
from tests.server.fakes import MODEL, FakeEngine, breaks, make_app, says
from tests.server.responses_case import PATH, events_of, get, prompt_of, respond


def test_a_conversation_goes_on() -> None:
    engine = FakeEngine(script=says("one"))
    app = make_app(engine)
    first = respond(app, input="hi", instructions="A").json["id"]
    engine.script = says("two")
    second = respond(app, input="and", previous_response_id=first, instructions="B").json
    assert prompt_of(engine).replace("<|im_start|>", "").replace("<|im_end|>\n", "|") == (
        "system\nB|user\nhi|assistant\none|user\nand|assistant\n"
    )
    items = get(app, f"{second['id']}/input_items").json
    shown = [part["text"] for item in reversed(items["data"]) for part in item["content"]]
    assert (shown, items["has_more"]) == (["hi", "one", "and"], False)
    count = run(call(app, "POST", PATH + "/input_tokens", {"model": MODEL, "previous_response_id": second["id"]})).json
    third = respond(app, input=None, previous_response_id=second["id"]).json
    assert count == {"object": "response.input_tokens", "input_tokens": third["usage"]["input_tokens"]}
    lost = respond(app, previous_response_id="resp_x")
    assert (lost.status, lost.error["param"]) == (404, "previous_response_id")
    wrong = respond(app, input=[{"type": "x"}], previous_response_id=second["id"])
    assert "input[0]" in wrong.error["message"]


def test_items_are_listed_in_pages() -> None:
    app = make_app(FakeEngine())
    items = [{"role": "user", "content": str(number)} for number in range(5)]
    response_id = respond(app, input=items).json["id"]

    def page(query: str) -> tuple[list[str], bool, dict[str, Any]]:
        exchange = Exchange(app, "GET", f"{PATH}/{response_id}/input_items")
        exchange.scope["query_string"] = query.encode()
        exchange.give(b"")
        found = run(exchange.run()).json
        return [item["content"][0]["text"] for item in found.get("data", [])], found.get("has_more"), found

    texts, more, first = page("limit=2&order=asc")
    assert (texts, more, first["last_id"]) == (["0", "1"], True, first["data"][1]["id"])
    assert page(f"limit=2&order=asc&after={first['last_id']}")[:2] == (["2", "3"], True)
    assert page("limit=100")[:2] == (["4", "3", "2", "1", "0"], False)
    for query in ("limit=0", "limit=101", "limit=x", "order=up", "after=x"):
        assert page(query)[2]["error"]["param"] == query.split("=")[0]


def test_the_oldest_turns_make_room() -> None:
    engine = FakeEngine()
    app = make_app(engine)
    turns = [{"role": "user", "content": f"{number}" * 100} for number in range(9)]
    items = [{"role": "system", "content": "s"}, *turns]
    assert respond(app, input=items, truncation="disabled").error["code"] == "context_length_exceeded"
    assert respond(app, input=items, truncation="auto").status == 200
    prompt = prompt_of(engine)
    assert prompt.startswith("<|im_start|>system\ns<|im_end|>\n<|im_start|>user\n5")
    assert all(f"{number}" * 100 in prompt for number in (5, 6, 7, 8))
    assert respond(app, input="x" * 600, truncation="auto").error["code"] == "context_length_exceeded"


def test_a_response_in_the_background() -> None:
    async def work() -> None:
        engine = FakeEngine(script=says("hello world"), delay=0.002)
        app = make_app(engine)
        begun = (await call(app, "POST", PATH, {"model": MODEL, "input": "hi", "background": True})).json
        assert (begun["status"], begun["output"]) == ("queued", [])
        again = await call(app, "POST", PATH, {"model": MODEL, "input": "x", "previous_response_id": begun["id"]})
        assert (again.status, again.error["param"]) == (400, "previous_response_id")
        for _ in range(500):
            found = (await call(app, "GET", f"{PATH}/{begun['id']}")).json
            if found["status"] == "completed":
                break
            assert found["status"] in ("queued", "in_progress")
            await asyncio.sleep(0.005)
        assert found["output"][0]["content"][0]["text"] == "hello world"
        cancelled = await call(app, "POST", f"{PATH}/{begun['id']}/cancel")
        assert (cancelled.json["status"], engine.cancelled) == ("completed", 0)

    run(work())


def test_what_is_made_in_the_background_can_be_cancelled() -> None:
    async def work() -> None:
        engine = FakeEngine(script=says("hello world"), hold_after=3)
        app = make_app(engine)
        for delivered in (0, 3):
            body = {"model": MODEL, "input": "hi", "background": True}
            response_id = (await call(app, "POST", PATH, body)).json["id"]
            while engine.streams[-1].delivered < delivered:
                await asyncio.sleep(0.001)
            assert (await call(app, "DELETE", f"{PATH}/{response_id}")).status == 400
            assert (await call(app, "POST", f"{PATH}/{response_id}/cancel")).json["status"] == "cancelled"
            assert (await call(app, "GET", f"{PATH}/{response_id}")).json["status"] == "cancelled"
            assert (engine.live, engine.reserved) == (0, 0)
        assert engine.cancelled == 2
        synchronous = (await call(make_app(FakeEngine()), "POST", PATH, {"model": MODEL, "input": "hi"})).json["id"]
        assert (await call(app, "POST", f"{PATH}/{synchronous}/cancel")).status == 404

    run(work())


def test_only_background_responses_can_be_cancelled() -> None:
    app = make_app(FakeEngine())
    answer = run(call(app, "POST", f"{PATH}/{respond(app).json['id']}/cancel"))
    assert answer.status == 400


def test_a_failure_in_mid_stream_is_told_and_kept() -> None:
    app = make_app(FakeEngine(script=breaks("hello world")))
    events = events_of(respond(app, stream=True))
    last = events[-1]
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"] == {"code": "server_error", "message": "broken"}
    assert get(app, last["response"]["id"]).json["status"] == "failed"
    whole = respond(app)
    assert (whole.status, whole.error["message"]) == (500, "broken")


def test_a_client_that_leaves_cancels_its_response() -> None:
    async def work() -> None:
        engine = FakeEngine(script=says("hello world"), hold_after=3)
        app = make_app(engine)
        exchange = Exchange(app, "POST", PATH)
        exchange.header("content-type", "application/json")
        exchange.give(json.dumps({"model": MODEL, "input": "hi", "stream": True}).encode())
        running = asyncio.ensure_future(exchange.run())
        while b"output_text.delta" not in exchange.answer.body:
            await asyncio.sleep(0.001)
        response_id = json.loads(exchange.answer.body.split(b"\n")[1][6:])["response"]["id"]
        assert (await call(app, "GET", f"{PATH}/{response_id}")).json["status"] == "in_progress"
        exchange.leave()
        await running
        assert (await call(app, "GET", f"{PATH}/{response_id}")).json["status"] == "cancelled"
        assert engine.live == 0

    run(work())


def test_responses_belong_to_their_key() -> None:
    app = make_app(FakeEngine(), api_key=("ann", "bob"))
    ann, bob = ({"authorization": f"Bearer {name}"} for name in ("ann", "bob"))
    response_id = respond(app, ann).json["id"]
    assert get(app, response_id, ann).status == 200
    for answer in (
        get(app, response_id, bob),
        respond(app, bob, previous_response_id=response_id),
        run(call(app, "DELETE", f"{PATH}/{response_id}", headers=bob)),
        run(call(app, "POST", f"{PATH}/{response_id}/cancel", headers=bob)),
        get(app, f"{response_id}/input_items", bob),
    ):
        assert (answer.status, answer.error["code"]) == (404, "response_not_found")
    assert run(call(app, "DELETE", f"{PATH}/{response_id}", headers=ann)).json["deleted"] is True
    assert get(app, response_id, ann).status == 404


def test_responses_are_kept_only_where_that_is_wanted() -> None:
    app = make_app(FakeEngine(), max_stored_response_bytes=4096)
    assert get(app, respond(app, store=False).json["id"]).status == 404
    large = {"input": "x" * 400, "instructions": "y"}
    padded = [{"role": "user", "content": "x", "note": "z" * 4096}]
    assert respond(app, **large).status == 200
    refused = respond(app, input=padded)
    assert (refused.status, refused.error["param"]) == (400, "store")
    assert respond(app, input=padded, store=False).status == 200
