"""The library face: the same answers from an engine in this process and from a worker of its own."""

from pathlib import Path

import pytest

from tests.support.tiny_models import save_tiny_model
from tests.support.tiny_tokenizer import VOCAB_SIZE, save_tiny_tokenizer
from twostroke import LLM, SamplingParams
from twostroke.protocol.config import EngineConfig, KVCacheConfig
from twostroke.protocol.errors import InvalidRequestError, ModelError

pytestmark = pytest.mark.cluster

ENGINE = EngineConfig(threads=1, shutdown_s=5.0, kv_cache=KVCacheConfig(num_blocks=64))
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model with a tokenizer."""
    folder = save_tiny_model(tmp_path_factory.mktemp("model") / "tiny", vocab_size=VOCAB_SIZE)
    save_tiny_tokenizer(folder)
    return folder


def test_both_forms_give_the_same_answers(folder: Path) -> None:
    """Texts and token ids may be mixed; answers come in the order of the prompts, with text and token ids."""
    prompts: list[str | list[int]] = ["hello there", [5, 6, 7], "once upon a time"]
    answers = []
    for form in ("in_process", "ipc"):
        with LLM(folder, form=form, dtype="float32", engine=ENGINE) as llm:
            answers.append(llm.generate(prompts, GREEDY, timeout_s=60))
    assert answers[0] == answers[1]
    assert answers[0][1].prompt_ids == [5, 6, 7]
    assert [len(answer.completion.token_ids) for answer in answers[0]] == [8, 8, 8]


def test_a_bad_prompt_raises_and_leaves_the_model_usable(folder: Path) -> None:
    """The error names the field; the next call works."""
    with LLM(folder, form="in_process", dtype="float32", engine=ENGINE) as llm:
        with pytest.raises(InvalidRequestError, match="prompt holds token id"):
            llm.generate([[5], [10**6]], GREEDY, timeout_s=60)
        assert len(llm.generate([[5]], GREEDY, timeout_s=60)) == 1


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    """The reason names the folder."""
    with pytest.raises(ModelError, match=str(tmp_path)):
        LLM(tmp_path, form="in_process", engine=ENGINE)


def test_text_needs_a_tokenizer(tmp_path: Path) -> None:
    """A model without tokenizer takes token ids only, and says so."""
    folder = save_tiny_model(tmp_path / "bare")
    with LLM(folder, form="in_process", dtype="float32", engine=ENGINE) as llm:
        with pytest.raises(ModelError, match=r"no tokenizer\.json"):
            llm.generate(["text"])
        assert llm.generate([[5]], GREEDY, timeout_s=60)[0].text == ""
