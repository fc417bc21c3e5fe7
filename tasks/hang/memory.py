"""What of a window must survive the process: all but communicators that just progress.

Nothing is lost with those: the next report shows them again, and a freeze that began in between is timed
from there.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from tasks.hang.window import Progressing, Window


def remember(window: Window) -> dict[str, Any]:
    """The window as a document of plain values."""
    kept = {key: s for key, s in window.communicators.items() if not isinstance(s, Progressing)}
    text = msgspec.json.encode(msgspec.structs.replace(window, communicators=kept))
    document: dict[str, Any] = msgspec.json.decode(text)
    return document


def recall(document: Mapping[str, Any], attempt_id: str) -> Window:
    """The remembered window; a new one where it belongs to another attempt or cannot be read."""
    try:
        window = msgspec.convert(document, Window, strict=False)
    except msgspec.ValidationError:
        return Window(attempt_id=attempt_id)
    return window if window.attempt_id == attempt_id else Window(attempt_id=attempt_id)
