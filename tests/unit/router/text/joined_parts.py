from kvasir.router.text.parts import CallArguments, CallEnd, CallStart, Part


def joined(parts: list[Part]) -> list[Part]:
    """Neighbours of a kind as one: what a reader of the whole text sees."""
    result: list[Part] = []
    for part in parts:
        last = result[-1] if result else None
        if isinstance(part, CallArguments) and isinstance(last, CallArguments) and last.index == part.index:
            result[-1] = CallArguments(part.index, last.text + part.text)
        elif type(part) is type(last) and not isinstance(part, CallStart | CallEnd | CallArguments):
            result[-1] = type(part)(last.text + part.text)  # type: ignore[union-attr]
        else:
            result.append(part)
    return result
