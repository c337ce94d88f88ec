"""What a model's folder means: whether it is served, and whether it fits."""

from twostroke.cli.doctor.facts import Gpu, HostFacts, ModelFacts, ProbeFault, ServedModel
from twostroke.cli.doctor.finding import Finding, Status
from twostroke.cli.doctor.units import GIB, gib
from twostroke.protocol.config import ClusterConfig, EngineConfig, KVCacheConfig

FOLDER = "model.folder"
TOKENIZER = "model.tokenizer"
MEMORY = "model.memory"

_RUNTIME_BYTES = GIB // 2
"""What a worker's libraries and activations take beside weights and cache, roughly."""


def no_model(note: str) -> Finding:
    """For a run that looks at no model; `note` says why."""
    return Finding(FOLDER, Status.NOTE, note)


def check_model(path: str, facts: ModelFacts | ProbeFault) -> list[Finding]:
    """Whether the engine and the frontend would take the folder at `path`."""
    if isinstance(facts, ProbeFault):
        found = f"{path}: the process that read it {facts.what}"
        return [Finding(FOLDER, Status.PROBLEM, found, "see whether torch and transformers can be imported")]
    return [_check_folder(path, facts), _check_tokenizer(facts)]


def _check_folder(path: str, facts: ModelFacts) -> Finding:
    model = facts.served
    if model is None:
        todo = "docs/models.md says what is served, and why the rest is not"
        return Finding(FOLDER, Status.PROBLEM, f"{path} is refused: {facts.refusal}", todo)
    found = (
        f"{path}: {model.family}, {model.layers} layers, {model.dtype}, {model.max_model_len} positions; "
        "this family is served"
    )
    return Finding(FOLDER, Status.OK, found)


def _check_tokenizer(facts: ModelFacts) -> Finding:
    if facts.tokenizer_error:
        todo = "save the tokenizer in its fast form into the model's folder"
        return Finding(TOKENIZER, Status.PROBLEM, facts.tokenizer_error, todo)
    found = f"{facts.vocabulary} tokens"
    if facts.served is not None and facts.vocabulary > facts.served.vocab_size:
        todo = "take tokenizer and weights from the same model"
        found = f"{found}, but the model has {facts.served.vocab_size} embeddings"
        return Finding(TOKENIZER, Status.WARNING, found, todo)
    if not facts.chat_template:
        todo = "add chat_template.jinja to serve /v1/chat/completions; completions work without"
        return Finding(TOKENIZER, Status.NOTE, f"{found}; no chat template", todo)
    return Finding(TOKENIZER, Status.OK, f"{found}, with a chat template")


def check_host_memory(model: ServedModel, config: ClusterConfig, host: HostFacts) -> Finding:
    """Whether weights and KV cache of the configured workers fit into this host's memory."""
    roles = (config.context, config.generation)
    one = max(_worker_bytes(model, engine) for engine in (*roles, config.aggregated))
    cluster = sum(engine.replicas * _worker_bytes(model, engine) for engine in roles)
    workers = sum(engine.replicas for engine in roles)
    found = (
        f"a worker takes about {gib(one)} ({gib(model.weight_bytes)} of weights, KV cache for "
        f"{_cache_tokens(model, config.aggregated)} tokens), the {workers} of `twostroke up` {gib(cluster)}"
    )
    if host.memory is None:
        return Finding(MEMORY, Status.NOTE, f"{found}; this host does not say how much it has")
    found = f"{found}; {gib(host.memory)} can be used"
    todo = "lower kv_cache.cpu_memory_gib, take a smaller model, or set model.dtype to bfloat16"
    if one > host.memory:
        return Finding(MEMORY, Status.PROBLEM, found, todo)
    if cluster > host.memory:
        return Finding(MEMORY, Status.WARNING, found, f"{todo}; or run the roles on several hosts")
    return Finding(MEMORY, Status.OK, found)


def check_gpu_memory(model: ServedModel, config: ClusterConfig, gpus: tuple[Gpu, ...]) -> Finding:
    """Whether weights and a useful KV cache fit into the GPU with the least free memory."""
    least = min(range(len(gpus)), key=lambda number: gpus[number].free_bytes)
    left = gpus[least].free_bytes - model.weight_bytes - _RUNTIME_BYTES
    found = f"{gib(model.weight_bytes)} of weights; GPU {least} has {gib(gpus[least].free_bytes)} free"
    cache = config.context.kv_cache
    blocks = _gpu_blocks(model, cache, left)
    if left <= 0 or blocks < 1:
        return Finding(MEMORY, Status.PROBLEM, found, "end what else uses the GPU, or take a smaller model")
    tokens = blocks * cache.block_size
    found = f"{found}, which leaves a KV cache of {tokens} tokens"
    if tokens < model.max_model_len:
        todo = f"a sequence of {model.max_model_len} tokens would not fit: set model.max_model_len to at most {tokens}"
        return Finding(MEMORY, Status.WARNING, found, todo)
    return Finding(MEMORY, Status.OK, found)


def _gpu_blocks(model: ServedModel, cache: KVCacheConfig, left: int) -> int:
    if cache.num_blocks is not None:
        return cache.num_blocks if cache.num_blocks * model.block_bytes <= left else 0
    return int(left * cache.memory_fraction) // model.block_bytes


def _worker_bytes(model: ServedModel, engine: EngineConfig) -> int:
    return model.weight_bytes + _cache_bytes(model, engine) + _RUNTIME_BYTES


def _cache_bytes(model: ServedModel, engine: EngineConfig) -> int:
    cache = engine.kv_cache
    if cache.num_blocks is not None:
        return cache.num_blocks * model.block_bytes
    return int(cache.cpu_memory_gib * GIB)


def _cache_tokens(model: ServedModel, engine: EngineConfig) -> int:
    return _cache_bytes(model, engine) // model.block_bytes * engine.kv_cache.block_size
