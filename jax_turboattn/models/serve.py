"""Continuous batching over one paged cache: page allocator, scheduler, sampling.

The host decides, the device computes: each step packs one token of every decoding sequence and as much of the waiting
prompts as fits into a fixed number of rows, so that two compiled shapes (decode only, and mixed) serve every mixture of
lengths. One small array of sampled tokens comes back a step.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TextIO

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from .. import PagedKVCache
from .decoder import Decoder

_UNMAPPED = -1  # a page id outside the pool: reads see no key there, writes are dropped


class OutOfPages(Exception):
    """The pool has fewer free pages than were asked for; nothing was taken."""


class PageAllocator:
    """Who owns which page: a free list and one reference count per page."""

    def __init__(self, num_pages: int):
        self._free = collections.deque(range(num_pages))
        self._owners = np.zeros(num_pages, np.int64)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Takes `count` pages with one owner each.

        Raises:
          OutOfPages: fewer are free; none is taken.
        """
        if count > len(self._free):
            raise OutOfPages(f"PageAllocator.allocate: count must be <= {len(self._free)} free pages, got {count}")
        pages = [self._free.popleft() for _ in range(count)]
        self._owners[pages] = 1
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """One more owner for each of these pages, which must be in use."""
        self._check(pages, "share")
        for page in pages:
            self._owners[page] += 1

    def release(self, pages: Sequence[int]) -> list[int]:
        """One owner less; returns the pages that have none left and are free again."""
        self._check(pages, "release")
        freed = []
        for page in pages:
            self._owners[page] -= 1
            if not self._owners[page]:
                self._free.append(page)
                freed.append(page)
        return freed

    def _check(self, pages, function):
        for page in pages:
            if not 0 <= page < self._owners.size or not self._owners[page]:
                raise ValueError(f"PageAllocator.{function}: pages must be in use, got page {page}")


@dataclasses.dataclass(frozen=True)
class Completion:
    """What became of a request: the new tokens, without the stop token; `reason` is "stop" or "length"."""

    tokens: list[int]
    reason: str


@dataclasses.dataclass
class Stats:
    """Counts since the server was made."""

    steps: int = 0
    prefill_tokens: int = 0  # prompt tokens that were computed
    shared_tokens: int = 0  # prompt tokens whose pages were already there
    new_tokens: int = 0
    seconds: float = 0.0  # in steps, compilation left out
    peak_pages: int = 0

    @property
    def tokens_per_second(self) -> float:
        return self.new_tokens / self.seconds if self.seconds else 0.0


@dataclasses.dataclass
class _Sequence:
    id: int
    tokens: list[int]  # prompt, then what was sampled
    prompt_len: int
    max_tokens: int
    temperature: float
    seed: int
    pages: list[int] = dataclasses.field(default_factory=list)
    shared: int = 0  # leading pages that another sequence wrote
    cached: int = 0  # tokens whose keys and values are in the cache


