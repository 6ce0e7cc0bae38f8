"""Finding the cache a request starts from: its session's, or the longest prefix in the tree."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from coldpage.engine.admission import common_prefix_tokens
from coldpage.engine.requests import LiveRequest
from coldpage.engine.sessions import SessionStore
from coldpage.page import RETAINED_PRIORITY
from coldpage.sequence import KVCacheStatus
from coldpage.types import Int32Array

if TYPE_CHECKING:
    from coldpage.manager import KVCacheManager
    from coldpage.sequence import KVCache

__all__ = ["CacheOpener"]

# A sequence rebuilt this often because matched blocks were lost starts from nothing: that always
# ends.
_MAX_MATCHED_REBUILDS: Final = 2


class CacheOpener:
    """Opens the suspended cache of a request and takes it back. Owns no cache itself."""

    def __init__(
        self, manager: KVCacheManager, sessions: SessionStore, has_sliding_window: bool
    ) -> None:
        self._manager = manager
        self._sessions = sessions
        self._has_sliding_window = has_sliding_window

    def open(self, live: LiveRequest) -> None:
        """Give a request its suspended cache, cut so that its last token is to be computed."""
        is_hopeless = live.num_rebuilds > _MAX_MATCHED_REBUILDS
        kv = self._create(live, live.tokens[:0] if is_hopeless else live.tokens)
        by_level = kv.cached_tokens_by_level
        key = live.request.session_key
        session_kv = None if key is None else self._sessions.take(key)
        if session_kv is not None:
            kv = self._longer_match(session_kv, kv, live.tokens)
        self._adopt(live, kv, by_level)

    def rematch(self, live: LiveRequest) -> None:
        """Look once more, just before a request first runs, for blocks that others committed
        meanwhile.
        """
        old = live.cache
        if live.num_pending_tokens <= self._manager.tokens_per_block:
            return
        new = self._create(live, live.tokens)
        if new.num_committed_tokens <= old.num_committed_tokens:
            new.close()
            return
        old.close()
        self._adopt(live, new, new.cached_tokens_by_level)

    def give_back(self, live: LiveRequest) -> None:
        """Let go of a request's cache: keep it for the session, or close it: found by content."""
        kv, live.kv = live.kv, None
        if kv is None:
            return
        key = live.request.session_key
        if key is None:
            kv.close()
            return
        if kv.status is KVCacheStatus.ACTIVE:
            kv.suspend()
        self._sessions.put(key, kv)

    def _create(self, live: LiveRequest, tokens: Int32Array) -> KVCache:
        # Behind a sliding window pages are stale and gone, so a cache can not be cut back there:
        # match less.
        if self._has_sliding_window:
            tokens = tokens[: live.num_tokens - 1]
        return self._manager.create_kv_cache(tokens, scope=live.request.scope)

    def _longer_match(self, session_kv: KVCache, matched: KVCache, tokens: Int32Array) -> KVCache:
        """The one of two suspended caches that reuses more, cut to that; the other is closed."""
        common = common_prefix_tokens(session_kv.tokens, tokens)
        must_cut = common < session_kv.num_committed_tokens or common == len(tokens)
        if common < matched.num_committed_tokens or (must_cut and self._has_sliding_window):
            session_kv.close()
            return matched
        session_kv.truncate(common)
        matched.close()
        return session_kv

    def _adopt(self, live: LiveRequest, kv: KVCache, by_level: tuple[int, ...]) -> None:
        # Logits come from computing the last token, so it is never taken from the cache.
        if kv.history_length >= live.num_tokens:
            kv.truncate(live.num_tokens - 1)
        if live.request.retain:
            kv.raise_priority(RETAINED_PRIORITY)
        live.kv = kv
        live.num_matched_tokens = kv.history_length
        if live.first_token_at_s is None:
            live.set_cached_tokens(by_level, kv.history_length)
