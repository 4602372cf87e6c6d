"""Server-sent events, the reading side."""


class EventReader:
    """Takes bytes as they come, cut anywhere, and gives the data of each event that is complete."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[str] = []

    def feed(self, chunk: bytes) -> list[str]:
        """Comments and fields other than `data` are skipped."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        events: list[str] = []
        for line in lines:
            text = line.rstrip(b"\r").decode()
            if text.startswith("data:"):
                self._data.append(text.removeprefix("data:").removeprefix(" "))
            elif not text and self._data:
                events.append("\n".join(self._data))
                self._data.clear()
        return events
