"""Rows of the list of reported faults that speak of speculation, tried on the real model: H06, H07, H16, H19, H39.

One server guesses ahead, in a KV pool so small that sequences lose their blocks; the other one does neither.
"""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.end_to_end.conftest import Server, run_server
from tests.end_to_end.test_conversation import CHAT, COMPLETIONS, texts
from tests.end_to_end.test_faults import MIXED, copying

pytestmark = [pytest.mark.model, pytest.mark.timeout(240)]

STREAMS = 16
RHYME = "one two three four five six seven eight nine ten. "
TOOL = {
    "type": "function",
    "function": {
        "name": "move",
        "parameters": {
            "type": "object",
            "properties": {"to": {"type": "string", "enum": ["the old harbour at the end of the long pier", "home"]}},
            "required": ["to"],
            "additionalProperties": False,
        },
    },
}
ARGUMENTS = json.dumps({"to": "the old harbour at the end of the long pier"})


@pytest.fixture(scope="module")
def guessing(server: Server) -> Iterator[Server]:
    """32 blocks of 16 tokens."""
    pool = ("--num-kv-blocks", "32", "--max-num-seqs", str(STREAMS), "--max-model-len", "512")
    config = {"method": "ngram", "num_speculative_tokens": 12}
    with run_server(*pool, "--speculative-config", json.dumps(config)) as running:
        yield running


def accepted(answer: Any) -> int:
    """Drafts that became tokens of the answer."""
    return int(answer["usage"].get("completion_tokens_details", {}).get("accepted_prediction_tokens", 0))


def test_h39_preemption_changes_no_token(server: Server, guessing: Server) -> None:
    """Half of the streams are greedy and repeat a rhyme, the others have seeds."""

    def sample(target: Server, index: int) -> list[int]:
        chunks = target.stream(
            COMPLETIONS,
            prompt=f"{index}. " + RHYME * 4,
            temperature=index % 2,
            seed=index,
            max_tokens=24,
            ignore_eos=True,
            return_token_ids=True,
        )
        return [token for chunk in chunks for choice in chunk["choices"] for token in choice.get("token_ids", ())]

    with ThreadPoolExecutor(STREAMS) as pool:
        with guessing.held("engine"):
            asked = [pool.submit(sample, guessing, index) for index in range(STREAMS)]
        pressed = [one.result() for one in asked]
        free = list(pool.map(lambda index: sample(server, index), range(STREAMS)))
    assert [len(tokens) for tokens in pressed] == [24] * STREAMS
    assert pressed == free
    counters = guessing.metrics()
    assert counters["num_preemptions_total"] > 0
    assert counters["spec_decode_num_accepted_tokens_total"] > 30
    guessing.wait_for(guessing.is_idle, 5, "idleness")


def test_h06_h07_mixed_scripts_arrive_whole(guessing: Server) -> None:
    """Several tokens at a time, some of which end in the middle of a character; alone, n=2 and eight at once."""
    body = copying(guessing)
    whole = guessing.post(COMPLETIONS, n=2, **body)
    assert [choice["text"] for choice in whole["choices"]] == [MIXED, MIXED]
    assert accepted(whole) > 10
    with ThreadPoolExecutor(8) as pool:
        streams = list(pool.map(lambda _: guessing.stream(COMPLETIONS, **body), range(8)))
    assert [texts(chunks, "text") for chunks in streams] == [{0: MIXED}] * 8


def test_h06_a_forced_choice_arrives_whole(guessing: Server) -> None:
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": MIXED * 2}],
        "structured_outputs": {"choice": [MIXED + MIXED, "no"]},
        "logit_bias": {str(guessing.post("/tokenize", prompt="no", add_special_tokens=False)["tokens"][0]): -100},
        "temperature": 0,
        "max_tokens": 120,
    }
    whole = guessing.post(CHAT, **body)
    assert whole["choices"][0]["message"]["content"] == MIXED + MIXED
    assert accepted(whole) > 10
    assert texts(guessing.stream(CHAT, **body)) == {0: MIXED + MIXED}


def test_h16_log_probabilities_are_those_without(server: Server, guessing: Server) -> None:
    body: dict[str, Any] = {"prompt": RHYME * 3, "max_tokens": 30, "temperature": 0, "logprobs": 3}
    answers = [target.post(COMPLETIONS, **body) for target in (server, guessing)]
    plain, drafted = (answer["choices"][0]["logprobs"] for answer in answers)
    assert accepted(answers[1]) > 10
    assert drafted["tokens"] == plain["tokens"]
    assert drafted["token_logprobs"] == pytest.approx(plain["token_logprobs"], abs=1e-5)
    assert [*map(list, drafted["top_logprobs"])] == [*map(list, plain["top_logprobs"])]
    assert len(set(drafted["token_logprobs"])) > 10


def test_h19_a_call_that_ends_within_a_step_is_whole(server: Server, guessing: Server) -> None:
    """The call stood in the prompt before, so that its end comes with much of it."""
    call = {"id": "call_1", "type": "function", "function": {"name": "move", "arguments": ARGUMENTS}}
    body: dict[str, Any] = {
        "messages": [
            {"role": "user", "content": "Go to the old harbour."},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": "done"},
            {"role": "user", "content": "Go to the old harbour again."},
        ],
        "tools": [TOOL],
        "tool_choice": "required",
        "temperature": 0,
        "max_tokens": 80,
    }
    plain, whole = (target.post(CHAT, **body) for target in (server, guessing))
    assert accepted(whole) > 5
    [called], [expected] = (answer["choices"][0]["message"]["tool_calls"] for answer in (whole, plain))
    assert called["function"] == expected["function"]
    assert set(json.loads(called["function"]["arguments"])) == {"to"}
    deltas = [choice["delta"] for chunk in guessing.stream(CHAT, **body) for choice in chunk["choices"]]
    parts = [part["function"] for delta in deltas for part in delta.get("tool_calls", ())]
    assert "".join(part["arguments"] for part in parts) == expected["function"]["arguments"]
