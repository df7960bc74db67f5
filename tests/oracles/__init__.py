"""Independent implementations to compare lily with, and the tiny random checkpoints they are compared on."""
