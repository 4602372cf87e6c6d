"""What is noted of a resumable stream before its first token, and what it is gone on with in another process."""

from collections.abc import Sequence

from kvasir.common.tokens import pack_tokens, unpack_tokens
from kvasir.proto import workers_pb2 as pb
from kvasir.router.openai.tape import Asked, StreamLog, StreamOrigin, TakenStream, deltas_of
from kvasir.router.types import RoutedRequest


def head_of(origin: StreamOrigin, requests: Sequence[RoutedRequest], grace_s: float) -> pb.StreamHead:
    """`requests`: one a prompt."""
    first, *further = map(_prompt, requests)
    return pb.StreamHead(
        endpoint=origin.endpoint,
        body=origin.body,
        created=origin.created,
        timeout_s=origin.timeout_s,
        grace_s=grace_s,
        seed=first.seed,
        max_tokens=first.max_tokens,
        prompt_token_ids=first.prompt_token_ids,
        further_prompts=further,
    )


def origin_of(response_id: str, head: pb.StreamHead) -> StreamOrigin:
    return StreamOrigin(
        response_id=response_id,
        created=head.created,
        endpoint=head.endpoint,
        body=head.body,
        timeout_s=head.timeout_s if head.HasField("timeout_s") else None,
    )


def taken_stream(
    origin: StreamOrigin, head: pb.StreamHead, lines: bytes, log: StreamLog, last_event: int
) -> TakenStream:
    """ValueError or TypeError for lines that another version of this has written."""
    prompts: list[pb.StreamHead | pb.StreamPrompt] = [head, *head.further_prompts]
    return TakenStream(
        origin=origin,
        asked=[_asked(one) for one in prompts],
        deltas=deltas_of(lines),
        log=log,
        last_event=last_event,
    )


def _prompt(request: RoutedRequest) -> pb.StreamPrompt:
    sampling, token_ids = request.sampling, pack_tokens(request.prompt_token_ids)
    return pb.StreamPrompt(seed=sampling.seed, max_tokens=sampling.max_tokens, prompt_token_ids=token_ids)


def _asked(one: pb.StreamHead | pb.StreamPrompt) -> Asked:
    return Asked(one.seed, one.max_tokens, tuple(unpack_tokens(one.prompt_token_ids)))
