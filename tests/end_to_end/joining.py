"""Streams of each API put together again, and whole answers brought into the same form: they must be equal.

What may differ is left out: ids, times, and how many tokens came from a cache.
"""

import json
from typing import Any

Document = dict[str, Any]
Events = list[Document]


def _openai(choices: list[Document], usage: Document) -> Document:
    return {"choices": sorted(choices, key=lambda choice: choice["index"]), "usage": usage["completion_tokens"]}


def whole(path: str, document: Document) -> Document:
    """A plain answer."""
    if path == "/v1/chat/completions":
        return _openai([_chat_choice(choice) for choice in document["choices"]], document["usage"])
    if path == "/v1/completions":
        return _openai([_completion_choice(choice) for choice in document["choices"]], document["usage"])
    if path == "/v1/responses":
        return _response(document)
    return _message(document["content"], document)


def joined(path: str, events: Events) -> Document:
    """A stream without its [DONE]; OpenAI's chunks end with usage."""
    if path == "/v1/chat/completions":
        return _openai(_joined_choices(events, _add_chat), events[-1]["usage"])
    if path == "/v1/completions":
        return _openai(_joined_choices(events, _add_completion), events[-1]["usage"])
    if path == "/v1/responses":
        return _joined_response(events)
    return _joined_message(events)


def _chat_choice(choice: Document) -> Document:
    message = choice["message"]
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return {
        "index": choice["index"],
        "text": message["content"] or "",
        "reasoning": message.get("reasoning_content", ""),
        "calls": [(call["name"], call["arguments"]) for call in calls],
        "tokens": (choice["logprobs"] or {"content": None})["content"] or None,
        "ids": choice.get("token_ids"),
        "end": (choice["finish_reason"], choice["stop_reason"]),
    }


def _completion_choice(choice: Document) -> Document:
    return {
        "index": choice["index"],
        "text": choice["text"],
        "tokens": choice["logprobs"] if choice["logprobs"] and choice["logprobs"]["tokens"] else None,
        "ids": choice.get("token_ids"),
        "end": (choice["finish_reason"], choice["stop_reason"]),
    }


def _joined_choices(events: Events, add: Any) -> list[Document]:
    found: dict[int, Document] = {}
    for event in events:
        for choice in event["choices"]:
            joint = found.setdefault(
                choice["index"], {"index": choice["index"], "text": "", "tokens": None, "ids": None}
            )
            assert "end" not in joint, "nothing comes after the end"
            add(joint, choice)
            if choice.get("token_ids") is not None:
                joint["ids"] = (joint["ids"] or []) + choice["token_ids"]
            if choice["finish_reason"] is not None:
                joint["end"] = (choice["finish_reason"], choice["stop_reason"])
    return list(found.values())


def _add_chat(joint: Document, choice: Document) -> None:
    joint.setdefault("reasoning", "")
    calls = joint.setdefault("calls", [])
    delta = choice["delta"]
    joint["text"] += delta.get("content") or ""
    joint["reasoning"] += delta.get("reasoning_content") or ""
    for part in delta.get("tool_calls", ()):
        function = part["function"]
        if "id" in part:
            calls.append((function["name"], ""))
        name, arguments = calls[part["index"]]
        calls[part["index"]] = (name, arguments + function["arguments"])
    if choice["logprobs"]:
        joint["tokens"] = (joint["tokens"] or []) + choice["logprobs"]["content"]


def _add_completion(joint: Document, choice: Document) -> None:
    joint["text"] += choice["text"]
    if choice["logprobs"]:
        joint["tokens"] = joint["tokens"] or {name: [] for name in choice["logprobs"]}
        for name, values in choice["logprobs"].items():
            joint["tokens"][name] += values


def _response(document: Document) -> Document:
    output = []
    for item in document["output"]:
        parts = [(part["type"], part["text"], part.get("logprobs")) for part in item.get("content", ())]
        output.append((item["type"], item.get("name"), item.get("arguments"), parts, item["status"]))
    return {"status": document["status"], "output": output, "usage": document["usage"]["output_tokens"]}


def _joined_response(events: Events) -> Document:
    """What the last event holds, whose texts must be those of the deltas."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    last = events[-1]["response"]
    for index, item in enumerate(last["output"]):
        own = [event for event in events if event.get("output_index") == index]
        text = "".join(event["delta"] for event in own if event["type"].endswith(".delta"))
        assert text == (item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])
    return _response(last)


def _message(content: list[Document], end: Document) -> Document:
    blocks = [{key: value for key, value in block.items() if key != "id"} for block in content]
    ends = (end["stop_reason"], end["stop_sequence"], end["usage"]["output_tokens"])
    return {"content": blocks, "end": ends}


def _joined_message(events: Events) -> Document:
    blocks: list[Document] = []
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append(event["content_block"])
        elif event["type"] == "content_block_delta":
            delta = {key: value for key, value in event["delta"].items() if key != "type"}
            for key, value in delta.items():
                blocks[-1][key] = blocks[-1].get(key, "") + value
    for block in blocks:
        if "partial_json" in block:
            block["input"] = _object(block.pop("partial_json"))
    end = events[-2]
    return _message(blocks, end["delta"] | {"usage": end["usage"]})


def _object(text: str) -> Document:
    try:
        return dict(json.loads(text))
    except ValueError:
        return {}
