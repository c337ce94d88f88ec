"""Who is measured by `decode_throughput`, each on one thread: the engine, the model library, and matrix products alone.

A decode is timed over full batches only: the engine from the moment when its last sequence has its first token, the
library from its first token on. The library's cache is filled with noise beforehand instead of with a prompt's K and V:
its time does not depend on what they hold, and a prefill of that many prompts would take most of the run.
"""

import random
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.step_parts import step_parts
from twostroke.protocol.config import Dtype, EngineConfig, KVCacheConfig, ModelConfig
from twostroke.protocol.errors import TwostrokeError
from twostroke.protocol.ids import SequenceKey
from twostroke.protocol.requests import GenerationRequest
from twostroke.protocol.responses import SequenceOutput
from twostroke.protocol.sampling import SamplingParams
from twostroke.protocol.tokens import pack_tokens
from twostroke.worker.in_process import InProcessExecutor
from twostroke.worker.loading import load_model_runner

MAX_SEQUENCES = 32
_MIN_STEPS = 4
_DEADLINE_S = 200.0


class Prompts:
    """Random prompts, never the same twice, so that none is in the prefix cache; the same in every run.

    Args:
        vocab_size: Token ids are below it.
    """

    def __init__(self, vocab_size: int) -> None:
        self._draw = random.Random(20)
        self._vocab_size = vocab_size

    def make(self, tokens: int) -> list[int]:
        """One prompt."""
        return [self._draw.randrange(self._vocab_size) for _ in range(tokens)]


class ArrivalTimes:
    """A sink that notes when each token of one sequence came."""

    loop = None

    def __init__(self) -> None:
        self.times: list[float] = []
        self.error: TwostrokeError | None = None
        self._ended = threading.Event()

    def feed(self, output: SequenceOutput) -> None:
        """See `ResultSink`; an output of the in-process form is one token."""
        self.times.append(time.perf_counter())
        if output.error is not None:
            self.error = TwostrokeError(output.error.message)
        if output.final:
            self._ended.set()

    def fail(self, error: TwostrokeError) -> None:
        """See `ResultSink`."""
        self.error = error
        self._ended.set()

    def wake(self) -> None:
        """See `ResultSink`; nobody waits on a loop."""

    def wait(self) -> list[float]:
        """The times, once the sequence ended.

        Raises:
            TimeoutError: It did not end in time.
            TwostrokeError: It failed.
        """
        if not self._ended.wait(_DEADLINE_S):
            raise TimeoutError(f"a sequence did not end within {_DEADLINE_S} s after {len(self.times)} tokens")
        if self.error is not None:
            raise self.error
        return self.times


def full_batch_rate(arrivals: Sequence[Sequence[float]]) -> float:
    """Tokens/s while all sequences ran: after the last one's first token, until the first one's last.

    Args:
        arrivals: For each sequence, when each of its tokens came.

    Raises:
        ValueError: There was no such time.
    """
    begin, end = max(times[0] for times in arrivals), min(times[-1] for times in arrivals)
    if end <= begin:
        raise ValueError("the sequences never ran all together; ask for more tokens")
    return sum(begin < at <= end for times in arrivals for at in times) / (end - begin)


