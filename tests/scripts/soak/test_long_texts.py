"""Health is answered beside long texts, and each of these is answered or refused for good."""

from outrider.runtime.core.config import ServerConfig
from outrider.runtime.serving.tokenizer import TokenizersCodec

from scripts.soak.long_texts import check_health, text_of
from tests.conftest import write_tokenizer

KIB = 1 << 10


async def test_every_text_ends_and_health_is_answered_meanwhile(start, tmp_path):
    write_tokenizer(tmp_path)
    codec = TokenizersCodec(tmp_path / "tokenizer.json")
    # Room for some of them at a time: the others are told to come back.
    config = ServerConfig(
        lb_delay_s=0.0, drain_timeout_s=0.0, max_queued_tokens=100 * KIB, retry_after_s=0.01
    )
    texts = [text_of(16 * KIB)] * 16 + [text_of(256 * KIB)] * 4
    async with start(codec=codec, config=config) as run:
        seconds, ends = await check_health(run.address, texts)
    # The model of these tests has fewer tokens than the tokenizer.
    assert ends.pop("QUEUE_FULL") > 0
    assert ends == {"INVALID_PARAMETER": len(texts)}
    assert len(seconds) > 20
