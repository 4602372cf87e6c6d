from kvasir.router.config import RouterConfig
from kvasir.router.workers.parent import share_of


def test_limits_of_the_whole_are_divided_and_no_share_is_nothing() -> None:
    config = RouterConfig(
        workers=3,
        max_num_queued_reqs=10,
        max_num_queued_tokens=1,
        max_resumable_streams=0,
        max_resumable_streams_per_key=4,
        grammar_workers=2,
        prefill=["127.0.0.1:1"],
        requests_per_minute=60,
    )
    share = share_of(config)
    assert (share.max_num_queued_reqs, share.max_num_queued_tokens) == (4, 1)
    assert (share.max_resumable_streams, share.grammar_workers) == (0, 1)
    assert share.max_resumable_streams_per_key == 2
    assert share.prefill == []
    assert share.requests_per_minute == 60, "kept by the parent, for all"
    assert RouterConfig(**share.model_dump(mode="json")) == share


def test_one_of_several_keys_has_half_of_the_resumable_streams() -> None:
    assert RouterConfig().max_resumable_streams_of_one is None
    assert RouterConfig(api_key=["a", "b"], max_resumable_streams=5).max_resumable_streams_of_one == 3
    config = RouterConfig(api_key=["a", "b"], max_resumable_streams_per_key=0)
    assert config.max_resumable_streams_of_one == 0
