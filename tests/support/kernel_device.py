"""Where tests of kernels put their tensors: on the CPU under Triton's interpreter, else on the GPU."""

import os

import torch

KERNEL_DEVICE = torch.device("cuda" if os.environ.get("TRITON_INTERPRET") == "0" else "cpu")
