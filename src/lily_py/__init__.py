"""lily: Qwen3.5/3.6 hybrid models on the user's own machine."""

__version__ = "0.1.0"
