"""Settings out of range are refused by name, with the value."""

import re

import pytest

from twostroke.protocol.config import ClusterConfig, Dtype, RoutingPolicy, parse_config
from twostroke.protocol.errors import ConfigError
from twostroke.protocol.sampling import SamplingParams
from twostroke.protocol.worker import Role


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("temperature", -0.1),
        ("temperature", 100.5),
        ("temperature", float("nan")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("seed", -1),
        ("seed", 1 << 63),
        ("stop_token_ids", tuple(range(129))),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", float("inf")),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("frequency_penalty", float("nan")),
        ("logit_bias", ((1, 100.5),)),
        ("logit_bias", ((1, 1.0), (1, 2.0))),
        ("logit_bias", tuple((token, 1.0) for token in range(1025))),
        ("bad_words", ((),)),
        ("bad_words", ((1,) * 257,)),
        ("bad_words", ((1,),) * 257),
        ("prompt_logprobs", -1),
        ("prompt_logprobs", 21),
        ("logprobs", 21),
        ("logprobs", -1),
    ],
)
def test_a_sampling_parameter_out_of_range_is_refused_by_name(field: str, value: object) -> None:
    """The message starts with the field, so that a frontend can name it as `param`."""
    with pytest.raises(ValueError, match=rf"^{field} must be "):
        SamplingParams(**{field: value})  # type: ignore[arg-type]  # wrong values on purpose


def test_min_tokens_may_not_exceed_max_tokens() -> None:
    """Both values are named."""
    with pytest.raises(ValueError, match=r"^min_tokens must be at most max_tokens \(3\), not 4"):
        SamplingParams(max_tokens=3, min_tokens=4)


def test_penalties_are_known_by_their_neutral_values() -> None:
    """Rows without any cost nothing."""
    assert not SamplingParams(min_p=0.5, logit_bias=((1, 1.0),)).penalized
    assert all(
        SamplingParams(**{field: 0.5}).penalized  # type: ignore[arg-type]  # three fields of one type
        for field in ("repetition_penalty", "presence_penalty", "frequency_penalty")
    )


def test_temperature_zero_is_greedy() -> None:
    """And nothing else is."""
    assert SamplingParams(temperature=0.0).greedy
    assert not SamplingParams(temperature=0.01).greedy


def test_an_empty_document_means_all_defaults() -> None:
    """As an empty YAML file loads."""
    assert parse_config(None, "empty.yaml") == ClusterConfig()


def test_a_document_sets_what_it_names_and_leaves_the_rest() -> None:
    """A section of each role."""
    config = parse_config(
        {
            "model": {"path": "/models/tiny", "dtype": "float32"},
            "context": {"replicas": 2, "kv_cache": {"block_size": 8}},
            "router": {"policy": {"context": "round_robin"}},
        },
        "c.yaml",
    )
    assert config.model.name == "tiny"
    assert config.model.dtype is Dtype.FLOAT32
    assert config.engine(Role.CONTEXT).replicas == 2
    assert config.engine(Role.CONTEXT).kv_cache.block_size == 8
    assert config.engine(Role.GENERATION).replicas == 1
    assert config.engine(Role.AGGREGATED) is config.aggregated
    assert config.router.policy.context is RoutingPolicy.ROUND_ROBIN
    assert config.router.policy.generation is RoutingPolicy.LEAST_LOADED


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        (
            {"generation": {"kv_cache": {"block_size": 0}}},
            "generation.kv_cache.block_size: expected a whole number >= 1, got 0",
        ),
        ({"router": {"prot": 1}}, "router.prot: there is no such setting; there are host, port, "),
        ({"modle": {}}, "modle: there is no such setting; there are model, router, "),
        ({"router": {"port": 70000}}, "router.port: expected a whole number <= 65535, got 70000"),
        (
            {"router": {"policy": {"context": "fast"}}},
            "router.policy.context: 'fast' is none of round_robin, least_loaded",
        ),
        ({"context": {"tensor_parallel": 2}}, "context.tensor_parallel: expected a whole number <= 1, got 2"),
        ({"context": {"threads": "all"}}, "context.threads: expected a whole number or nothing, got 'all'"),
        ({"context": None}, "context: expected a section of settings, got nothing; leave it out to take the defaults"),
        ({"context": {1: 2}}, "context: every name of a setting must be a text"),
        ({"workers": {"context": "tcp://a:1"}}, "workers.context: expected a list, got 'tcp://a:1'"),
        ({"workers": {"context": ["tcp://a:1", 7]}}, "workers.context[1]: expected a text, got 7"),
        ([], "expected a section of settings, got []"),
    ],
)
def test_a_wrong_setting_is_refused_with_its_path(document: object, problem: str) -> None:
    """Source, dotted path, then what is wrong, with the value and what would do."""
    with pytest.raises(ConfigError, match=re.escape(f"c.yaml: {problem}")):
        parse_config(document, "c.yaml")
