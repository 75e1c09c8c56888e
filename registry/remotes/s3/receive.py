"""Receiving an answer's bytes where they are to lie: no copy of them is made on the way.

The library reads into memory of its own first and copies from there; of an answer that is nothing but its bytes, the
standard library's response below it receives into ours. What breaks it is told as the library would have told it.
"""

import http.client
from typing import Any

from botocore.exceptions import ReadTimeoutError, ResponseStreamingError


def receive(body: Any, window: memoryview) -> int:
    """Fill a buffer from the body of an answer and return how much came, less only where the answer ends.

    A connection whose answer was read to its end goes back to the pool. Raises what reading the body raises.
    """
    upper: Any = getattr(body, "_raw_stream", None)
    answer: Any = getattr(upper, "_fp", None)
    plain = isinstance(answer, http.client.HTTPResponse) and not upper.headers.get("content-encoding")
    have = 0
    while have < len(window):
        count = _directly(answer, window[have:]) if plain else body.readinto(window[have:])
        if not count:
            break
        have += count
    if plain and answer.isclosed():
        upper.release_conn()
    return have


def _directly(answer: http.client.HTTPResponse, window: memoryview) -> int:
    try:
        return answer.readinto(window)
    except TimeoutError as error:
        raise ReadTimeoutError(endpoint_url="", error=error) from error
    except (http.client.HTTPException, OSError) as error:
        raise ResponseStreamingError(error=error) from error
