"""Checkpoints in the layouts of MLX and Hugging Face, described without reading weights."""

from lily_py.checkpoint.checkpoint import Checkpoint, open_checkpoint
from lily_py.checkpoint.config import SUPPORTED_MODEL_TYPES, ModelConfig
from lily_py.checkpoint.quantization import Quantization
from lily_py.checkpoint.safetensors_header import TensorSlice
from lily_py.checkpoint.weights import Weight

__all__ = [
    "SUPPORTED_MODEL_TYPES",
    "Checkpoint",
    "ModelConfig",
    "Quantization",
    "TensorSlice",
    "Weight",
    "open_checkpoint",
]
