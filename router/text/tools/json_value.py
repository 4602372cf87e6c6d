"""Where a JSON value ends, while its text still comes."""


class JsonValue:
    """Looks at strings and brackets alone. What is between them is the reader's business."""

    def __init__(self) -> None:
        self.is_complete = False
        self._depth = 0
        self._in_string = False
        self._is_escaped = False

    def take(self, text: str, start: int = 0) -> int:
        """Where in `text` the value ends, if it does; else the length of `text`.

        The value begins at `start`, or began in an earlier piece. A number or a word ends before what follows it.
        """
        for position in range(start, len(text)):
            char = text[position]
            if self._in_string:
                if self._ends_string(char) and self._depth == 0:
                    return self._end(position + 1)
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                if self._depth <= 1:
                    return self._end(position + self._depth)
                self._depth -= 1
            elif self._depth == 0 and (char == "," or char.isspace()):
                return self._end(position)
        return len(text)

    def _ends_string(self, char: str) -> bool:
        if self._is_escaped:
            self._is_escaped = False
        elif char == "\\":
            self._is_escaped = True
        elif char == '"':
            self._in_string = False
            return True
        return False

    def _end(self, position: int) -> int:
        self.is_complete = True
        return position
