"""twostroke: disaggregated prefill/decode serving for large language models.

Importing this package is cheap: the library face (`LLM`) is loaded on first use, so that processes which never
run a model (router, HTTP frontends) never import torch.
"""

__version__ = "0.1.0"
