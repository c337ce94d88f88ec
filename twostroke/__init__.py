"""twostroke: disaggregated prefill/decode serving for large language models.

Importing this package is cheap: the library face (`LLM`, `SamplingParams`) is loaded on first use, so that processes
which never run a model (router, HTTP frontends) never import torch.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from twostroke.llm import LLM as LLM
    from twostroke.protocol.sampling import SamplingParams as SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]

_HOMES = {"LLM": "twostroke.llm", "SamplingParams": "twostroke.protocol.sampling"}


def __getattr__(name: str) -> object:
    """Load a public name from its module on first use (PEP 562)."""
    import importlib  # noqa: PLC0415 - only for those who use the library face

    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
