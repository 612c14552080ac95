"""The flags of `firstlight loadtest`, and the definitions that its help states. Used by `server/cli.py`."""

import argparse
import os
from pathlib import Path

MAX_COUNT = 1_000_000
"""Largest number of requests or tokens that is taken for meant."""
DEFINITIONS = """\
what is measured (times of arrival at the client, in milliseconds; percentiles interpolate):
  TTFT     from just before the request is sent to the first chunk with text; a chunk with only a role does not count
  TPOT     (end to end - TTFT) / (output tokens - 1), one value a request
  ITL      between chunks with text that follow each other, one value a gap; a chunk of several tokens is one chunk
  E2E      from just before the request is sent to the last chunk with text or a finish reason
  tokens   as the server's usage counts them; without usage, one a chunk, and the table says so
  req/s    requests that succeeded / (first start to last end of the level); tokens/s likewise
  goodput  requests a second that met every objective of --goodput; failed ones met none

examples:
  firstlight loadtest --concurrency 1,4,16,64 --input-tokens 128 --output-tokens 64 --ignore-eos
  firstlight loadtest --request-rate 2,8 --lengths lognormal --goodput ttft:2000,tpot:50 --report curves.html
  firstlight loadtest --compare ours=http://127.0.0.1:8000 theirs=http://127.0.0.1:8001 --output runs.json
"""


def count(text: str) -> int:
    """A whole number of at least one, for argparse."""
    if not 1 <= (value := int(text)) <= MAX_COUNT:
        raise argparse.ArgumentTypeError(f"{text} is not between 1 and {MAX_COUNT}")
    return value


def _none_or_more(text: str) -> int:
    if not 0 <= (value := int(text)) <= MAX_COUNT:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and {MAX_COUNT}")
    return value


def _positive(text: str) -> float:
    if not 0 < (value := float(text)) < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return value


def _none_or_longer(text: str) -> float:
    if not 0 <= (value := float(text)) < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number of at least 0")
    return value


def _spread(text: str) -> float:
    if not 0 <= (value := float(text)) <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")
    return value


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the command."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = DEFINITIONS
    _add_servers(parser.add_argument_group("servers"))
    _add_load(parser.add_argument_group("load"))
    _add_workload(parser.add_argument_group("workload"))
    results = parser.add_argument_group("results")
    results.add_argument("--goodput", metavar="LIMITS", help="objectives in ms, e.g. ttft:2000,tpot:50 (also e2e)")
    results.add_argument("--output", type=Path, metavar="FILE", help="write figures, conditions and requests as JSON")
    results.add_argument(
        "--report",
        type=Path,
        metavar="FILE",
        help="draw curves over the levels to FILE.html or FILE.png (extra: loadtest)",
    )


def _add_servers(group: "argparse._ArgumentGroup") -> None:
    group.add_argument("--url", help="address of the server (default: http://127.0.0.1:8000)")
    group.add_argument("--compare", nargs="+", metavar="NAME=URL", help="several servers, in turn at each level")
    group.add_argument("--model", help="model to name in requests (default: the first that the server lists)")
    group.add_argument("--api", choices=("chat", "completions"), default="chat", help="route to use (default: chat)")
    group.add_argument("--api-key", default=os.environ.get("FIRSTLIGHT_API_KEY"), help="key of the server, if any")
    group.add_argument(
        "--server-pid", type=int, metavar="PID", help="process whose CPU is the server's (default: found when local)"
    )
    group.add_argument(
        "--timeout", type=_positive, default=600.0, metavar="SECONDS", help="longest wait for one answer (default: 600)"
    )
    group.add_argument("--extra-body", metavar="JSON", help="more fields for each request, e.g. '{\"temperature\": 1}'")


def _add_load(group: "argparse._ArgumentGroup") -> None:
    group.add_argument("--concurrency", metavar="N,…", help="closed loop: streams at a time (default: 1,4,16)")
    group.add_argument(
        "--ramp",
        type=_none_or_longer,
        default=0.0,
        metavar="SECONDS",
        help="in which the streams of a closed loop start, one after the other (default: 0, all at once)",
    )
    group.add_argument("--request-rate", metavar="R,…", help="open loop: requests a second")
    group.add_argument(
        "--arrival",
        choices=("poisson", "constant", "burst"),
        default="poisson",
        help="how the requests of an open loop arrive (default: poisson)",
    )
    group.add_argument("--burst-size", type=count, default=8, metavar="N", help="requests in a burst (default: 8)")
    group.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="replay JSON lines: offset (seconds), output_tokens, and input_tokens or messages",
    )
    group.add_argument(
        "--requests",
        type=count,
        metavar="N",
        help="requests (chat: conversations) a level (default: 4 a stream or 30 s of arrivals, at least 16)",
    )
    group.add_argument(
        "--warmup", type=_none_or_more, default=4, metavar="N", help="requests first that do not count (default: 4)"
    )


def _add_workload(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "--workload",
        choices=("text", "prefix", "chat", "images"),
        default="text",
        help="text: nothing shared; prefix: long shared system prompts; chat: several turns; images (default: text)",
    )
    group.add_argument(
        "--lengths",
        choices=("fixed", "uniform", "normal", "lognormal"),
        default="fixed",
        help="how input and output tokens are distributed (default: fixed)",
    )
    group.add_argument(
        "--input-tokens", type=count, default=128, metavar="N", help="mean, template included (default: 128)"
    )
    group.add_argument("--output-tokens", type=count, default=64, metavar="N", help="mean (default: 64)")
    group.add_argument("--spread", type=_spread, default=0.5, metavar="X", help="relative width (default: 0.5)")
    group.add_argument("--ignore-eos", action="store_true", help="ask for answers of full length (vLLM's field)")
    group.add_argument("--prefix-tokens", type=count, default=512, metavar="N", help="shared tokens (default: 512)")
    group.add_argument("--prefix-groups", type=count, default=4, metavar="N", help="different prefixes (default: 4)")
    group.add_argument("--turns", type=count, default=4, metavar="N", help="turns of a chat (default: 4)")
    group.add_argument("--images", type=count, default=1, metavar="N", help="images a request (default: 1)")
    group.add_argument("--image-size", default="512x512", metavar="WxH,…", help="sizes in turn (default: 512x512)")
    group.add_argument("--image-format", choices=("png", "jpeg"), default="jpeg", help="file type (default: jpeg)")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="same seed, same requests (default: 0)")
