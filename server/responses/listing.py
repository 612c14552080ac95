"""Pages of a list of items. Used by the routes of `server/responses`; API process. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from server.errors import BadRequest

DEFAULT_LIMIT = 20
MAX_LIMIT = 100


def listing(items: Sequence[dict[str, Any]], query: Mapping[str, str]) -> dict[str, object]:
    """The page that `order` (desc unless asc), `after` (an id) and `limit` ask for. Raises BadRequest."""
    order, limit, after = query.get("order", "desc"), query.get("limit", str(DEFAULT_LIMIT)), query.get("after")
    if order not in ("asc", "desc"):
        raise BadRequest("order must be asc or desc.", param="order")
    if not (limit.isascii() and limit.isdigit() and len(limit) <= 3 and 1 <= int(limit) <= MAX_LIMIT):
        raise BadRequest(f"limit must be from 1 to {MAX_LIMIT}.", param="limit")
    found = list(items) if order == "asc" else list(reversed(items))
    start = 0
    if after is not None:
        ids = [item["id"] for item in found]
        if after not in ids:
            raise BadRequest("after names no item of this list.", param="after")
        start = ids.index(after) + 1
    page = found[start : start + int(limit)]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": start + len(page) < len(found),
    }