class EngineContender:
    """The real engine in its in-process form.

    Args:
        folder: The model.
        dtype: Of weights and cache.
        prompts: Where prompts come from.
    """

    def __init__(self, folder: Path, dtype: Dtype, prompts: Prompts) -> None:
        self._prompts = prompts
        config = EngineConfig(threads=1, max_sequences=MAX_SEQUENCES, kv_cache=KVCacheConfig(cpu_memory_gib=2.0))
        model = ModelConfig(path=str(folder), dtype=dtype)
        self._runner = load_model_runner(model, config, lambda _: None)
        self._executor = InProcessExecutor(self._runner, model, config)

    def close(self) -> None:
        """End the engine."""
        self._executor.shutdown(10.0)

    def decode_rate(self, batch: int, prompt_tokens: int, tokens: int) -> float:
        """Tokens/s of decoding `batch` sequences at once, for `tokens` steps."""
        # The first sequences decode while the last ones' prompts are computed.
        length = tokens + 1 + batch * prompt_tokens // EngineConfig().max_batched_tokens
        sinks = [self._submit(self._prompts.make(prompt_tokens), length) for _ in range(batch)]
        return full_batch_rate([sink.wait() for sink in sinks])

    def step_parts(self, batch: int, prompt_tokens: int, steps: int) -> dict[str, float]:
        """Milliseconds of each part of a step that decodes `batch` sequences; see `step_parts`. Ends the engine."""
        self.close()
        return step_parts(self._runner, [self._prompts.make(prompt_tokens) for _ in range(batch)], steps)

    def prefill_rate(self, prompt_tokens: int) -> float:
        """Prompt tokens/s of one prompt, up to its first token."""
        return prompt_tokens / self.ttft_s(self._prompts.make(prompt_tokens))

    def ttft_s(self, prompt: list[int]) -> float:
        """Seconds to the first token of one prompt on an idle engine."""
        begin = time.perf_counter()
        return self._submit(prompt, 1).wait()[0] - begin

    def _submit(self, prompt: list[int], tokens: int) -> ArrivalTimes:
        sink = ArrivalTimes()
        sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        key = SequenceKey(self._executor.draw_client_id())
        self._executor.submit_to(GenerationRequest(key=key, prompt_ids=pack_tokens(prompt), sampling=sampling), sink)
        return sink


class _StopAfter(transformers.StoppingCriteria):
    """Notes when each token came, and stops after `seconds`, but not before a few steps."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        """Whether each of the sequences [batch] ends now."""
        del scores
        self.times.append(time.perf_counter())
        over = len(self.times) > _MIN_STEPS and self.times[-1] - self.times[0] > self._seconds
        return torch.full((len(input_ids),), over)


class LibraryContender:
    """The model library (transformers) as it comes, with its default attention and cache.

    Args:
        folder: The model.
        dtype: Of weights and cache.
        prompts: Where prompts come from.
    """

    def __init__(self, folder: Path, dtype: Dtype, prompts: Prompts) -> None:
        self._prompts = prompts
        library: Any = transformers
        self._model: Any = library.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype.value))
        self._model.eval().requires_grad_(False)
        self._linears = [one for one in self._model.modules() if isinstance(one, torch.nn.Linear)]

    def decode_rate(self, batch: int, prompt_tokens: int, tokens: int, seconds: float) -> float:
        """Tokens/s of `generate` after its first token, for `tokens` steps or about `seconds`."""
        prompts = torch.tensor([self._prompts.make(prompt_tokens) for _ in range(batch)])
        clock = _StopAfter(seconds)
        self._model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            cache=self._filled_cache(batch, prompt_tokens - 1),
            do_sample=False,
            max_new_tokens=tokens + 1,
            eos_token_id=None,
            pad_token_id=0,
            stopping_criteria=[clock],
        )
        return (len(clock.times) - 1) * batch / (clock.times[-1] - clock.times[0])

    @torch.inference_mode()
    def prefill_rate(self, prompt_tokens: int) -> float:
        """Prompt tokens/s of one plain forward pass, which fills its cache and gives the last token's logits."""
        prompt = torch.tensor([self._prompts.make(prompt_tokens)])
        begin = time.perf_counter()
        self._model(prompt, use_cache=True, logits_to_keep=1)
        return prompt_tokens / (time.perf_counter() - begin)

    @torch.inference_mode()
    def matrix_products_rate(self, batch: int, seconds: float) -> float:
        """Tokens/s if a step were nothing but the model's matrix products, through the library's modules."""
        sizes = {one.in_features for one in self._linears}
        rows = {size: torch.randn(1, batch, size, dtype=self._model.dtype) for size in sizes}
        begin, steps = time.perf_counter(), 0
        while steps < _MIN_STEPS or time.perf_counter() - begin < seconds:
            for linear in self._linears:
                linear(rows[linear.in_features])
            steps += 1
        return steps * batch / (time.perf_counter() - begin)

    def _filled_cache(self, batch: int, positions: int) -> Any:
        """The library's default cache, holding noise."""
        config = self._model.config
        library: Any = transformers
        cache = library.DynamicCache(config=config)
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (batch, config.num_key_value_heads, positions, head_dim)
        for layer in range(config.num_hidden_layers):
            noise = torch.randn(2, *shape).to(self._model.dtype)
            cache.update(noise[0], noise[1], layer)
        return cache
