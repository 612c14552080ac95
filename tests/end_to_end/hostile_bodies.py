"""Request bodies with one mistake each, and the field that the answer must name."""

import json
from collections.abc import Callable

Body = Callable[[str], bytes]
"""Made for the name of the model."""
DEEP = 10_000


def _raw(text: str) -> Body:
    """A body in which MODEL stands for the model's name."""
    return lambda model: text.replace("MODEL", json.dumps(model)).encode("utf-8", "surrogateescape")


def _completion(**fields: object) -> Body:
    return lambda model: json.dumps({"model": model, "prompt": "hi", "max_tokens": 1, **fields}).encode()


def _chat(**fields: object) -> Body:
    hello = [{"role": "user", "content": "hi"}]
    return lambda model: json.dumps({"model": model, "messages": hello, "max_tokens": 1, **fields}).encode()


def _says(content: object, **fields: object) -> Body:
    return _chat(messages=[{"role": "user", "content": content, **fields}])


def _embedding(**fields: object) -> Body:
    return lambda model: json.dumps({"model": model, "input": "hi", **fields}).encode()


NESTED = "[" * DEEP + "]" * DEEP
MALFORMED = {
    "nothing": (_raw(""), None),
    "half": (_raw('{"model": MODEL, "prompt":'), None),
    "a list": (_raw("[]"), None),
    "null": (_raw("null"), None),
    "not UTF-8": (_raw('{"model": MODEL, "prompt": "\udcff\udcfe"}'), None),
    "UTF-16": (lambda model: json.dumps({"model": model}).encode("utf-16"), None),
    "a byte order mark": (_raw('\ufeff{"model": MODEL, "prompt": "x"}'), None),
    "NaN": (_raw('{"model": MODEL, "prompt": "x", "temperature": NaN}'), "temperature"),
    "Infinity": (_raw('{"model": MODEL, "prompt": "x", "top_p": -Infinity}'), "top_p"),
    "NaN deep inside": (_raw('{"model": MODEL, "prompt": "x", "metadata": {"a": [NaN]}}'), "metadata"),
    "1e999": (_raw('{"model": MODEL, "prompt": "x", "temperature": 1e999}'), "temperature"),
    "400 digits": (_raw('{"model": MODEL, "prompt": "x", "seed": ' + "9" * 400 + "}"), "seed"),
    "5000 digits": (_raw('{"model": MODEL, "prompt": "x", "seed": ' + "9" * 5000 + "}"), None),
    "nested lists": (_raw('{"model": MODEL, "prompt": ' + NESTED + "}"), None),
    "nested objects": (_raw('{"model": MODEL, "prompt": ' + '{"a":' * DEEP + "1" + "}" * DEEP + "}"), None),
    "nested lists, not too deep to read": (_raw('{"model": MODEL, "prompt": ' + "[" * 500 + "]" * 500 + "}"), "prompt"),
    "twice a key": (_raw('{"model": MODEL, "prompt": "x", "prompt": "y"}'), "prompt"),
    "a lone surrogate": (_raw('{"model": MODEL, "prompt": "\\ud83d"}'), "prompt"),
    "a lone surrogate as a key": (_raw('{"model": MODEL, "prompt": "x", "\\udc00": 1}'), "?"),
}
COMPLETIONS = {
    "no model": (_completion(model=None), "model"),
    "no prompt": (_completion(prompt=None), "prompt"),
    "empty prompt": (_completion(prompt=""), "prompt"),
    "empty list": (_completion(prompt=[]), "prompt"),
    "empty lists": (_completion(prompt=[[]]), "prompt"),
    "one empty of two": (_completion(prompt=["a", ""]), "prompt"),
    "mixed prompts": (_completion(prompt=["a", 1]), "prompt"),
    "booleans for ids": (_completion(prompt=[True]), "prompt"),
    "an object": (_completion(prompt={}), "prompt"),
    "id out of vocabulary": (_completion(prompt=[49152]), "prompt"),
    "negative id": (_completion(prompt=[-1]), "prompt"),
    "huge id": (_completion(prompt=[10**30]), "prompt"),
    "too long": (_completion(prompt="word " * 10_000), "prompt"),
    "too many ids": (_completion(prompt=[1] * 8192), "prompt"),
    "too many prompts": (_completion(prompt=["a"] * 129), "prompt"),
    "a million prompts": (_completion(prompt=["a"] * 1_000_000), "prompt"),
    "too large n": (_completion(n=2**31 - 1), "n"),
    "10 000 stop strings": (_completion(stop=["x"] * 10_000), "stop"),
    "empty stop": (_completion(stop=[""]), "stop[0]"),
    "nested stop": (_completion(stop=[["x"]]), "stop[0]"),
    "long stop": (_completion(stop=["x" * 100_000]), "stop[0]"),
    "negative max_tokens": (_completion(max_tokens=-1), "max_tokens"),
    "max_tokens as a float": (_completion(max_tokens=1.5), "max_tokens"),
    "max_tokens as text": (_completion(max_tokens="1"), "max_tokens"),
    "min over max": (_completion(min_tokens=2), "min_tokens"),
    "hot": (_completion(temperature=2.1), "temperature"),
    "cold": (_completion(temperature=-0.1), "temperature"),
    "top_p of nothing": (_completion(top_p=0), "top_p"),
    "tiny repetition_penalty": (_completion(repetition_penalty=5e-324), "repetition_penalty"),
    "bias out of vocabulary": (_completion(logit_bias={"49152": 1}), "logit_bias"),
    "bias by word": (_completion(logit_bias={"word": 1}), "logit_bias"),
    "bias too strong": (_completion(logit_bias={"1": 101}), "logit_bias"),
    "bias of everything": (_completion(logit_bias={str(n): 1 for n in range(49_152)}), "logit_bias"),
    "stop id out of vocabulary": (_completion(stop_token_ids=[49152]), "stop_token_ids"),
    "blank bad word": (_completion(bad_words=[" "]), "bad_words"),
    "logprobs as a flag": (_completion(logprobs=True), "logprobs"),
    "six logprobs": (_completion(logprobs=6), "logprobs"),
    "stream as text": (_completion(stream="true"), "stream"),
    "stream_options alone": (_completion(stream_options={"include_usage": True}), "stream_options"),
    "unknown stream option": (_completion(stream=True, stream_options={"x": 1}), "stream_options.x"),
    "strange request id": (_completion(request_id="a\r\nb"), "request_id"),
    "empty salt": (_completion(cache_salt=""), "cache_salt"),
    "best_of": (_completion(best_of=2), "best_of"),
    "suffix": (_completion(suffix="x"), "suffix"),
}
EMBEDDINGS = {
    "no input": (_embedding(input=None), "input"),
    "an empty input": (_embedding(input=""), "input"),
    "one empty of two": (_embedding(input=["a", ""]), "input"),
    "mixed inputs": (_embedding(input=["a", 1]), "input"),
    "an object": (_embedding(input={}), "input"),
    "id out of vocabulary": (_embedding(input=[49152]), "input"),
    "too long": (_embedding(input="word " * 10_000), "input"),
    "too many ids": (_embedding(input=[[1], [1] * 8193]), "input"),
    "too many inputs": (_embedding(input=["a"] * 129), "input"),
    "a million inputs": (_embedding(input=["a"] * 1_000_000), "input"),
    "an unknown format": (_embedding(encoding_format="uint8"), "encoding_format"),
    "fewer dimensions": (_embedding(dimensions=8), "dimensions"),
    "more dimensions": (_embedding(dimensions=577), "dimensions"),
    "no dimensions": (_embedding(dimensions=0), "dimensions"),
}
CHATS = {
    "no messages": (_chat(messages=[]), "messages"),
    "text for messages": (_chat(messages="hi"), "messages"),
    "text for a message": (_chat(messages=["hi"]), "messages[0]"),
    "unknown role": (_chat(messages=[{"role": "robot", "content": "x"}]), "messages[0].role"),
    "no content": (_says(None), "messages[0]"),
    "a number": (_says(5), "messages[0].content"),
    "text for a part": (_says(["x"]), "messages[0].content[0]"),
    "a part without text": (_says([{"type": "text"}]), "messages[0].content[0]"),
    "an image without a URL": (_says([{"type": "image_url"}]), "messages[0].content[0]"),
    "an image with an empty URL": (_says([{"type": "image_url", "image_url": ""}]), "messages[0].content[0].image_url"),
    "an image with a number": (_says([{"type": "image_url", "image_url": 5}]), "messages[0].content[0].image_url"),
    "an image of nowhere": (
        _says([{"type": "image_url", "image_url": {"url": None}}]),
        "messages[0].content[0].image_url.url",
    ),
    "an image in no detail": (
        _says([{"type": "image_url", "image_url": {"url": "data:,", "detail": "none"}}]),
        "messages[0].content[0].image_url.detail",
    ),
    "an image": (_says([{"type": "image_url", "image_url": {"url": "data:,"}}]), "messages"),
    "a tool's answer to nothing": (_chat(messages=[{"role": "tool", "content": "x"}]), "messages[0]"),
    "too long": (_says("word " * 10_000), "messages"),
    "max_tokens 0": (_chat(max_tokens=0), "max_tokens"),
    "top_logprobs alone": (_chat(top_logprobs=1), "top_logprobs"),
    "21 top_logprobs": (_chat(logprobs=True, top_logprobs=21), "top_logprobs"),
    "logprobs as a number": (_chat(logprobs=1), "logprobs"),
    "a grammar": (_chat(guided_json={}), "guided_json"),
    "a response format": (_chat(response_format={"type": "sound"}), "response_format.type"),
}
TABLE = [
    *(("/v1/completions", name, *row) for name, row in (MALFORMED | COMPLETIONS).items()),
    *(("/v1/embeddings", name, *row) for name, row in EMBEDDINGS.items()),
    *(("/v1/chat/completions", name, *row) for name, row in CHATS.items()),
]
