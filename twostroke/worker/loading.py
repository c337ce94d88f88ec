"""From configuration to an engine with a loaded model, and to what frontends are told of it."""

from collections.abc import Callable
from pathlib import Path

import structlog

from twostroke.engine.constraint_compiler import ConstraintCompiler
from twostroke.engine.engine import Engine
from twostroke.engine.interfaces import ModelFacts, Runner
from twostroke.protocol.config import EngineConfig, ModelConfig
from twostroke.protocol.errors import ModelError
from twostroke.protocol.worker import Role, WorkerDescription

LoadRunner = Callable[[ModelConfig, EngineConfig, Callable[[str], None]], Runner]
"""Loads a model; told how to report progress. Tests give an instant one."""
MakeEngine = Callable[[Runner, EngineConfig, Role], Engine]
"""Makes the engine of a loaded model. Benchmarks of what lies around it give one that costs nothing."""


def load_model_runner(model: ModelConfig, config: EngineConfig, progress: Callable[[str], None]) -> Runner:
    """Load the model.

    Raises:
        ConfigError: A setting does not go with the model or the host.
        ModelError: The model cannot be served.
    """
    progress("importing the model libraries")
    # Imported only now: this takes seconds, and the launcher wants to hear of this process before.
    from twostroke.engine.device.choice import choose_device  # noqa: PLC0415

    gpu = choose_device(config.device)
    if gpu is not None:
        from twostroke.engine.gpu_runner import GpuRunner  # noqa: PLC0415 - triton is only there beside a GPU

        return GpuRunner.load(model, config.kv_cache, config.max_batched_tokens, config.max_sequences, gpu, progress)
    from twostroke.engine.model_runner import ModelRunner  # noqa: PLC0415

    return ModelRunner.load(
        model, config.kv_cache, config.max_batched_tokens, config.max_sequences, config.threads, progress
    )


def load_constraint_compiler(model: ModelConfig, facts: ModelFacts) -> ConstraintCompiler | None:
    """What compiles the constraints of requests; None, with a warning, for a model without a usable `tokenizer.json`.

    Loaded with the model, since it stops the interpreter for a second or more: later, heartbeats would stop with it.
    """
    folder = Path(model.path).expanduser()
    if not model.path or not (folder / "tokenizer.json").is_file():
        return None
    try:
        return ConstraintCompiler.load(folder, facts)
    except ModelError as error:
        structlog.get_logger(__name__).warning("no structured output", reason=str(error))
        return None


def describe_worker(
    engine: Engine, role: Role, model: ModelConfig, config: EngineConfig, address: str
) -> WorkerDescription:
    """What frontends need to know of a worker whose engine is loaded; `address` is where they attach, or ""."""
    facts = engine.facts
    return WorkerDescription(
        role=role,
        model=model.name,
        max_model_len=facts.max_model_len,
        vocab_size=facts.vocab_size,
        eos_token_ids=facts.eos_token_ids,
        num_blocks=engine.load().blocks.total,
        max_sequences=config.max_sequences,
        layout=facts.layout,
        address=address,
    )