class Server:
    """Runs requests through a decoder, several at a time, on one cache.

    A request is admitted when a slot and all the pages it can ever need are free, in the order of submission: nothing
    has to be thrown out later. Whole pages of a prompt that a running sequence has already computed are shared.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        num_pages: int,
        page_size: int = 64,
        kv_dtype: Any = None,
        max_batch: int = 8,
        max_length: int = 1024,
        chunk: int = 128,
        stop_token: int | None = None,
    ):
        """Creates the cache.

        Args:
          decoder: the model.
          num_pages, page_size: N and P of the pool.
          kv_dtype: dtype of the cache, None for the decoder's.
          max_batch: B, sequences that run at once.
          max_length: tokens of the longest sequence, prompt and completion.
          chunk: tokens of a step that has prompts in it; at least max_batch.
          stop_token: ends a completion.
        Raises:
          ValueError: a size that makes no sense, or a kv_dtype that the decoder's dtype does not go with.
        """
        for name, value in {"num_pages": num_pages, "max_batch": max_batch, "max_length": max_length}.items():
            if value < 1:
                raise ValueError(f"Server: {name} must be >= 1, got {value}")
        if chunk < max_batch:
            raise ValueError(f"Server: chunk must be >= max_batch = {max_batch}, got {chunk}")
        config = decoder.config
        self._graph, self._params = nnx.split(decoder)
        self._cache = PagedKVCache.create(
            num_pages,
            config.num_kv_heads,
            config.head_dim,
            page_size=page_size,
            num_layers=config.num_layers,
            dtype=decoder.dtype if kv_dtype is None else kv_dtype,
            param_dtype=decoder.dtype,
        )
        self._vocab_size = config.vocab_size
        self._num_pages, self._page_size = num_pages, page_size
        self._max_length, self._chunk, self._stop_token = max_length, chunk, stop_token
        self._allocator = PageAllocator(num_pages)
        self._slots: list[_Sequence | None] = [None] * max_batch
        self._waiting: collections.deque[_Sequence] = collections.deque()
        # (page before or -1, the page's tokens) -> page. A page id names its whole history: it stays alive as long as
        # any page that follows it.
        self._prefixes: dict[tuple[int, tuple[int, ...]], int] = {}
        self._prefix_of_page: dict[int, tuple[int, tuple[int, ...]]] = {}
        self._submitted = 0
        self.stats = Stats()

    @property
    def cache(self) -> PagedKVCache:
        """The cache; it is donated to the next step, so only its shapes and types outlive that."""
        return self._cache

    @property
    def num_running(self) -> int:
        return sum(sequence is not None for sequence in self._slots)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_free_pages(self) -> int:
        return self._allocator.num_free

    def submit(self, prompt: Iterable[int], max_tokens: int, *, temperature: float = 0.0, seed: int = 0) -> int:
        """Queues a request and returns its id.

        Args:
          prompt: tokens, at least one.
          max_tokens: of the completion.
          temperature: 0 is greedy; else tokens are drawn from softmax(logits / temperature). A request's draws depend
            on its seed and its own tokens only, never on what else runs.
        Raises:
          ValueError: an empty or too long prompt, tokens outside the vocabulary, or more pages than the pool has.
        """
        prompt = [int(token) for token in prompt]
        if not prompt:
            raise ValueError("Server.submit: prompt must have at least one token, got none")
        if not all(0 <= token < self._vocab_size for token in prompt):
            raise ValueError(f"Server.submit: prompt must hold tokens of 0..{self._vocab_size - 1}, got {prompt}")
        if max_tokens < 1:
            raise ValueError(f"Server.submit: max_tokens must be >= 1, got {max_tokens}")
        if not 0 <= temperature < float("inf"):
            raise ValueError(f"Server.submit: temperature must be finite and >= 0, got {temperature}")
        length = len(prompt) + max_tokens
        if length > self._max_length:
            raise ValueError(
                f"Server.submit: prompt and max_tokens must be <= max_length = {self._max_length} together, "
                f"got {len(prompt)} + {max_tokens}"
            )
        sequence = _Sequence(self._submitted, prompt, len(prompt), max_tokens, temperature, seed)
        if self._pages_for(sequence) > self._num_pages:
            raise ValueError(
                f"Server.submit: prompt and max_tokens must fit the pool of {self._num_pages} pages of "
                f"{self._page_size} tokens, got {len(prompt)} + {max_tokens}"
            )
        self._submitted += 1
        self._waiting.append(sequence)
        return sequence.id

    def warm_up(self) -> None:
        """Compiles both step shapes, on an empty batch."""
        for rows in (len(self._slots), self._chunk):
            self._run([0] * len(self._slots), rows)

    def run(self, on_step: Callable[[Server], None] = lambda server: None) -> dict[int, Completion]:
        """Steps until every request is done; completions by id. `on_step` is called after each step."""
        completions = {}
        while self._waiting or self.num_running:
            completions |= self.step()
            on_step(self)
        return completions

    def step(self) -> dict[int, Completion]:
        """Admits, computes one batch, samples; returns the requests that finished."""
        started = time.perf_counter()
        self._admit()
        counts, rows = self._schedule()
        sampled = self._run(counts, rows)
        finished = {}
        for slot, (sequence, count) in enumerate(zip(self._slots, counts)):
            if not count:
                continue
            self.stats.prefill_tokens += min(count, max(0, sequence.prompt_len - sequence.cached))
            sequence.cached += count
            self._publish_prefix(sequence)
            if sequence.cached < len(sequence.tokens):
                continue  # the prompt goes on in the next step
            token = int(sampled[slot])
            stopped = token == self._stop_token
            if not stopped:
                sequence.tokens.append(token)
                self.stats.new_tokens += 1
            new = len(sequence.tokens) - sequence.prompt_len
            if stopped or new == sequence.max_tokens:
                finished[sequence.id] = Completion(
                    sequence.tokens[sequence.prompt_len :], "stop" if stopped else "length"
                )
                self._slots[slot] = None
                for page in self._allocator.release(sequence.pages):
                    if page in self._prefix_of_page:
                        del self._prefixes[self._prefix_of_page.pop(page)]
        self.stats.steps += 1
        self.stats.seconds += time.perf_counter() - started
        return finished

    def _pages_for(self, sequence):
        tokens = sequence.prompt_len + sequence.max_tokens - 1  # the last token is never fed back
        return -(-tokens // self._page_size)

    def _admit(self):
        for slot, occupant in enumerate(self._slots):
            if occupant is not None or not self._waiting:
                continue
            sequence = self._waiting[0]
            shared = self._find_prefix(sequence)
            needed = self._pages_for(sequence) - len(shared)
            if needed > self._allocator.num_free:
                return  # first come, first served: a smaller request behind it could starve it
            self._waiting.popleft()
            self._allocator.share(shared)
            sequence.pages = shared + self._allocator.allocate(needed)
            sequence.shared = len(shared)
            sequence.cached = len(shared) * self._page_size
            self.stats.shared_tokens += sequence.cached
            self._slots[slot] = sequence
        self.stats.peak_pages = max(self.stats.peak_pages, self._num_pages - self._allocator.num_free)

    def _page_tokens(self, sequence, index):
        return tuple(sequence.tokens[index * self._page_size : (index + 1) * self._page_size])

    def _find_prefix(self, sequence):
        """The longest run of pages that hold the prompt's beginning; the last token is always computed, for its logits."""
        pages = []
        for index in range((sequence.prompt_len - 1) // self._page_size):
            page = self._prefixes.get((pages[-1] if pages else -1, self._page_tokens(sequence, index)))
            if page is None:
                break
            pages.append(page)
        return pages

    def _publish_prefix(self, sequence):
        for index in range(min(sequence.cached, sequence.prompt_len) // self._page_size):
            page = sequence.pages[index]
            key = (sequence.pages[index - 1] if index else -1, self._page_tokens(sequence, index))
            if page not in self._prefix_of_page and key not in self._prefixes:
                self._prefixes[key] = page
                self._prefix_of_page[page] = key

    def _schedule(self):
        """New tokens of each slot in this step, and the padded row count."""
        pending = [0 if s is None else len(s.tokens) - s.cached for s in self._slots]
        if max(pending) <= 1:
            return pending, len(self._slots)
        counts = [min(n, 1) for n in pending]  # one row each: nobody waits for another's prompt
        left = self._chunk - sum(counts)
        for slot in sorted((i for i, n in enumerate(pending) if n > 1), key=lambda i: self._slots[i].id):
            extra = min(pending[slot] - 1, left)
            counts[slot] += extra
            left -= extra
        return counts, self._chunk

    def _run(self, counts, rows):
        """One device step over `counts[b]` new tokens of each slot; the sampled token of each slot, int32 [B]."""
        batch = len(self._slots)
        tokens = np.zeros(rows, np.int32)
        table = np.full((batch, -(-self._max_length // self._page_size)), _UNMAPPED, np.int32)
        kv_lens, read_only, seeds = (np.zeros(batch, np.int32) for _ in range(3))
        temperatures = np.zeros(batch, np.float32)
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        for slot, (sequence, count) in enumerate(zip(self._slots, counts)):
            if sequence is None:
                continue
            tokens[offsets[slot] : offsets[slot + 1]] = sequence.tokens[sequence.cached : sequence.cached + count]
            table[slot, : len(sequence.pages)] = sequence.pages
            kv_lens[slot] = sequence.cached + count
            read_only[slot] = sequence.shared
            seeds[slot] = np.uint32(sequence.seed & 0xFFFFFFFF).view(np.int32)
            temperatures[slot] = sequence.temperature
        sampled, self._cache = _step(
            self._graph,
            self._params,
            self._cache,
            tokens,
            table,
            kv_lens,
            offsets,
            read_only,
            seeds,
            temperatures,
            max_q_len=1 if rows == batch else rows,
        )
        return np.asarray(sampled)


class ProgressLine:
    """One line about a server: rewritten in place on a terminal, elsewhere printed every few seconds and at the end."""

    def __init__(self, stream: TextIO):
        self._stream = stream
        self._period = 0.1 if stream.isatty() else 5.0
        self._next = time.monotonic() + self._period

    def __call__(self, server: Server) -> None:
        if time.monotonic() >= self._next:
            self._write(server, last=False)
            self._next = time.monotonic() + self._period

    def end(self, server: Server) -> None:
        self._write(server, last=True)

    def _write(self, server, last):
        stats = server.stats
        text = (
            f"step {stats.steps} · running {server.num_running} · waiting {server.num_waiting} · "
            f"{stats.prefill_tokens} prompt + {stats.new_tokens} new tokens · {stats.tokens_per_second:.0f} tokens/s"
        )
        terminal = self._stream.isatty()
        self._stream.write(("\r\x1b[K" if terminal else "") + text + ("\n" if last or not terminal else ""))
        self._stream.flush()


@functools.partial(jax.jit, static_argnames=("graph", "max_q_len"), donate_argnames=("cache",))
def _step(
    graph, params, cache, tokens, page_table, kv_lens, q_offsets, read_only_pages, seeds, temperatures, *, max_q_len
):
    """One decoder step and the next token of every sequence; the cache is updated in place."""
    logits, cache = nnx.merge(graph, params).paged(
        tokens, cache, page_table, kv_lens, q_offsets, read_only_pages=read_only_pages, max_q_len=max_q_len
    )

    def sample(logits, seed, position, temperature):
        noise = jax.random.gumbel(jax.random.fold_in(jax.random.key(seed), position), logits.shape)
        drawn = jnp.argmax(logits / jnp.maximum(temperature, jnp.finfo(jnp.float32).tiny) + noise)
        return jnp.where(temperature > 0, drawn, jnp.argmax(logits)).astype(jnp.int32)

    return jax.vmap(sample)(logits, seeds, kv_lens, temperatures), cache
