"""Cross-builds the extension for Apple Silicon on Linux and inspects the result."""
