"""What this host's processor is good at."""

import torch


def multiplies_bfloat16() -> bool:
    """Whether torch's library of matrix products uses this processor's vector instructions for bfloat16.

    Where not (x86 with AVX2 alone), torch multiplies such matrices element by element, ten times slower than float32.
    """
    supported: bool = torch.ops.mkldnn._is_mkldnn_bf16_supported()  # noqa: SLF001 - there is no public way to ask
    return supported
