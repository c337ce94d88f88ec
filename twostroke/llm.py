"""The library face: `LLM(model).generate(prompts)`, over an engine in this process or in a worker of its own.

from twostroke import LLM, SamplingParams

with LLM("/models/SmolLM2-135M-Instruct") as llm:
    for answer in llm.generate(["The capital of France is"], SamplingParams(max_tokens=8)):
        print(answer.text)
"""

import enum
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import structlog

from twostroke.executor.base import GenerationExecutor
from twostroke.executor.ipc import IpcExecutor
from twostroke.executor.result import Completion, GenerationResult
from twostroke.frontend.tokenizer import TextModel
from twostroke.protocol.config import Dtype, EngineConfig, ModelConfig
from twostroke.protocol.errors import ModelError
from twostroke.protocol.ids import SequenceKey
from twostroke.protocol.requests import GenerationRequest
from twostroke.protocol.sampling import SamplingParams
from twostroke.protocol.tokens import pack_tokens
from twostroke.protocol.worker import Role

Prompt = str | Sequence[int]
"""Text, or token ids."""


class ExecutorForm(enum.StrEnum):
    """Where the engine runs: in the caller's process, or in a worker process that this one launches."""

    IN_PROCESS = "in_process"
    IPC = "ipc"


def choose_executor(
    form: ExecutorForm, model: ModelConfig, engine: EngineConfig, progress: Callable[[str], None]
) -> GenerationExecutor:
    """An executor of the form asked for, ready to take requests; says which in the log.

    Raises:
        ConfigError: A setting does not go with the model or the host.
        ModelError: The model cannot be served.
        EngineDeadError: The worker died while it started.
    """
    structlog.get_logger(__name__).info("executor", form=form.value, model=model.path)
    if form is ExecutorForm.IPC:
        return IpcExecutor.launch(
            "twostroke.worker", role=Role.AGGREGATED, model=model, engine=engine, on_progress=progress
        )
    # Imported only here: the other form never needs the engine, and with it torch, in this process.
    from twostroke.worker.in_process import InProcessExecutor  # noqa: PLC0415

    return InProcessExecutor.load(model, engine, progress)


@dataclass(frozen=True, slots=True)
class Generated:
    """One prompt's answer.

    Attributes:
        prompt_ids: The prompt as token ids.
        text: The output, special tokens left out; "" for a model without tokenizer.
        completion: Token ids, logprobs and why it ended.
    """

    prompt_ids: list[int]
    text: str
    completion: Completion


class LLM:
    """A loaded model that answers prompts. Close it with `shutdown`, or use it in a `with` statement.

    Args:
        model: Hugging Face folder.
        form: Where the engine runs.
        dtype: Element type of weights and cache.
        max_model_len: Prompt and output tokens at most; None takes the model's own limit.
        engine: The engine's settings.
        progress: Told what is being done while the model loads.

    Raises:
        ConfigError: A setting does not go with the model or the host.
        ModelError: The model cannot be served.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        form: ExecutorForm | str = ExecutorForm.IPC,
        dtype: Dtype | str = Dtype.AUTO,
        max_model_len: int | None = None,
        engine: EngineConfig | None = None,
        progress: Callable[[str], None] = lambda _: None,
    ) -> None:
        config = ModelConfig(path=str(model), dtype=Dtype(dtype), max_model_len=max_model_len)
        self._text = _load_text(Path(model))
        self.executor = choose_executor(ExecutorForm(form), config, engine or EngineConfig(), progress)

    def generate(
        self, prompts: Sequence[Prompt], sampling: SamplingParams | None = None, timeout_s: float | None = None
    ) -> list[Generated]:
        """Answer all prompts, in their order; they run together.

        Args:
            prompts: Texts, or sequences of token ids.
            sampling: How tokens are chosen, the same for all.
            timeout_s: All answers together may take so long; None for ever.

        Raises:
            RequestError: A prompt was refused or failed; the others are aborted.
            ModelError: A prompt is text, and the model has no tokenizer.
            TimeoutError: Not all ended in time; they are aborted.
        """
        encoded = [self._encode(prompt) for prompt in prompts]
        ends_at = None if timeout_s is None else time.monotonic() + timeout_s
        results: list[GenerationResult] = []
        try:
            results.extend(self._submit(prompt_ids, sampling or SamplingParams()) for prompt_ids in encoded)
            completions = [result.wait(_left(ends_at)) for result in results]
        finally:
            for result in results:
                result.abort()  # nothing happens to those that have ended
        return [
            Generated(prompt_ids, self._decode(completion), completion)
            for prompt_ids, completion in zip(encoded, completions, strict=True)
        ]

    def shutdown(self) -> None:
        """End the engine; safe to call twice."""
        self.executor.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def _submit(self, prompt_ids: list[int], sampling: SamplingParams) -> GenerationResult:
        key = SequenceKey(self.executor.draw_client_id())
        return self.executor.submit(GenerationRequest(key=key, prompt_ids=pack_tokens(prompt_ids), sampling=sampling))

    def _encode(self, prompt: Prompt) -> list[int]:
        if not isinstance(prompt, str):
            return list(prompt)
        if self._text is None:
            raise ModelError("this model's folder has no tokenizer.json; give prompts as token ids")
        return self._text.encode(prompt, add_special_tokens=True)

    def _decode(self, completion: Completion) -> str:
        return "" if self._text is None else self._text.decode(completion.token_ids)


def _load_text(folder: Path) -> TextModel | None:
    """The model's tokenizer, if it has one: prompts may be token ids."""
    return TextModel.load(folder) if (folder / "tokenizer.json").is_file() else None


def _left(ends_at: float | None) -> float | None:
    return None if ends_at is None else max(0.0, ends_at - time.monotonic())
